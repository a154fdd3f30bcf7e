// The algorithms beside ring and direct: every one that covers an operation is right at every world from 1 to 64 and at
// sampled larger ones, their message and byte formulas hold, and what stands in for them where they cover nothing.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "collective/planner.hpp"
#include "collective/schedule.hpp"
#include "collective/verifier.hpp"
#include "requests.hpp"
#include "support.hpp"

namespace {

using namespace torch_iroh::collective;
using namespace torch_iroh::testing;

const std::vector<Algorithm> kFlat = {Algorithm::ring, Algorithm::direct,    Algorithm::ring_bidirectional,
                                      Algorithm::tree, Algorithm::butterfly, Algorithm::bruck};

void expect_right(const Request& request, const VerifyOptions& options) {
  const Verdict verdict = verify(request, options);
  CHECK_MESSAGE(verdict.ok, text_of(request), options.in_place ? "in place: " : "", verdict.why);
}

std::set<std::int32_t> roots_of(Op op, std::int32_t world) {
  if (!has_root(op)) return {0};
  std::set<std::int32_t> roots = {world / 3, world - 1};
  if (world <= 9)
    for (std::int32_t root = 0; root < world; ++root) roots.insert(root);
  return roots;
}

// Small worlds: every order, both layouts, the happens-before proof. Larger: two orders and one layout in turn.
void expect_right_at(Algorithm algorithm, Op op, std::int32_t world, std::uint64_t count, bool large) {
  for (const std::int32_t root : roots_of(op, world)) {
    Request request = request_of(op, algorithm, world, count, root);
    for (const bool is_uneven : {false, true}) {
      if (is_uneven && !(has_blocks(op) && count > 0)) continue;
      if (is_uneven) request.blocks = uneven(world, count);
      VerifyOptions options;
      options.orders = large ? 2 : 4;
      options.happens_before = !large;
      for (const bool in_place : {false, true}) {
        if (large && in_place == is_uneven) continue;
        options.in_place = in_place;
        options.chunk = large ? 7 : in_place ? 2 : 5;
        expect_right(request, options);
      }
    }
  }
}

std::uint64_t log2_up(std::uint64_t n) {
  std::uint64_t rounds = 0;
  while ((std::uint64_t{1} << rounds) < n) ++rounds;
  return rounds;
}

}  // namespace

TEST_CASE("algorithms: every one is right for what it covers, at every world from 1 to 64") {
  const std::vector<std::int32_t> sampled = {1, 2, 3, 4, 5, 6, 7, 9, 16, 23};
  for (std::int32_t world = 1; world <= 64; ++world) {
    if (kSanitized && std::find(sampled.begin(), sampled.end(), world) == sampled.end()) continue;
    const bool large = world > (kSanitized ? 5 : 9);
    const auto n = static_cast<std::uint64_t>(world);
    std::set<std::uint64_t> counts =
        large ? std::set<std::uint64_t>{3, 2 * n + 3} : std::set<std::uint64_t>{0, 1, 13, 2 * n};
    for (const Algorithm algorithm : kFlat) {
      for (const Op op : kOps) {
        if (!supports(algorithm, request_of(op, algorithm, world, 1))) continue;
        const bool by_blocks = has_blocks(op) || op == Op::all_to_all;
        for (const std::uint64_t count : counts)
          if (!large || !by_blocks || count <= 3) expect_right_at(algorithm, op, world, count, large);
      }
    }
  }
}

TEST_CASE("algorithms: larger worlds, sampled") {
  if (kSanitized) return;  // values, which the plain build proves
  for (const std::int32_t world : {100, 127, 257, 1000}) {
    for (const Algorithm algorithm : {Algorithm::tree, Algorithm::butterfly, Algorithm::bruck}) {
      for (const Op op : kOps) {
        Request request = request_of(op, algorithm, world, 1, world / 3);
        if (!supports(algorithm, request)) continue;
        if (world > 300 && (op == Op::all_to_all || op == Op::all_gather || op == Op::reduce_scatter)) continue;
        if (request.blocks.empty()) request.count = world > 300 ? 2 : static_cast<std::uint64_t>(world) + 7;
        VerifyOptions options;
        options.orders = 2, options.happens_before = false, options.chunk = 64, options.in_place = true;
        expect_right(request, options);
      }
    }
  }
}

TEST_CASE("algorithms: uneven blocks with leading, trailing and lone zeros are right") {
  for (const Blocks& blocks :
       {Blocks{0, 0, 5}, Blocks{5, 0, 0}, Blocks{0, 7, 0}, Blocks{1, 2, 3, 4, 5}, Blocks{9, 0, 1, 0, 0, 30, 2}}) {
    const auto world = static_cast<std::int32_t>(blocks.size());
    for (const Algorithm algorithm : kFlat) {
      for (const Op op : kOps) {
        if (!has_blocks(op)) continue;
        for (const std::int32_t root : roots_of(op, world)) {
          Request request = request_of(op, algorithm, world, 0, root);
          request.blocks = blocks;
          for (const bool in_place : {false, true}) {
            VerifyOptions options;
            options.in_place = in_place;
            expect_right(request, options);
          }
        }
      }
    }
  }
}

TEST_CASE("algorithms: messages, elements and fan-out are as the formulas say") {
  for (const std::int32_t world : {2, 3, 4, 5, 8, 13, 16, 31, 64}) {
    const auto n = static_cast<std::uint64_t>(world);
    const std::uint64_t rounds = log2_up(n);
    for (std::int32_t rank = 0; rank < world; ++rank) {
      const auto sent = [&](Algorithm algorithm, Op op, std::uint64_t count) {
        return sent_by(request_of(op, algorithm, world, count, world / 2), rank);
      };
      INFO("world ", world, ", rank ", rank);

      Sent it = sent(Algorithm::ring_bidirectional, Op::all_reduce, 20 * n);
      CHECK(it.messages == 4 * (n - 1));
      CHECK(it.elements == 40 * (n - 1));
      CHECK(it.peers.size() == std::min<std::uint64_t>(2, n - 1));
      for (const Op op : {Op::all_gather, Op::reduce_scatter}) {
        it = sent(Algorithm::ring_bidirectional, op, 10);
        CHECK(it.messages == 2 * (n - 1));
        CHECK(it.elements == 10 * (n - 1));
      }

      it = sent(Algorithm::tree, Op::all_reduce, 100);
      CHECK(it.messages <= 4);
      CHECK(it.elements <= 200);
      CHECK(it.peers.size() <= 4);
      it = sent(Algorithm::tree, Op::broadcast, 100);
      CHECK(it.messages <= 2);
      CHECK(it.elements <= 100);
      it = sent(Algorithm::tree, Op::reduce, 100);
      CHECK(it.messages == (rank == world / 2 ? 0 : 2));
      CHECK(it.elements == (rank == world / 2 ? 0 : 100));
      it = sent(Algorithm::tree, Op::gather, 10);
      CHECK(it.messages <= 2);
      it = sent(Algorithm::tree, Op::scatter, 10);
      CHECK(it.messages <= rounds + 1);  // one subtree at most passes rank N-1

      it = sent(Algorithm::butterfly, Op::all_reduce, 10 * n);
      CHECK(it.messages >= 2 * rounds);
      CHECK(it.messages <= 4 * rounds - (rounds > 0 ? 2 : 0));
      CHECK(it.elements == 20 * (n - 1));
      CHECK(it.peers.size() <= 2 * rounds);
      const bool is_power = (n & (n - 1)) == 0;
      if (is_power) CHECK(it.messages == 2 * rounds);
      if (is_power) CHECK(it.peers.size() == rounds);
      it = sent(Algorithm::butterfly, Op::reduce_scatter, 10);
      CHECK(it.messages <= rounds + 1);
      CHECK(it.elements == 10 * (n - 1));
      it = sent(Algorithm::butterfly, Op::all_gather, 10);
      CHECK(it.messages <= 2 * rounds - 1);
      CHECK(it.elements == 10 * (n - 1));

      it = sent(Algorithm::bruck, Op::all_gather, 10);
      CHECK(it.messages == rounds);
      CHECK(it.elements == 10 * (n - 1));
      it = sent(Algorithm::bruck, Op::all_to_all, 10);
      CHECK(it.messages == rounds);
      CHECK(it.elements <= 10 * rounds * (n + 1) / 2);
    }
  }
}

TEST_CASE("algorithms: no rank is inner in both trees, and both trees are shallow") {
  for (std::int32_t world = 1; world <= 300; ++world) {
    Request request = request_of(Op::all_reduce, Algorithm::tree, world, 2);
    std::vector<std::vector<std::int32_t>> parents(2, std::vector<std::int32_t>(static_cast<std::size_t>(world), -1));
    for (request.rank = 0; request.rank < world; ++request.rank) {
      std::set<std::uint64_t> inner;
      for (const Step& step : make_schedule(request).steps) {
        if (step.kind == StepKind::recv_reduce) inner.insert(step.to.offset);
        if (step.kind == StepKind::recv) parents[step.to.offset][static_cast<std::size_t>(request.rank)] = step.peer;
      }
      CHECK(inner.size() <= 1);
    }
    for (const auto& parent : parents) {
      CHECK(std::count(parent.begin(), parent.end(), -1) == 1);
      std::uint64_t deepest = 0;
      for (std::int32_t rank = 0; rank < world; ++rank) {
        std::uint64_t depth = 0;
        for (std::int32_t at = rank; at >= 0; at = parent[static_cast<std::size_t>(at)]) ++depth;
        deepest = std::max(deepest, depth);
      }
      CHECK(deepest <= log2_up(static_cast<std::uint64_t>(world) + 1));
    }
  }
}

TEST_CASE("algorithms: one rank of a million costs its own steps only") {
  const std::int32_t world = 1'000'000;
  for (const Op op : {Op::all_reduce, Op::reduce, Op::broadcast}) {
    for (const std::int32_t rank : {0, 1, 524'287, 999'999}) {
      Request request = request_of(op, Algorithm::tree, world, 1000, 17);
      request.rank = rank;
      CHECK(make_schedule(request).steps.size() <= 10);
    }
  }
  Request request = request_of(Op::all_reduce, Algorithm::butterfly, world, 10'000'000);
  for (request.rank = 0; request.rank < world; request.rank += 333'333)
    CHECK(make_schedule(request).steps.size() <= 8 * 20 + 1);
}

TEST_CASE("algorithms: what stands in where one covers nothing") {
  const auto stands_in = [](Algorithm wanted, Op op, bool even = true) {
    Request request = request_of(op, wanted, 5, 4);
    request.even = even && op == Op::all_to_all;
    return nearest(wanted, request);
  };
  for (const Algorithm algorithm : kFlat) {
    CHECK(stands_in(algorithm, Op::barrier) == Algorithm::direct);
    CHECK(stands_in(algorithm, Op::all_to_all, false) == Algorithm::direct);
    for (const Op op : kOps) {
      const Request request = request_of(op, algorithm, 5, 4);
      CHECK(supports(nearest(algorithm, request), request));
      CHECK((nearest(algorithm, request) == algorithm) == supports(algorithm, request));
      CHECK(choose_algorithm(request, 4, algorithm) == nearest(algorithm, request));
    }
  }
  CHECK(stands_in(Algorithm::ring_bidirectional, Op::broadcast) == Algorithm::ring);
  CHECK(stands_in(Algorithm::ring_bidirectional, Op::gather) == Algorithm::direct);
  CHECK(stands_in(Algorithm::tree, Op::all_gather) == Algorithm::butterfly);
  CHECK(stands_in(Algorithm::butterfly, Op::reduce) == Algorithm::tree);
  CHECK(stands_in(Algorithm::bruck, Op::all_reduce) == Algorithm::tree);
  CHECK(stands_in(Algorithm::bruck, Op::reduce_scatter) == Algorithm::butterfly);
  CHECK(stands_in(Algorithm::bruck, Op::all_to_all) == Algorithm::bruck);
  CHECK(stands_in(Algorithm::hierarchical, Op::all_reduce) == Algorithm::direct);  // no hierarchy

  Request claimed = request_of(Op::all_to_all, Algorithm::bruck, 3, 4);
  claimed.blocks[1] = 5;
  CHECK_THROWS_AS(make_schedule(claimed), std::invalid_argument);
}

TEST_CASE("algorithms: the automatic choice by size and world") {
  const auto chosen = [](Op op, std::int32_t world, std::uint64_t count, bool even = false) {
    Request request = request_of(op, Algorithm::ring, world, count);
    request.even = even;
    return choose_algorithm(request, 4, std::nullopt);
  };
  for (const Op op : kOps) {
    CHECK(chosen(op, 2, 1 << 20) == Algorithm::direct);
    CHECK(chosen(op, 8, 13) == Algorithm::direct);
  }
  for (const Op op : {Op::all_reduce, Op::reduce, Op::broadcast}) {
    CHECK(chosen(op, 9, 13) == Algorithm::tree);
    CHECK(chosen(op, 9, 1 << 14) == Algorithm::tree);  // 64 KiB
    CHECK(chosen(op, 9, (1 << 14) + 1) == Algorithm::ring);
  }
  CHECK(chosen(Op::all_gather, 9, 13) == Algorithm::bruck);
  CHECK(chosen(Op::reduce_scatter, 9, 13) == Algorithm::butterfly);
  CHECK(chosen(Op::all_gather, 9, 1 << 14) == Algorithm::ring);
  CHECK(chosen(Op::all_to_all, 9, 13) == Algorithm::direct);
  CHECK(chosen(Op::all_to_all, 9, 13, true) == Algorithm::bruck);
  CHECK(chosen(Op::all_to_all, 9, 1 << 14, true) == Algorithm::direct);
  for (const Op op : {Op::gather, Op::scatter, Op::barrier}) {
    CHECK(chosen(op, 64, 13) == Algorithm::direct);
    CHECK(chosen(op, 64, 1 << 20) == Algorithm::direct);
  }
}

TEST_CASE("algorithms: names are distinct") {
  std::set<std::string_view> names;
  for (int i = 0; i < kAlgorithmCount; ++i) names.insert(name_of(static_cast<Algorithm>(i)));
  CHECK(names.size() == kAlgorithmCount);
  CHECK(names.count("?") == 0);
  CHECK(name_of(static_cast<Algorithm>(kAlgorithmCount)) == "?");
}
