// Algorithm::hierarchical for the operations with a block per rank: all_gather, reduce_scatter, gather, scatter.
// See hierarchical.cpp for words and sources. These requests are O(N) themselves, and so are their schedules at most.
//
// A rank's blocks must lie side by side at every level to move as one range. So the ranks are put in an order in which
// they do (`Order`), and blocks are copied between rank order and that order in scratch, once at either end (where the
// two are the same, not even that).
#include <numeric>

#include "collective/levels.hpp"

namespace torch_iroh::collective {

namespace {

// All ranks, sorted by the owner index at level 0, 1, ... and then by index from the top down. What is side by side:
// - the blocks that the owner of a part has at level l, which agree in the owner indices below l;
// - among them, those of one unit of level l;
// - with owner indices left out (`by_leaders`): the blocks of any unit.
class Order {
 public:
  Order(const Request& request, bool by_leaders) : hierarchy_(*request.hierarchy), depth_(hierarchy_.depth()) {
    const auto world = static_cast<std::size_t>(request.world);
    std::vector<std::int32_t> owners(depth_, 1);
    const Way first(hierarchy_, 0);
    for (std::size_t level = 0; level < depth_ && !by_leaders; ++level) owners[level] = first.owners(level);
    keys_.reserve(world * 3 * depth_);
    for (std::int32_t rank = 0; rank < request.world; ++rank) {
      const Way way(hierarchy_, rank);
      for (std::size_t level = 0; level < depth_; ++level) keys_.push_back(way.index(level) % owners[level]);
      for (std::size_t level = depth_; level-- > 0;) keys_.push_back(way.index(level));
      for (std::size_t level = 0; level < depth_; ++level) keys_.push_back(way.unit(level + 1));
    }
    ranks_.resize(world);
    std::iota(ranks_.begin(), ranks_.end(), 0);
    std::sort(ranks_.begin(), ranks_.end(), [&](std::int32_t a, std::int32_t b) {
      return std::lexicographical_compare(key(a), key(a) + 2 * depth_, key(b), key(b) + 2 * depth_);
    });
    offsets_.push_back(0);
    for (const std::int32_t rank : ranks_) offsets_.push_back(offsets_.back() + request.blocks[rank]);
    blocks_ = ranges_of(request.blocks);
  }

  bool is_rank_order() const { return std::is_sorted(ranks_.begin(), ranks_.end()); }
  std::uint64_t total() const { return offsets_.back(); }

  // What is owned at `level` by owners who agree with `way` below it and have owner index `index` there.
  Range part(const Way& way, std::size_t level, std::int32_t index) const {
    return where([&](std::int32_t rank) { return agrees(rank, way, level) && key(rank)[level] == index; });
  }
  Range part(const Way& way, std::size_t level) const {  // whatever the index there
    return where([&](std::int32_t rank) { return agrees(rank, way, level); });
  }
  // The share of `unit` of `level` in that.
  Range bundle(const Way& way, std::size_t level, std::int32_t unit) const {
    return where([&](std::int32_t rank) {
      return agrees(rank, way, level) && (level == 0 ? rank : key(rank)[2 * depth_ + level - 1]) == unit;
    });
  }

  // Copies between `in_order` and the same blocks in rank order, in runs as long as both allow.
  template <typename Copy>
  void for_each_run(Slice in_order, Slice in_ranks, Copy copy) const {
    for (std::size_t i = 0; i < ranks_.size();) {
      std::size_t end = i + 1;
      while (end < ranks_.size() && ranks_[end] == ranks_[end - 1] + 1) ++end;
      const std::uint64_t count = offsets_[end] - offsets_[i];
      copy(Slice{in_order.buffer, in_order.offset + offsets_[i], count},
           Slice{in_ranks.buffer, in_ranks.offset + blocks_[ranks_[i]].offset, count});
      i = end;
    }
  }

 private:
  using Key = std::vector<std::int32_t>::const_iterator;
  Key key(std::int32_t rank) const { return keys_.begin() + static_cast<std::ptrdiff_t>(rank * 3 * depth_); }
  bool agrees(std::int32_t rank, const Way& way, std::size_t level) const {
    return std::equal(key(rank), key(rank) + static_cast<std::ptrdiff_t>(level), key(way.unit(0)));
  }

  // The range of the ranks for which `holds`, which stand side by side.
  template <typename Holds>
  Range where(Holds holds) const {
    const auto first = std::find_if(ranks_.begin(), ranks_.end(), holds);
    const auto end = std::find_if_not(first, ranks_.end(), holds);
    const std::uint64_t offset = offsets_[static_cast<std::size_t>(first - ranks_.begin())];
    return {offset, offsets_[static_cast<std::size_t>(end - ranks_.begin())] - offset};
  }

  const Hierarchy& hierarchy_;
  const std::size_t depth_;
  std::vector<std::int32_t> keys_;  // [rank]: owner index by level, index from the top down, group by level
  std::vector<std::int32_t> ranks_;
  std::vector<std::uint64_t> offsets_;
  std::vector<Range> blocks_;
};

Slice within(Slice base, Range range) {
  return {base.buffer, base.offset + range.offset, range.count};
}

// The part of `level`: from what this rank has of the level to what it owns of it, or back.
Part part_of(const Way& way, const Order& order, std::size_t level, Slice all, bool gathers) {
  Part part{.level = level, .members = {}, .index = way.index(level)};
  const std::int32_t owners = way.owners(level);
  const bool owns = way.index(level) < owners;
  for (std::int32_t i = 0; i < way.size(level); ++i) {
    part.members.push_back(way.in_column(level, way.member(level, i)));
    part.blocks.push_back(i < owners ? order.part(way, level, i).count : 0);
  }
  const Slice whole = within(all, order.part(way, level));
  const Slice own = owns ? within(all, order.part(way, level, way.index(level))) : Slice{whole.buffer, whole.offset, 0};
  part.input = gathers ? own : whole;
  part.output = gathers ? whole : own;
  part.op = gathers ? Op::all_gather : Op::reduce_scatter;
  if (owners > 1 || way.size(level) == 1) return part;
  part.op = gathers ? Op::broadcast : Op::reduce;
  part.count = whole.count;
  part.blocks.clear();
  part.input = part.output = whole;
  return part;
}

// Members of a group that own nothing, and who owns for them: index i for i + owners, i + 2 owners, ...
template <typename Visit>
void for_each_extra(const Way& way, std::size_t level, Visit visit) {
  for (std::int32_t i = way.index(level) + way.owners(level); i < way.size(level); i += way.owners(level))
    visit(way.member(level, i), way.in_column(level, way.member(level, i)));
}

}  // namespace

// 2 hosts of 2 ranks (0 1 | 2 3):   across   0 <-> 2, 1 <-> 3      inside   0 and 1: 0 2, 1 3;   2 and 3: likewise
// Each rank's block crosses the top level once per other group there. A rank that owns nothing first gives its block to
// its owner. Scratch: S, unless the order is rank order.
// In place: input is read by the first copy only, and whatever writes output depends on what that copy wrote.
Schedule hierarchical_all_gather(const Request& request) {
  LevelBuilder builder(*request.hierarchy);
  const Way way(*request.hierarchy, request.rank);
  const Order order(request, false);
  const bool copies = !order.is_rank_order();
  const Slice output{Buffer::output, 0, order.total()};
  const Slice all = copies ? builder.scratch(order.total()) : output;
  builder.copy({Buffer::input, 0, request.blocks[request.rank]}, within(all, order.bundle(way, 0, request.rank)));
  const std::size_t reach = way.reach();
  for (std::size_t level = 0; level < reach; ++level)
    for_each_extra(way, level, [&](std::int32_t unit, std::int32_t rank) {
      builder.recv(rank, within(all, order.bundle(way, level, unit)));
    });
  if (reach < way.depth()) {
    const std::int32_t owner = way.member(reach, way.index(reach) % way.owners(reach));
    builder.send(way.in_column(reach, owner), within(all, order.bundle(way, reach, way.unit(reach))));
  }
  for (std::size_t level = std::min(reach + 1, way.depth()); level-- > 0;)
    if (way.size(level) > 1) builder.add(part_of(way, order, level, all, true));
  if (copies) order.for_each_run(all, output, [&](Slice from, Slice to) { builder.copy(from, to); });
  return builder.take();
}

// The all_gather backwards: what leaves a group is summed inside it first, so the top level carries each group's sums
// once. Scratch: S and what the parts borrow.
// In place: input is read by the first copies only, and what writes output depends on its own block's copy.
Schedule hierarchical_reduce_scatter(const Request& request) {
  LevelBuilder builder(*request.hierarchy);
  const Way way(*request.hierarchy, request.rank);
  const Order order(request, false);
  const Slice all = builder.scratch(order.total());
  const Slice own = within(all, order.bundle(way, 0, request.rank));
  order.for_each_run(all, {Buffer::input, 0, order.total()}, [&](Slice to, Slice from) { builder.copy(from, to); });
  if (way.depth() == 0) builder.finish(own);
  const std::size_t reach = way.reach();
  for (std::size_t level = 0; level < std::min(reach + 1, way.depth()); ++level) {
    if (way.size(level) == 1) continue;
    Part part = part_of(way, order, level, all, false);
    part.finishes = way.is_top(level);
    builder.add(part);
  }
  if (reach < way.depth()) {
    const std::int32_t owner = way.member(reach, way.index(reach) % way.owners(reach));
    builder.recv(way.in_column(reach, owner), within(all, order.bundle(way, reach, way.unit(reach))));
  }
  for (std::size_t level = reach; level-- > 0;)
    for_each_extra(way, level, [&](std::int32_t unit, std::int32_t rank) {
      builder.send(rank, within(all, order.bundle(way, level, unit)));
    });
  builder.copy(own, {Buffer::output, 0, own.count});
  return builder.take();
}

namespace {

// The part of `level` in a gather or scatter: units' bundles, in the order of members, which is theirs in `order` too.
Part part_of(const Leaders& leaders, const Order& order, std::size_t level, Op op) {
  Part part = leaders.part(op, level, 0);
  for (std::int32_t i = 0; i < leaders.way.size(level); ++i)
    part.blocks.push_back(order.bundle(leaders.way, level, leaders.way.member(level, i)).count);
  return part;
}

}  // namespace

// Up the levels: each leader collects its unit's blocks and gives them to the next as one. Every block enters each
// group on its way once. Scratch: the bundles where this rank leads.
// In place: the root's input is read only by the copy of its lowest part, and what writes output there depends on it.
Schedule hierarchical_gather(const Request& request) {
  LevelBuilder builder(*request.hierarchy);
  const Order order(request, true);
  const Slice output{Buffer::output, 0, order.total()};
  Slice mine{Buffer::input, 0, request.blocks[request.rank]};
  if (request.hierarchy->depth() == 0) {
    builder.copy(mine, output);
    return builder.take();
  }
  const Leaders leaders(request, request.root);
  for (std::size_t level = 0; level <= leaders.highest(); ++level) {
    if (leaders.way.size(level) == 1) continue;
    Part part = part_of(leaders, order, level, Op::gather);
    part.input = mine;
    if (part.index == part.root) {
      const bool done = leaders.way.is_top(level) && order.is_rank_order();
      const std::uint64_t count = order.bundle(leaders.way, level + 1, leaders.way.unit(level + 1)).count;
      part.output = mine = done ? output : builder.scratch(count);
    }
    builder.add(part);
  }
  if (request.rank == request.root && mine.buffer == Buffer::scratch)
    order.for_each_run(mine, output, [&](Slice from, Slice to) { builder.copy(from, to); });
  return builder.take();
}

// The gather backwards. Scratch: this rank's bundle at the highest level where it leads, unless that is input.
// In place: the root's own input block is read by copies only, of which the last writes output.
Schedule hierarchical_scatter(const Request& request) {
  LevelBuilder builder(*request.hierarchy);
  const Order order(request, true);
  const Slice output{Buffer::output, 0, request.blocks[request.rank]};
  Slice mine{Buffer::input, 0, order.total()};
  if (request.hierarchy->depth() == 0) {
    builder.copy(mine, output);
    return builder.take();
  }
  if (request.rank == request.root && !order.is_rank_order()) {
    const Slice input = mine;
    mine = builder.scratch(order.total());
    order.for_each_run(mine, input, [&](Slice to, Slice from) { builder.copy(from, to); });
  }
  const Leaders leaders(request, request.root);
  const Way& way = leaders.way;
  for (std::size_t level = leaders.highest() + 1; level-- > 0;) {
    if (way.size(level) == 1) continue;
    bool alone = true;  // nobody is below this rank
    for (std::size_t below = 0; below < level; ++below) alone = alone && way.size(below) == 1;
    const Range whole = order.bundle(way, level + 1, way.unit(level + 1));
    const Range own = order.bundle(way, level, way.unit(level));
    Part part = part_of(leaders, order, level, Op::scatter);
    part.input = mine;
    const bool leads = part.index == part.root;
    if (alone) {
      mine = output;
    } else {
      mine = leads ? within(mine, {own.offset - whole.offset, own.count}) : builder.scratch(own.count);
    }
    part.output = mine;
    builder.add(part);
  }
  return builder.take();
}

}  // namespace torch_iroh::collective
