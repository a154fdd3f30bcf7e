// Levels and the hierarchical makers: who is where, right results at every world from 1 to 64 whatever the groups are,
// the bytes that cross the top level, bounded fan-out, and one rank of a million.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "collective/hierarchy.hpp"
#include "collective/planner.hpp"
#include "collective/schedule.hpp"
#include "collective/verifier.hpp"
#include "requests.hpp"
#include "support.hpp"

namespace {

using namespace torch_iroh::collective;
using namespace torch_iroh::testing;
using Groups = std::vector<std::vector<std::int32_t>>;
using Shared = std::shared_ptr<const Hierarchy>;

Shared shared(Hierarchy hierarchy) {
  return std::make_shared<const Hierarchy>(std::move(hierarchy));
}
Shared uniform(const std::vector<std::int32_t>& sizes, const HierarchyOptions& options = {}) {
  return shared(Hierarchy::uniform(sizes, options));
}

// Ranks in random order, cut into groups of random sizes; hosts, and sites made of hosts.
Shared random_groups(std::int32_t world, unsigned seed, const HierarchyOptions& options) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> ranks(static_cast<std::size_t>(world));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::shuffle(ranks.begin(), ranks.end(), random);
  Groups hosts, sites;
  for (std::size_t at = 0; at < ranks.size();) {
    const std::size_t size = std::min<std::size_t>(1 + random() % 5, ranks.size() - at);
    hosts.emplace_back(ranks.begin() + static_cast<std::ptrdiff_t>(at),
                       ranks.begin() + static_cast<std::ptrdiff_t>(at + size));
    at += size;
    if (sites.empty() || random() % 3 == 0) sites.emplace_back();
    sites.back().insert(sites.back().end(), hosts.back().begin(), hosts.back().end());
  }
  std::shuffle(hosts.begin(), hosts.end(), random);
  return shared(Hierarchy::of_groups(world, {hosts, sites}, options));
}

const std::vector<Op> kCovered = {Op::all_reduce,     Op::reduce, Op::broadcast, Op::all_gather,
                                  Op::reduce_scatter, Op::gather, Op::scatter,   Op::barrier};

Request hierarchical(Op op, const Shared& hierarchy, std::uint64_t count, std::int32_t root = 0) {
  Request request = request_of(op, Algorithm::hierarchical, hierarchy->world(), count, root);
  request.hierarchy = hierarchy;
  return request;
}

Verdict expect_right(const Request& request, const VerifyOptions& options) {
  const Verdict verdict = verify(request, options);
  CHECK_MESSAGE(verdict.ok, request.hierarchy->text(), ": ", text_of(request), options.in_place ? "in place: " : "",
                verdict.why);
  return verdict;
}

void expect_all_right(const Shared& hierarchy, std::uint64_t count, bool large) {
  const std::int32_t world = hierarchy->world();
  for (const Op op : kCovered) {
    std::set<std::int32_t> roots = {world / 2};
    if (has_root(op) && world <= 5)
      for (std::int32_t root = 0; root < world; ++root) roots.insert(root);
    if (has_root(op) && !large) roots.insert(world - 1);
    for (const std::int32_t root : roots) {
      for (const bool is_uneven : {false, true}) {
        if (is_uneven && !has_blocks(op)) continue;
        Request request = hierarchical(op, hierarchy, count, root);
        if (is_uneven) request.blocks = uneven(world, count);
        VerifyOptions options;
        options.orders = large ? 2 : 3;
        options.happens_before = !large;
        for (const bool in_place : {false, true}) {
          if (large && in_place == is_uneven) continue;
          options.in_place = in_place;
          options.chunk = in_place ? 2 : 9;
          expect_right(request, options);
        }
      }
    }
  }
}

// Elements that ranks of one group of the top level send into another, over all ranks.
std::uint64_t crossing(Request request, const std::vector<std::int32_t>& site_of) {
  std::uint64_t elements = 0;
  for (request.rank = 0; request.rank < request.world; ++request.rank)
    for (const Step& step : make_schedule(request).steps)
      if (step.kind == StepKind::send &&
          site_of[static_cast<std::size_t>(request.rank)] != site_of[static_cast<std::size_t>(step.peer)])
        elements += step.from.count;
  return elements;
}

std::vector<std::int32_t> blocks_of(std::int32_t world, std::int32_t size) {
  std::vector<std::int32_t> site_of;
  for (std::int32_t rank = 0; rank < world; ++rank) site_of.push_back(rank / size);
  return site_of;
}

void expect_consistent(const Hierarchy& hierarchy, std::int32_t bound) {
  std::int32_t units = hierarchy.world();
  for (std::size_t l = 0; l < hierarchy.depth(); ++l) {
    const Partition& level = hierarchy.level(l);
    CHECK(level.units() == units);
    CHECK(level.largest() <= bound);
    std::int32_t seen = 0, least = level.largest(), most = 0;
    for (std::int32_t group = 0; group < level.groups(); ++group) {
      least = std::min(least, level.size_of(group)), most = std::max(most, level.size_of(group));
      for (std::int32_t i = 0; i < level.size_of(group); ++i, ++seen) {
        const Partition::Place place = level.place_of(level.member(group, i));
        REQUIRE(place.group == group);
        REQUIRE(place.index == i);
      }
    }
    CHECK(seen == units);
    CHECK(least == level.smallest());
    CHECK(most == level.largest());
    units = level.groups();
  }
  CHECK(units == 1);
}

}  // namespace

TEST_CASE("hierarchy: levels cover the world, within the bound") {
  for (const std::int32_t bound : {2, 3, 5, 32}) {
    for (const std::int32_t world : {1, 2, 3, 7, 32, 33, 64, 65, 100, 997, 1025})
      expect_consistent(Hierarchy::uniform({world}, {.fan_out = bound}), bound);
    expect_consistent(Hierarchy::uniform({8, 5, 3}, {.fan_out = bound}), bound);
    expect_consistent(Hierarchy::uniform({1, 33, 1, 2}, {.fan_out = bound}), bound);
    for (unsigned seed = 0; seed < 20; ++seed)
      expect_consistent(*random_groups(static_cast<std::int32_t>(1 + seed * 7), seed, {.fan_out = bound}), bound);
  }
  CHECK(Hierarchy::uniform({1}).depth() == 0);
  CHECK(Hierarchy::uniform({32}).depth() == 1);
  CHECK(Hierarchy::uniform({33}).depth() == 2);
  CHECK(Hierarchy::uniform({1'000'000}).depth() == 4);
  const Hierarchy groups = Hierarchy::of_groups(5, {{{3, 0}, {4, 2, 1}}});
  CHECK(groups.depth() == 2);
  CHECK(groups.level(0).smallest() == 2);
  CHECK(groups.level(0).member(1, 2) == 1);
}

TEST_CASE("hierarchy: groups that make no hierarchy are refused by name") {
  const auto refused = [](std::int32_t world, const std::vector<Groups>& levels) {
    CHECK_THROWS_AS(Hierarchy::of_groups(world, levels), std::invalid_argument);
  };
  refused(0, {});
  refused(3, {{{0, 1}}});                            // rank 2 is nowhere
  refused(3, {{{0, 1}, {1, 2}}});                    // rank 1 twice
  refused(3, {{{0, 1}, {2, 3}}});                    // rank 3 is outside
  refused(3, {{{0, 1}, {2}, {}}});                   // an empty group
  refused(4, {{{0, 1}, {2, 3}}, {{0, 2}, {1, 3}}});  // a host in two sites
  CHECK_THROWS_AS(Hierarchy::uniform({0}), std::invalid_argument);
  CHECK_THROWS_AS(Hierarchy::uniform({1 << 20, 1 << 20}), std::invalid_argument);
  CHECK_THROWS_AS(Hierarchy::uniform({8}, {.fan_out = 1}), std::invalid_argument);
  CHECK_THROWS_AS(Hierarchy::uniform({8}, {.algorithms = {Algorithm::hierarchical}}), std::invalid_argument);
  Request request = hierarchical(Op::all_reduce, uniform({2, 2}), 8);
  request.world = 5;
  CHECK_THROWS_AS(make_schedule(request), std::invalid_argument);
}

TEST_CASE("hierarchy: every operation is right at every world from 1 to 64, whatever the groups are") {
  for (std::int32_t world = 1; world <= 64; ++world) {
    if (kSanitized && world > 9 && world != 24 && world != 33) continue;
    const bool large = world > (kSanitized ? 4 : 9);
    for (const std::int32_t bound : {2, 3, 32}) {
      if (kSanitized && bound == 32 && world > 4) continue;
      const std::uint64_t count = large ? static_cast<std::uint64_t>(1 + world % 3) : 13;
      const auto seed = static_cast<unsigned>(world * 100 + bound);
      expect_all_right(uniform({world}, {.fan_out = bound}), count, large);
      if (!large || bound == (world % 2 == 0 ? 3 : 32))
        expect_all_right(random_groups(world, seed, {.fan_out = bound}), count, large);
    }
    for (std::int32_t inner = 2; inner < std::min(world, 12) && !kSanitized; ++inner)
      if (world % inner == 0) expect_all_right(uniform({inner, world / inner}), 3, large);
  }
}

TEST_CASE("hierarchy: symmetric operations of counts 0, 1, primes and below the world are right") {
  for (const std::int32_t world : {2, 6, 12, 17, 30}) {
    if (kSanitized && world > 6) continue;
    for (const std::uint64_t count : {0, 1, 5, 97}) {
      expect_all_right(uniform({world}, {.fan_out = 4}), count % 7, world > 9);
      for (const Op op : {Op::all_reduce, Op::reduce, Op::broadcast})
        for (unsigned seed = 0; seed < 3; ++seed) {
          VerifyOptions options;
          options.orders = 2, options.chunk = 7, options.in_place = true;
          expect_right(hierarchical(op, random_groups(world, seed, {}), count, world / 2), options);
        }
    }
  }
}

TEST_CASE("hierarchy: any algorithm in any level") {
  const std::vector<std::optional<Algorithm>> all = {
      std::nullopt,    Algorithm::ring,      Algorithm::direct, Algorithm::ring_bidirectional,
      Algorithm::tree, Algorithm::butterfly, Algorithm::bruck};
  for (const auto& inner : all) {
    for (const auto& outer : all) {
      HierarchyOptions options;
      options.algorithms = {inner, outer};
      expect_all_right(uniform({5, 3}, options), 11, kSanitized);
      if (!kSanitized) expect_all_right(random_groups(13, 7, options), 11, true);
    }
  }
}

TEST_CASE("hierarchy: the top level carries the bytes of one participant per group") {
  for (const std::int32_t inner : {2, 3, 4, 8}) {
    for (const std::int32_t groups : {2, 3, 4}) {
      for (const Algorithm across : {Algorithm::ring, Algorithm::direct, Algorithm::butterfly}) {
        HierarchyOptions options;
        options.algorithms = {std::nullopt, across};
        const Shared hierarchy = uniform({inner, groups}, options);
        const std::vector<std::int32_t> site_of = blocks_of(inner * groups, inner);
        const auto g = static_cast<std::uint64_t>(groups), n = static_cast<std::uint64_t>(inner * groups);
        const std::uint64_t count = 10 * n;
        INFO(hierarchy->text());
        // As many as `groups` ranks alone would move: 2S(G-1)/G each; a flat algorithm of N ranks moves more.
        CHECK(crossing(hierarchical(Op::all_reduce, hierarchy, count), site_of) == 2 * count * (g - 1));
        CHECK(crossing(hierarchical(Op::broadcast, hierarchy, count, 1), site_of) == count * (g - 1));
        CHECK(crossing(hierarchical(Op::reduce, hierarchy, count, 1), site_of) == count * (g - 1));
        CHECK(crossing(hierarchical(Op::all_gather, hierarchy, 10), site_of) == count * (g - 1));
        CHECK(crossing(hierarchical(Op::reduce_scatter, hierarchy, 10), site_of) == count * (g - 1));
        const std::uint64_t elsewhere = count - 10 * static_cast<std::uint64_t>(inner);
        if (groups <= 2) CHECK(crossing(hierarchical(Op::gather, hierarchy, 10, 1), site_of) == elsewhere);
        if (groups <= 2) CHECK(crossing(hierarchical(Op::scatter, hierarchy, 10, 1), site_of) == elsewhere);
        CHECK(crossing(hierarchical(Op::barrier, hierarchy, 0), site_of) == 2 * (g - 1));
      }
    }
  }
  // Groups of unequal sizes, not contiguous: 2 owners, of which one pair moves each half.
  const Shared unequal = shared(Hierarchy::of_groups(5, {{{3, 0}, {4, 2, 1}}}));
  CHECK(crossing(hierarchical(Op::all_reduce, unequal, 100), {0, 1, 1, 0, 1}) == 200);
  CHECK(crossing(hierarchical(Op::all_gather, unequal, 10), {0, 1, 1, 0, 1}) == 50);
  CHECK(crossing(hierarchical(Op::reduce_scatter, unequal, 10), {0, 1, 1, 0, 1}) == 50);
}

TEST_CASE("hierarchy: fan-out stays within the bound, over all levels of a thousand ranks together") {
  for (const std::int32_t world : {33, 100, 127, 257, 1000}) {
    if (kSanitized && world > 100) continue;
    const Shared hierarchy = world == 127 ? random_groups(world, 3, {}) : uniform({world});
    for (const Op op : kCovered) {
      const bool by_blocks = has_blocks(op);
      if (by_blocks && world > 100) continue;  // O(world) requests: their peers are those of the smaller worlds
      VerifyOptions options;
      options.orders = 1, options.happens_before = false, options.chunk = 1000;
      const std::uint64_t count = by_blocks ? 1 : 40;
      const Verdict verdict = expect_right(hierarchical(op, hierarchy, count, world / 3), options);
      CHECK(verdict.fan_out_max <= 32 + (op == Op::barrier ? 31 : 0));
    }
  }
}

TEST_CASE("hierarchy: one rank of a million costs its own steps only") {
  const auto begin = std::chrono::steady_clock::now();
  for (const Shared& hierarchy : {uniform({1'000'000}), uniform({8, 125, 1000})}) {
    std::mt19937 random(5);
    for (const Op op : {Op::all_reduce, Op::reduce, Op::broadcast, Op::barrier}) {
      Request request = hierarchical(op, hierarchy, 1'000'000, 123'456);
      for (int sample = 0; sample < 50; ++sample) {
        request.rank = sample == 0 ? 0 : sample == 1 ? 123'456 : static_cast<std::int32_t>(random() % 1'000'000);
        const Schedule schedule = make_schedule(request);
        std::set<std::int32_t> peers;
        for (const Step& step : schedule.steps)
          if (step.kind == StepKind::send) peers.insert(step.peer);
        CHECK(schedule.steps.size() <= 300);
        if (op != Op::barrier) CHECK(peers.size() <= 40);  // 4 levels of the default algorithms: 10 each at most
        for (const Step& step : schedule.steps) {          // each message has its other end at the peer
          if (step.kind != StepKind::send) continue;
          Request other = request;
          other.rank = step.peer;
          const std::vector<Step> theirs = make_schedule(other).steps;
          CHECK(std::any_of(theirs.begin(), theirs.end(), [&](const Step& their) {
            return (their.kind == StepKind::recv || their.kind == StepKind::recv_reduce) &&
                   their.peer == request.rank && their.message == step.message && their.to.count == step.from.count;
          }));
        }
      }
    }
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  CHECK_MESSAGE(took.count() < 10.0, "lists of a million ranks take long, this took ", took.count(), " s");
}

TEST_CASE("hierarchy: plans that differ have different descriptions") {
  std::set<std::string> texts;
  const auto text_of_plan = [](const Shared& hierarchy) {
    CollectiveCall call;
    call.request = hierarchical(Op::all_reduce, hierarchy, 4);
    return describe(call);
  };
  const std::vector<Shared> plans = {uniform({6}),
                                     uniform({2, 3}),
                                     uniform({3, 2}),
                                     uniform({6}, {.fan_out = 2}),
                                     uniform({6}, {.algorithms = {Algorithm::ring}}),
                                     shared(Hierarchy::of_groups(6, {{{0, 1, 2}, {3, 4, 5}}})),
                                     shared(Hierarchy::of_groups(6, {{{0, 1, 3}, {2, 4, 5}}})),
                                     shared(Hierarchy::of_groups(6, {{{0, 1, 2}, {3, 5, 4}}}))};
  for (const Shared& plan : plans) texts.insert(text_of_plan(plan));
  CHECK(texts.size() == plans.size());
  CHECK(text_of_plan(plans[1]) == text_of_plan(uniform({2, 3})));
  CHECK_MESSAGE(contains(text_of_plan(plans[1]), "hierarchical 2x3, at most 32)"), text_of_plan(plans[1]));
}
