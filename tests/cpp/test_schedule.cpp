// Schedules and their verifier: every operation at every small world is proved right, the formulas in ring.cpp,
// direct.cpp and barrier.cpp hold, and spoiled schedules are refused (so that "proved" means something).
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "collective/hierarchy.hpp"
#include "collective/schedule.hpp"
#include "collective/verifier.hpp"
#include "requests.hpp"
#include "support.hpp"

namespace {

using namespace torch_iroh::collective;
using namespace torch_iroh::testing;

// Schedules are values: the plain build proves them all. Sanitizers watch the memory of makers and verifier, which
// every kind of world shows: a power of two or not, odd or even, smaller or larger than the count.
const std::vector<std::int32_t> kWorlds = torch_iroh::testing::kSanitized
                                              ? std::vector<std::int32_t>{1, 2, 3, 5, 8}
                                              : std::vector<std::int32_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33};
const std::vector<std::uint64_t> kCounts = torch_iroh::testing::kSanitized
                                               ? std::vector<std::uint64_t>{0, 1, 13}
                                               : std::vector<std::uint64_t>{0, 1, 2, 13, 64};
const std::vector<Algorithm> kAlgorithms = {Algorithm::ring, Algorithm::direct};

void expect_right(const Request& request) {
  const std::vector<Program> programs = programs_of(request);
  std::uint64_t elements = 0;
  for (const Program& program : programs)
    for (const Step& step : program.schedule.steps) elements += std::max(step.from.count, step.to.count);
  const bool large = elements > 10000;
  for (const std::uint64_t chunk : large ? std::vector<std::uint64_t>{21} : std::vector<std::uint64_t>{3, 1000}) {
    for (const bool in_place : {false, true}) {
      VerifyOptions options;
      options.chunk = chunk;
      options.orders = large ? 2 : 4;
      options.in_place = in_place;
      const Verdict verdict = verify(programs, options);
      CHECK_MESSAGE(verdict.ok, text_of(request), in_place ? "in place: " : "", verdict.why);
    }
  }
}

void depend_again(Program& program) {
  program.dependencies = dependencies_of(program.schedule);
}

// Numbers messages by their place in the list again, after steps were dropped.
void number_again(Program& program) {
  std::vector<std::uint32_t> sent(program.request.world), received(program.request.world);
  for (Step& step : program.schedule.steps) {
    if (step.kind == StepKind::send) step.message = sent[step.peer]++;
    if (step.kind == StepKind::recv || step.kind == StepKind::recv_reduce) step.message = received[step.peer]++;
  }
}

// The collectives whose schedules the mutation tests spoil, step by step.
std::vector<Request> spoilable() {
  std::vector<Request> requests;
  const auto levels = std::make_shared<const Hierarchy>(Hierarchy::of_groups(5, {{{3, 0}, {4, 2, 1}}}));
  for (const Op op : kOps) {
    for (int i = 0; i < kAlgorithmCount; ++i) {
      for (const std::int32_t world : {2, 4, 5}) {
        // The last round of the barrier by dissemination has slack: there some losses do no harm.
        const auto algorithm = static_cast<Algorithm>(i);
        if (op == Op::barrier && algorithm != Algorithm::hierarchical && world == 5) continue;
        Request request = request_of(op, algorithm, world, 13, world / 2);
        if (world == 5) request.hierarchy = levels;
        if (supports(algorithm, request)) requests.push_back(request);
      }
    }
  }
  return requests;
}

// Spoils one step of one rank at a time with `spoil` (false: does not apply); every result must be refused.
template <class Spoil>
void expect_refused(const std::string& what, Spoil spoil) {
  std::size_t tried = 0;
  for (const Request& request : spoilable()) {
    const std::vector<Program> programs = programs_of(request);
    for (std::size_t rank = 0; rank < programs.size(); ++rank) {
      for (std::size_t i = 0; i < programs[rank].schedule.steps.size(); ++i) {
        std::vector<Program> spoiled = programs;
        if (!spoil(spoiled, rank, i)) continue;
        ++tried;
        const Verdict verdict = verify(spoiled);
        CHECK_MESSAGE(!verdict.ok, what, " is not noticed: ", text_of(request), "rank ", rank, " step ", i);
      }
    }
  }
  CHECK_MESSAGE(tried > 20, what, ": only ", tried, " schedules were spoiled");
}

}  // namespace

TEST_CASE("every operation is right at every world, count and root") {
  for (const Op op : kOps) {
    for (const Algorithm algorithm : kAlgorithms) {
      for (const std::int32_t world : kWorlds) {
        for (const std::uint64_t count : kCounts) {
          std::set<std::int32_t> roots = {0};
          if (has_root(op) && world <= 5)
            for (std::int32_t root = 0; root < world; ++root) roots.insert(root);
          if (has_root(op)) roots.insert({world / 2, world - 1});
          for (const std::int32_t root : roots) {
            Request request = request_of(op, algorithm, world, count, root);
            expect_right(request);
            if (!has_blocks(op) || count == 0) continue;
            request.blocks = uneven(world, count);
            expect_right(request);
          }
        }
      }
    }
  }
}

TEST_CASE("uneven blocks with leading, trailing and lone zeros are right") {
  for (const Op op : kOps) {
    if (!has_blocks(op)) continue;
    for (const Algorithm algorithm : kAlgorithms) {
      for (const Blocks& blocks :
           {Blocks{0, 0, 5}, Blocks{5, 0, 0}, Blocks{0, 7, 0}, Blocks{1, 2, 3, 4, 5}, Blocks{9, 0, 1, 0, 0, 30, 2}}) {
        for (std::int32_t root = 0; root < static_cast<std::int32_t>(blocks.size()); ++root) {
          Request request = request_of(op, algorithm, static_cast<std::int32_t>(blocks.size()), 0, root);
          request.blocks = blocks;
          expect_right(request);
        }
      }
    }
  }
}

TEST_CASE("all_to_all with any matrix of counts is right") {
  std::mt19937 random(7);
  for (std::size_t world = 1; world <= 9; ++world) {
    for (int round = 0; round < 6; ++round) {
      std::vector<Blocks> counts(world, Blocks(world));
      for (Blocks& row : counts)
        for (std::uint64_t& count : row) count = random() % 3 == 0 ? 0 : random() % 12;
      for (const std::uint64_t chunk : {1, 4, 100}) {
        VerifyOptions options;
        options.chunk = chunk;
        const Verdict verdict = verify(counts, options);
        CHECK_MESSAGE(verdict.ok, "world ", world, " round ", round, " seed 7: ", verdict.why);
      }
    }
  }
}

TEST_CASE("messages, elements and fan-out are as the formulas say") {
  for (const std::int32_t world : {2, 3, 4, 7, 8}) {
    const auto n = static_cast<std::uint64_t>(world);
    for (std::int32_t rank = 0; rank < world; ++rank) {
      const auto expect = [&](Request request, std::uint64_t messages, std::uint64_t elements, std::uint64_t fan_out) {
        const Sent sent = sent_by(request, rank);
        INFO(text_of(request), "rank ", rank);
        CHECK(sent.messages == messages);
        CHECK(sent.elements == elements);
        CHECK(sent.peers.size() == fan_out);
      };
      const std::int32_t root = world / 2;
      const bool is_root = rank == root;
      const auto ring = [&](Op op, std::uint64_t count) { return request_of(op, Algorithm::ring, world, count, root); };
      const auto direct = [&](Op op, std::uint64_t count) {
        return request_of(op, Algorithm::direct, world, count, root);
      };
      const auto shard = [&](std::int32_t of) { return shard_of(10 * n + 1, world, of % world).count; };

      expect(ring(Op::all_reduce, 10 * n), 2 * (n - 1), 20 * (n - 1), 1);
      expect(ring(Op::all_reduce, 10 * n + 1), 2 * (n - 1), 20 * n + 2 - shard(rank + 1) - shard(rank + 2), 1);
      expect(ring(Op::all_gather, 10), n - 1, 10 * (n - 1), 1);
      expect(ring(Op::reduce_scatter, 10), n - 1, 10 * (n - 1), 1);
      const bool is_last = (rank + 1) % world == root;
      expect(ring(Op::broadcast, 10), is_last ? 0 : 1, is_last ? 0 : 10, is_last ? 0 : 1);
      expect(ring(Op::reduce, 10), is_root ? 0 : 1, is_root ? 0 : 10, is_root ? 0 : 1);

      expect(direct(Op::all_reduce, 10 * n), 2 * (n - 1), 20 * (n - 1), n - 1);
      expect(direct(Op::all_reduce, 10 * n + 1), 2 * (n - 1), 10 * n + 1 + (n - 2) * shard(rank), n - 1);
      expect(direct(Op::all_gather, 10), n - 1, 10 * (n - 1), n - 1);
      expect(direct(Op::reduce_scatter, 10), n - 1, 10 * (n - 1), n - 1);
      for (const Op op : {Op::broadcast, Op::scatter})
        expect(direct(op, 10), is_root ? n - 1 : 0, is_root ? 10 * (n - 1) : 0, is_root ? n - 1 : 0);
      for (const Op op : {Op::reduce, Op::gather})
        expect(direct(op, 10), is_root ? 0 : 1, is_root ? 0 : 10, is_root ? 0 : 1);
      expect(direct(Op::all_to_all, 10), n - 1, 10 * (n - 1), n - 1);

      std::uint64_t rounds = 0;
      while ((std::uint64_t{1} << rounds) < n) ++rounds;
      expect(ring(Op::barrier, 0), rounds, rounds, rounds);
    }
  }
}

TEST_CASE("the verdict reports the largest figures over all ranks") {
  const Verdict ring = verify(request_of(Op::reduce_scatter, Algorithm::ring, 5, 8));
  CHECK(ring.ok);
  CHECK(ring.fan_out_max == 1);
  CHECK(ring.messages_sent_max == 4);
  CHECK(ring.elements_sent_max == 32);
  CHECK(ring.scratch_max == 16);
  const Verdict direct = verify(request_of(Op::gather, Algorithm::direct, 5, 8));
  CHECK(direct.ok);
  CHECK(direct.fan_out_max == 1);
  CHECK(direct.messages_sent_max == 1);
  CHECK(direct.scratch_max == 0);
}

TEST_CASE("one rank of a million costs its own steps only") {
  const std::int32_t world = 1'000'000;
  Request request = request_of(Op::broadcast, Algorithm::ring, world, 1000, 3);
  for (const std::int32_t rank : {0, 2, 3, 4, 999'999}) {
    request.rank = rank;
    CHECK(make_schedule(request).steps.size() == (rank == 2 || rank == 3 ? 1 : 2));
  }
  Request barrier = request_of(Op::barrier, Algorithm::ring, world, 0);
  for (const std::int32_t rank : {0, 1, 524'288, 999'999}) {
    barrier.rank = rank;
    const Schedule schedule = make_schedule(barrier);
    CHECK(schedule.steps.size() == 20 + 20 + 19);
    for (const Step& step : schedule.steps) {  // each message has its other end at the peer
      if (step.kind != StepKind::send) continue;
      Request other = barrier;
      other.rank = step.peer;
      const std::vector<Step> steps = make_schedule(other).steps;
      CHECK(std::any_of(steps.begin(), steps.end(), [&](const Step& theirs) {
        return theirs.kind == StepKind::recv && theirs.peer == rank && theirs.message == step.message;
      }));
    }
  }
  CHECK(verify(request_of(Op::barrier, Algorithm::ring, 257, 0)).ok);
}

TEST_CASE("shards cover the range in order and differ by at most one element") {
  for (const std::uint64_t count : {0, 1, 5, 64, 1000}) {
    for (const std::int32_t world : kWorlds) {
      std::uint64_t offset = 0;
      for (std::int32_t i = 0; i < world; ++i) {
        const Range shard = shard_of(count, world, i);
        CHECK(shard.offset == offset);
        CHECK(shard.count == count / world + (static_cast<std::uint64_t>(i) < count % world ? 1 : 0));
        offset += shard.count;
      }
      CHECK(offset == count);
    }
  }
}

TEST_CASE("requests out of range are refused by name") {
  const auto refused = [](Request request) { CHECK_THROWS_AS(make_schedule(request), std::invalid_argument); };
  for (const Op op : kOps) {
    Request request = request_of(op, Algorithm::ring, 3, 4);
    CHECK_NOTHROW(make_schedule(request));
    for (const std::int32_t rank : {-1, 3}) {
      request.rank = rank;
      refused(request);
    }
    request.rank = 0, request.world = 0;
    refused(request);
    request.world = 3, request.root = 3;
    if (has_root(op)) refused(request);
    request.root = -1;
    if (has_root(op)) refused(request);
    if (!has_root(op)) CHECK_NOTHROW(make_schedule(request));
    request.root = 0;
    if (request.blocks.empty()) continue;
    request.blocks.pop_back();
    refused(request);
  }
  Request request = request_of(Op::all_to_all, Algorithm::ring, 3, 4);
  request.send_blocks[0] = 5;
  refused(request);
  request.send_blocks = {4};
  refused(request);
  CHECK_THROWS_WITH(make_schedule(request_of(Op::reduce, Algorithm::ring, 3, 4, 5)),
                    "make_schedule(reduce): root 5 is outside 0..2");
}

TEST_CASE("operations and algorithms have distinct names") {
  std::set<std::string_view> names;
  for (const Op op : kOps) names.insert(name_of(op));
  for (const Algorithm algorithm : kAlgorithms) names.insert(name_of(algorithm));
  CHECK(names.size() == kOps.size() + kAlgorithms.size());
  CHECK(names.count("?") == 0);
}

// ---- dependencies ----

namespace {

struct Touch {
  Slice slice;
  bool writes;
};
std::vector<Touch> touches_of(const Step& step) {
  switch (step.kind) {
    case StepKind::send: return {{step.from, false}};
    case StepKind::recv:
    case StepKind::finish: return {{step.to, true}};
    default: return {{step.from, false}, {step.to, true}};
  }
}
bool overlap(const Slice& a, const Slice& b) {
  return a.buffer == b.buffer && a.offset < b.offset + b.count && b.offset < a.offset + a.count;
}
Slice chunk_of(const Slice& slice, std::uint64_t chunk, std::uint64_t size) {
  const std::uint64_t begin = std::min(slice.count, chunk * size);
  return {slice.buffer, slice.offset + begin, std::min(slice.count - begin, size)};
}
std::uint64_t chunks_of(const Step& step, std::uint64_t size) {
  return (std::max(step.from.count, step.to.count) + size - 1) / size;
}

}  // namespace

TEST_CASE("dependencies order every conflicting pair of chunks, and only conflicting steps") {
  for (std::uint32_t seed = 0; seed < (torch_iroh::testing::kSanitized ? 30 : 300); ++seed) {
    std::mt19937 random(seed);
    const bool regular = seed % 2 == 0;  // half of the schedules repeat few ranges, as makers do
    const auto slice = [&](std::uint64_t count) {
      const std::uint64_t offset = regular ? random() % 3 * 6 : random() % 14;
      return Slice{static_cast<Buffer>(random() % 3), offset, count};
    };
    Schedule schedule;
    for (int i = 0; i < 20; ++i) {
      const std::uint64_t count = regular ? 6 : random() % 7;
      Step step{static_cast<StepKind>(random() % 5), 0, 0, slice(count), slice(count)};
      if (step.kind == StepKind::send) step.to.count = 0;
      if (step.kind == StepKind::recv || step.kind == StepKind::finish) step.from.count = 0;
      schedule.steps.push_back(step);
    }
    const auto dependencies = dependencies_of(schedule);
    for (std::size_t i = 0; i < dependencies.size(); ++i) {
      std::set<std::uint32_t> seen;
      for (const auto [on, by_chunk] : dependencies[i]) {
        CHECK(on < i);
        CHECK(seen.insert(on).second);
        bool conflict = false, exact = true;
        for (const Touch& a : touches_of(schedule.steps[on]))
          for (const Touch& b : touches_of(schedule.steps[i]))
            if ((a.writes || b.writes) && overlap(a.slice, b.slice)) conflict = true, exact &= a.slice == b.slice;
        CHECK(conflict);
        CHECK(by_chunk == exact);
      }
    }
    for (const std::uint64_t size : {1, 2, 4, 100}) {
      // before[(step, chunk)] = all (step, chunk) that must be done first, closed over paths
      std::vector<std::vector<std::set<std::pair<std::size_t, std::uint64_t>>>> before(schedule.steps.size());
      for (std::size_t i = 0; i < schedule.steps.size(); ++i) {
        before[i].resize(chunks_of(schedule.steps[i], size));
        for (std::uint64_t c = 0; c < before[i].size(); ++c) {
          for (const auto [on, by_chunk] : dependencies[i]) {
            for (std::uint64_t d = by_chunk ? c : 0; d < (by_chunk ? c + 1 : before[on].size()); ++d) {
              before[i][c].insert({on, d});
              before[i][c].insert(before[on][d].begin(), before[on][d].end());
            }
          }
          for (std::size_t j = 0; j < i; ++j) {
            for (std::uint64_t d = 0; d < before[j].size(); ++d) {
              bool conflict = false;
              for (const Touch& a : touches_of(schedule.steps[j]))
                for (const Touch& b : touches_of(schedule.steps[i]))
                  conflict |= (a.writes || b.writes) && overlap(chunk_of(a.slice, d, size), chunk_of(b.slice, c, size));
              if (conflict)
                CHECK_MESSAGE(before[i][c].count({j, d}) == 1, "seed ", seed, " size ", size, ": step ", i, " chunk ",
                              c, " is not ordered after step ", j, " chunk ", d);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("dependencies of forty thousand steps are few and found quickly") {
  for (const Algorithm algorithm : kAlgorithms) {
    const Schedule schedule = make_schedule(request_of(Op::all_reduce, algorithm, 10'001, 1'000'000));
    CHECK(schedule.steps.size() == 40'001);
    const auto begin = std::chrono::steady_clock::now();
    const auto dependencies = dependencies_of(schedule);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::size_t edges = 0;
    for (const auto& list : dependencies) edges += list.size();
    CHECK(edges <= 3 * schedule.steps.size());
    CHECK_MESSAGE(took.count() < 5.0, "a quadratic algorithm takes minutes, this took ", took.count(), " s");
  }
}

// ---- the verifier can fail ----

TEST_CASE("a dropped step is noticed") {
  expect_refused("a dropped step", [](std::vector<Program>& programs, std::size_t rank, std::size_t i) {
    auto& steps = programs[rank].schedule.steps;
    steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(i));
    depend_again(programs[rank]);
    return true;
  });
}

TEST_CASE("a message dropped at both ends is noticed") {
  expect_refused("a dropped message", [](std::vector<Program>& programs, std::size_t rank, std::size_t i) {
    const Step sent = programs[rank].schedule.steps[i];
    if (sent.kind != StepKind::send) return false;
    auto& theirs = programs[static_cast<std::size_t>(sent.peer)].schedule.steps;
    std::erase_if(theirs, [&](const Step& step) {
      return step.peer == static_cast<std::int32_t>(rank) && step.message == sent.message &&
             (step.kind == StepKind::recv || step.kind == StepKind::recv_reduce);
    });
    auto& ours = programs[rank].schedule.steps;
    ours.erase(ours.begin() + static_cast<std::ptrdiff_t>(i));
    for (Program& program : programs) number_again(program), depend_again(program);
    return true;
  });
}

TEST_CASE("swapped message numbers are noticed") {
  expect_refused("a swapped message", [](std::vector<Program>& programs, std::size_t rank, std::size_t i) {
    auto& steps = programs[rank].schedule.steps;
    for (std::size_t j = i + 1; j < steps.size(); ++j) {
      if (steps[i].peer < 0 || steps[j].peer != steps[i].peer) continue;
      if ((steps[j].kind == StepKind::send) != (steps[i].kind == StepKind::send)) continue;
      std::swap(steps[i].message, steps[j].message);
      return true;
    }
    return false;
  });
}

TEST_CASE("two receives that take each other's place are noticed") {
  expect_refused("a swapped range", [](std::vector<Program>& programs, std::size_t rank, std::size_t i) {
    auto& steps = programs[rank].schedule.steps;
    for (std::size_t j = i + 1; j < steps.size(); ++j) {
      if (steps[i].kind != StepKind::recv || steps[j].kind != StepKind::recv) continue;
      if (steps[i].to == steps[j].to || steps[i].to.count != steps[j].to.count) continue;
      std::swap(steps[i].to, steps[j].to);
      depend_again(programs[rank]);
      return true;
    }
    return false;
  });
}

TEST_CASE("a range that is one element short or one too far is noticed") {
  for (const bool shorter : {true, false}) {
    for (const bool of_to : {true, false}) {
      expect_refused("a changed range", [&](std::vector<Program>& programs, std::size_t rank, std::size_t i) {
        Step& step = programs[rank].schedule.steps[i];
        Slice& slice = of_to ? step.to : step.from;
        if (slice.count == 0 || programs[rank].request.op == Op::barrier) return false;  // tokens may lie anywhere
        shorter ? --slice.count : ++slice.offset;
        if (shorter && step.to.count > 0 && step.from.count > 0) step.to.count = step.from.count = slice.count;
        depend_again(programs[rank]);
        return true;
      });
    }
  }
}

TEST_CASE("a sum that is stored instead of added is noticed") {
  expect_refused("a lost sum", [](std::vector<Program>& programs, std::size_t rank, std::size_t i) {
    Step& step = programs[rank].schedule.steps[i];
    if (step.kind != StepKind::recv_reduce) return false;
    step.kind = StepKind::recv;
    depend_again(programs[rank]);
    return true;
  });
}

TEST_CASE("finish twice or one step early is noticed") {
  expect_refused("finish twice", [](std::vector<Program>& programs, std::size_t rank, std::size_t i) {
    auto& steps = programs[rank].schedule.steps;
    if (steps[i].kind != StepKind::finish) return false;
    steps.push_back(steps[i]);
    depend_again(programs[rank]);
    return true;
  });
  expect_refused("an early finish", [](std::vector<Program>& programs, std::size_t rank, std::size_t i) {
    auto& steps = programs[rank].schedule.steps;
    if (steps[i].kind != StepKind::finish || i == 0) return false;
    std::swap(steps[i], steps[i - 1]);
    depend_again(programs[rank]);
    return true;
  });
}

TEST_CASE("lost dependencies are noticed") {
  // A recv may do without: where it overwrites what was sent, the answer cannot come before the question.
  expect_refused("a lost dependency", [](std::vector<Program>& programs, std::size_t rank, std::size_t i) {
    auto& dependencies = programs[rank].dependencies[i];
    if (dependencies.empty() || programs[rank].schedule.steps[i].kind == StepKind::recv) return false;
    dependencies.clear();
    return true;
  });
}

TEST_CASE("chunk by chunk where the ranges differ is noticed") {
  Request request = request_of(Op::all_reduce, Algorithm::ring, 2, 12);
  std::vector<Program> programs = programs_of(request);
  for (Program& program : programs) {  // finish in two parts, of which the later part comes first
    std::vector<Step> steps;
    for (Step step : program.schedule.steps) {
      if (step.kind != StepKind::finish) {
        steps.push_back(step);
        continue;
      }
      const Slice all = step.to;
      step.to = {all.buffer, all.offset + 3, 3};
      steps.push_back(step);
      step.to = {all.buffer, all.offset, 3};
      steps.push_back(step);
    }
    program.schedule.steps = steps;
    depend_again(program);
  }
  CHECK(verify(programs).ok);
  for (auto& list : programs[0].dependencies)
    for (Dependency& dependency : list) dependency.by_chunk = true;
  CHECK_FALSE(verify(programs).ok);
}

TEST_CASE("lost order is noticed by random runs too, without the happens-before proof") {
  std::vector<Program> programs = programs_of(request_of(Op::all_reduce, Algorithm::direct, 6, 36));
  for (std::size_t i = 0; i < programs[0].schedule.steps.size(); ++i)
    if (programs[0].schedule.steps[i].kind == StepKind::finish) programs[0].dependencies[i].clear();
  VerifyOptions options;
  options.happens_before = false;
  options.orders = 64;
  CHECK_FALSE(verify(programs, options).ok);
}

TEST_CASE("ranks that each sum in their own order are refused") {
  std::vector<Program> programs = programs_of(request_of(Op::all_reduce, Algorithm::direct, 2, 4));
  const Slice output{Buffer::output, 0, 4};
  const Slice scratch{Buffer::scratch, 0, 4};
  for (Program& program : programs) {
    const std::int32_t peer = 1 - program.request.rank;
    program.schedule.scratch_count = 4;
    program.schedule.steps = {{StepKind::copy, -1, 0, output, scratch},
                              {StepKind::send, peer, 0, scratch, {}},
                              {StepKind::recv_reduce, peer, 0, output, output},
                              {StepKind::finish, -1, 0, {}, output}};
    depend_again(program);
  }
  const Verdict verdict = verify(programs);
  CHECK_FALSE(verdict.ok);
  CHECK_MESSAGE(verdict.why.find("same order as rank 0") != std::string::npos, verdict.why);
}

TEST_CASE("a deadlock is named") {
  // One token cell for both directions: a receive waits for the own send, which waits for the peer's receive.
  std::vector<Program> programs = programs_of(request_of(Op::barrier, Algorithm::ring, 2, 0));
  for (Program& program : programs) {
    for (Step& step : program.schedule.steps) step.from.offset = step.to.offset = 0;
    depend_again(program);
  }
  const Verdict verdict = verify(programs);
  CHECK_FALSE(verdict.ok);
  CHECK_MESSAGE(verdict.why.find("deadlock") != std::string::npos, verdict.why);
}

TEST_CASE("a barrier one round short is refused") {
  std::vector<Program> programs = programs_of(request_of(Op::barrier, Algorithm::ring, 8, 0));
  for (Program& program : programs) {
    program.schedule.steps.resize(program.schedule.steps.size() - 3);  // copy, send, recv of the last round
    depend_again(program);
  }
  const Verdict verdict = verify(programs);
  CHECK_FALSE(verdict.ok);
  CHECK_MESSAGE(verdict.why.find("may leave before") != std::string::npos, verdict.why);
}

TEST_CASE("a schedule that is right only out of place is refused in place") {
  std::vector<Program> programs = programs_of(request_of(Op::all_gather, Algorithm::direct, 3, 4));
  for (Program& program : programs) {  // send from input, beside the copy that writes the same memory
    for (Step& step : program.schedule.steps)
      if (step.kind == StepKind::send) step.from = {Buffer::input, 0, 4};
    depend_again(program);
  }
  VerifyOptions options;
  CHECK(verify(programs, options).ok);
  options.in_place = true;
  const Verdict verdict = verify(programs, options);
  CHECK_FALSE(verdict.ok);
  CHECK_MESSAGE(verdict.why.find("is not ordered with") != std::string::npos, verdict.why);
}

TEST_CASE("steps outside their buffers, empty steps and writes to input are refused") {
  const std::vector<Program> good = programs_of(request_of(Op::all_gather, Algorithm::ring, 2, 4));
  const auto refused = [&](auto spoil) {
    std::vector<Program> programs = good;
    spoil(programs[0].schedule.steps[0]);
    CHECK_FALSE(verify(programs).ok);
  };
  CHECK(verify(good).ok);
  refused([](Step& copy) { copy.to.offset = 5; });
  refused([](Step& copy) { copy.from.offset = ~std::uint64_t{0}; });
  refused([](Step& copy) { copy.from.count = copy.to.count = 0; });
  refused([](Step& copy) { copy.to = copy.from; });
  refused([](Step& copy) { copy.to.count = 3; });
}
