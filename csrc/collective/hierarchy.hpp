// The world as levels: ranks in groups (hosts), groups in groups (sites), until one group holds everyone. Says who is
// where; knows no operation and measures nothing.
//
// Words: the *units* of level 0 are the ranks; the groups of level l are the units of level l+1; the top level has one
// group. A level is stored as a list of groups or, when it is uniform, as three numbers: a million ranks are planned
// without a list of a million.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "collective/schedule.hpp"

namespace torch_iroh::collective {

// The units of one level in groups.
class Partition {
 public:
  struct Place {
    std::int32_t group = 0;
    std::int32_t index = 0;  // in the group
  };

  // `blocks` times the same: `units` consecutive units in `groups` groups that differ by at most one unit.
  static Partition balanced(std::int32_t blocks, std::int32_t units, std::int32_t groups);
  // Each unit in exactly one group.
  static Partition listed(std::vector<std::vector<std::int32_t>> groups);

  std::int32_t units() const;
  std::int32_t groups() const;
  std::int32_t size_of(std::int32_t group) const;
  std::int32_t smallest() const { return smallest_; }
  std::int32_t largest() const { return largest_; }
  Place place_of(std::int32_t unit) const;
  std::int32_t member(std::int32_t group, std::int32_t index) const;

  bool is_identity() const;  // unit u alone is group u: nothing to do here

  // The same groups, those above `bound` members cut into groups of groups: inner level first.
  std::vector<Partition> bounded(std::int32_t bound) const;

 private:
  std::int32_t blocks_ = 1, units_ = 1, groups_ = 1;  // unless listed
  std::int32_t smallest_ = 1, largest_ = 1;
  std::vector<std::vector<std::int32_t>> lists_;
  std::vector<Place> places_;
};

struct HierarchyOptions {
  std::int32_t fan_out = 32;  // no group has more members: larger ones become levels of their own
  // What runs inside the groups of each given level, innermost first; where one is missing, or does not cover an
  // operation, the group's size decides. Levels made by the bound run what the level they were cut from runs.
  std::vector<std::optional<Algorithm>> algorithms{};
};

// Immutable; shared by all requests of a group.
class Hierarchy {
 public:
  // `sizes[0]` consecutive ranks are a group (a host), `sizes[1]` such groups are one (a site), and so on. Their
  // product is the world. {1000000} is a flat world, which the bound alone turns into levels.
  static Hierarchy uniform(const std::vector<std::int32_t>& sizes, const HierarchyOptions& options = {});

  // `levels[l]` are the groups of level l as lists of ranks, innermost first: {hosts, sites}. Each level holds each
  // rank once, and a group lies inside one group of the next level. The world as one group is added.
  static Hierarchy of_groups(std::int32_t world, const std::vector<std::vector<std::vector<std::int32_t>>>& levels,
                             const HierarchyOptions& options = {});

  std::int32_t world() const { return world_; }
  std::size_t depth() const { return levels_.size(); }  // 0: one rank
  const Partition& level(std::size_t index) const { return levels_[index].partition; }
  std::optional<Algorithm> algorithm(std::size_t index) const { return levels_[index].algorithm; }

  // "8x4x2, at most 32": equal texts are equal plans. Listed groups are named by a hash of all of them.
  const std::string& text() const { return text_; }

 private:
  struct Level {
    Partition partition;
    std::optional<Algorithm> algorithm;
  };

  void add(const Partition& partition, std::optional<Algorithm> algorithm, std::int32_t fan_out);
  void name(const std::string& levels, const HierarchyOptions& options);

  std::int32_t world_ = 1;
  std::vector<Level> levels_;
  std::string text_;
};

}  // namespace torch_iroh::collective
