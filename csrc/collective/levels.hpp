// What the hierarchical makers share: one rank's way through the levels, and a builder that runs any algorithm inside a
// group of ranks as part of a larger schedule. Internal to hierarchical*.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "collective/builder.hpp"
#include "collective/hierarchy.hpp"

namespace torch_iroh::collective {

// Where one rank is at each level. A *column* of level l is made of the ranks that stand at the same indices of all
// levels below: there is one in every unit, so columns can do among units what units would do.
class Way {
 public:
  Way(const Hierarchy& hierarchy, std::int32_t rank) : hierarchy_(hierarchy) {
    units_.push_back(rank);
    for (std::size_t level = 0; level < depth(); ++level) {
      const Partition::Place place = hierarchy.level(level).place_of(units_.back());
      indices_.push_back(place.index);
      units_.push_back(place.group);
    }
  }

  std::size_t depth() const { return hierarchy_.depth(); }
  bool is_top(std::size_t level) const { return level + 1 == depth(); }
  std::int32_t unit(std::size_t level) const { return units_[level]; }
  std::int32_t index(std::size_t level) const { return indices_[level]; }
  std::int32_t size(std::size_t level) const { return hierarchy_.level(level).size_of(units_[level + 1]); }
  std::int32_t member(std::size_t level, std::int32_t index) const {
    return hierarchy_.level(level).member(units_[level + 1], index);
  }

  // How many of a group's members own a part of its data: as many as every group of the level has, so that the owners
  // of a part are a column; one where the level runs trees.
  std::int32_t owners(std::size_t level) const {
    if (is_top(level)) return size(level);
    return hierarchy_.algorithm(level) == Algorithm::tree ? 1 : hierarchy_.level(level).smallest();
  }
  // The level at which this rank owns nothing and steps aside; depth(): it owns a part to the end.
  std::size_t reach() const {
    std::size_t level = 0;
    while (level < depth() && index(level) < owners(level)) ++level;
    return level;
  }

  // The rank of this rank's column in `unit` of `level`.
  std::int32_t in_column(std::size_t level, std::int32_t unit) const {
    while (level-- > 0) unit = hierarchy_.level(level).member(unit, indices_[level]);
    return unit;
  }

  const Hierarchy& hierarchy() const { return hierarchy_; }

 private:
  const Hierarchy& hierarchy_;
  std::vector<std::int32_t> units_;    // [level]; [depth] is the world
  std::vector<std::int32_t> indices_;  // [level]
};

// One operation of one group. Buffer::input and Buffer::output of its schedule begin at `input` and `output`.
struct Part {
  Op op = Op::all_reduce;
  std::size_t level = 0;
  std::vector<std::int32_t> members{};
  std::int32_t index = 0;  // of this rank among them
  std::int32_t root = 0;   // likewise
  std::uint64_t count = 0;
  std::vector<std::uint64_t> blocks{};
  Slice input{};
  Slice output{};
  bool finishes = false;  // the last sum of its elements; finish steps of all others are left out
};

// Leaders by way of `root`: its own units are led by it, all others by their first member's leader.
class Leaders {
 public:
  Leaders(const Request& request, std::int32_t root)
      : way(*request.hierarchy, request.rank), root_way_(*request.hierarchy, root) {}

  std::int32_t leader_of(std::size_t level, std::int32_t unit) const {
    while (level > 0 && unit != root_way_.unit(level)) unit = way.hierarchy().level(--level).member(unit, 0);
    return unit == root_way_.unit(level) ? root_way_.unit(0) : unit;
  }
  std::int32_t lead_index(std::size_t level) const {
    return way.unit(level + 1) == root_way_.unit(level + 1) ? root_way_.index(level) : 0;
  }
  // The levels where this rank stands for its unit: 0 to this.
  std::size_t highest() const {
    std::size_t level = 0;
    while (!way.is_top(level) && way.index(level) == lead_index(level)) ++level;
    return level;
  }
  Part part(Op op, std::size_t level, std::uint64_t count) const {
    Part part{.op = op, .level = level, .index = way.index(level), .root = lead_index(level), .count = count};
    for (std::int32_t i = 0; i < way.size(level); ++i) part.members.push_back(leader_of(level, way.member(level, i)));
    return part;
  }

  const Way way;

 private:
  const Way root_way_;
};

class LevelBuilder : public ScheduleBuilder {
 public:
  explicit LevelBuilder(const Hierarchy& hierarchy) : hierarchy_(hierarchy) {}

  Slice scratch(std::uint64_t count) {
    scratch_ += count;
    lend_scratch(scratch_);
    return {Buffer::scratch, scratch_ - count, count};
  }

  void add(const Part& part) {
    const auto size = static_cast<std::int32_t>(part.members.size());
    Request request;
    request.op = part.op;
    request.rank = part.index, request.world = size, request.root = part.root;
    request.count = part.count, request.blocks = part.blocks;
    request.algorithm = nearest(hierarchy_.algorithm(part.level).value_or(default_of(part.op, size)), request);
    const Schedule schedule = make_schedule(request);
    const Slice borrowed = scratch(schedule.scratch_count);
    const auto placed = [&](Slice slice) {
      const Slice& base = slice.buffer == Buffer::input    ? part.input
                          : slice.buffer == Buffer::output ? part.output
                                                           : borrowed;
      return Slice{base.buffer, base.offset + slice.offset, slice.count};
    };
    for (const Step& step : schedule.steps) {
      const std::int32_t peer = step.peer < 0 ? -1 : part.members[static_cast<std::size_t>(step.peer)];
      switch (step.kind) {
        case StepKind::send: send(peer, placed(step.from)); break;
        case StepKind::recv: recv(peer, placed(step.to)); break;
        case StepKind::recv_reduce: recv_reduce(peer, placed(step.from), placed(step.to)); break;
        case StepKind::copy:
          if (placed(step.from) != placed(step.to)) copy(placed(step.from), placed(step.to));  // in place already
          break;
        case StepKind::finish:
          if (part.finishes) finish(placed(step.to));
          break;
      }
    }
  }

 private:
  // Few members: one hop. More: few peers, at most 2 ceil(log2 size), since levels add up.
  static Algorithm default_of(Op op, std::int32_t size) {
    const bool rooted = op == Op::reduce || op == Op::broadcast || op == Op::gather || op == Op::scatter;
    return size <= 4 ? Algorithm::direct : rooted ? Algorithm::tree : Algorithm::butterfly;
  }

  const Hierarchy& hierarchy_;
  std::uint64_t scratch_ = 0;
};

}  // namespace torch_iroh::collective
