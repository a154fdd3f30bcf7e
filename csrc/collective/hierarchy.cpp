#include "collective/hierarchy.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace torch_iroh::collective {
namespace {

std::int32_t parts_of(std::int32_t units, std::int32_t bound) {
  return units / bound + (units % bound > 0 ? 1 : 0);
}

[[noreturn]] void refuse(const std::string& fact) {
  throw std::invalid_argument("hierarchy: " + fact);
}

// FNV-1a over the numbers; what counts is that ranks with other groups find another text.
std::uint64_t mixed(std::uint64_t hash, std::int32_t value) {
  for (int byte = 0; byte < 4; ++byte)
    hash = (hash ^ ((static_cast<std::uint32_t>(value) >> (8 * byte)) & 0xff)) * 0x100000001b3;
  return hash;
}

}  // namespace

// ---- one level ----

Partition Partition::balanced(std::int32_t blocks, std::int32_t units, std::int32_t groups) {
  Partition partition;
  partition.blocks_ = blocks, partition.units_ = units, partition.groups_ = groups;
  partition.smallest_ = units / groups, partition.largest_ = parts_of(units, groups);
  return partition;
}

Partition Partition::listed(std::vector<std::vector<std::int32_t>> groups) {
  Partition partition;
  std::size_t units = 0;
  for (const auto& group : groups) units += group.size();
  if (groups.empty()) refuse("a level has no group");
  partition.places_.assign(units, {-1, 0});
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].empty()) refuse("group " + std::to_string(g) + " is empty");
    for (std::size_t i = 0; i < groups[g].size(); ++i) {
      const std::int32_t unit = groups[g][i];
      if (unit < 0 || static_cast<std::size_t>(unit) >= units)
        refuse(std::to_string(unit) + " is outside 0.." + std::to_string(units - 1));
      Place& place = partition.places_[static_cast<std::size_t>(unit)];
      if (place.group >= 0) refuse(std::to_string(unit) + " is in two groups");
      place = {static_cast<std::int32_t>(g), static_cast<std::int32_t>(i)};
    }
  }
  const auto [least, most] = std::minmax_element(groups.begin(), groups.end(),
                                                 [](const auto& a, const auto& b) { return a.size() < b.size(); });
  partition.smallest_ = static_cast<std::int32_t>(least->size());
  partition.largest_ = static_cast<std::int32_t>(most->size());
  partition.lists_ = std::move(groups);
  return partition;
}

std::int32_t Partition::units() const {
  return lists_.empty() ? blocks_ * units_ : static_cast<std::int32_t>(places_.size());
}

std::int32_t Partition::groups() const {
  return lists_.empty() ? blocks_ * groups_ : static_cast<std::int32_t>(lists_.size());
}

std::int32_t Partition::size_of(std::int32_t group) const {
  if (!lists_.empty()) return static_cast<std::int32_t>(lists_[static_cast<std::size_t>(group)].size());
  return static_cast<std::int32_t>(shard_of(static_cast<std::uint64_t>(units_), groups_, group % groups_).count);
}

Partition::Place Partition::place_of(std::int32_t unit) const {
  if (!lists_.empty()) return places_[static_cast<std::size_t>(unit)];
  const std::int32_t inner = unit % units_;
  const std::int32_t size = units_ / groups_;  // and one more in the first `longer` groups
  const std::int32_t longer = units_ % groups_;
  const std::int32_t border = longer * (size + 1);
  const std::int32_t group = inner < border ? inner / (size + 1) : longer + (inner - border) / size;
  const auto begin = static_cast<std::int32_t>(shard_of(static_cast<std::uint64_t>(units_), groups_, group).offset);
  return {unit / units_ * groups_ + group, inner - begin};
}

std::int32_t Partition::member(std::int32_t group, std::int32_t index) const {
  if (!lists_.empty()) return lists_[static_cast<std::size_t>(group)][static_cast<std::size_t>(index)];
  const Range range = shard_of(static_cast<std::uint64_t>(units_), groups_, group % groups_);
  return group / groups_ * units_ + static_cast<std::int32_t>(range.offset) + index;
}

bool Partition::is_identity() const {
  if (largest() > 1) return false;
  for (std::size_t unit = 0; unit < places_.size(); ++unit)
    if (places_[unit].group != static_cast<std::int32_t>(unit)) return false;
  return true;
}

std::vector<Partition> Partition::bounded(std::int32_t bound) const {
  if (largest() <= bound) return {*this};
  std::vector<Partition> levels;
  const std::int32_t parts = parts_of(largest(), bound);
  if (lists_.empty() && units_ % groups_ == 0) {  // groups of one size: each is cut alike
    levels.push_back(balanced(groups(), size_of(0), parts));
    for (const Partition& outer : balanced(groups(), parts, 1).bounded(bound)) levels.push_back(outer);
    return levels;
  }
  std::vector<std::vector<std::int32_t>> inner, outer;
  for (std::int32_t group = 0; group < groups(); ++group) {
    auto& pieces = outer.emplace_back();
    const std::int64_t size = size_of(group);  // in pieces of about one size in all groups
    const std::int64_t alike = (size * parts + largest() / 2) / largest();
    const auto count = static_cast<std::int32_t>(std::max<std::int64_t>(alike, parts_of(size_of(group), bound)));
    for (std::int32_t part = 0; part < count; ++part) {
      const Range range = shard_of(static_cast<std::uint64_t>(size_of(group)), count, part);
      pieces.push_back(static_cast<std::int32_t>(inner.size()));
      auto& members = inner.emplace_back();
      for (std::uint64_t i = 0; i < range.count; ++i)
        members.push_back(member(group, static_cast<std::int32_t>(range.offset + i)));
    }
  }
  levels.push_back(listed(std::move(inner)));
  for (const Partition& rest : listed(std::move(outer)).bounded(bound)) levels.push_back(rest);
  return levels;
}

// ---- all levels ----

void Hierarchy::add(const Partition& partition, std::optional<Algorithm> algorithm, std::int32_t fan_out) {
  for (const Partition& level : partition.bounded(fan_out))
    if (!level.is_identity()) levels_.push_back({level, algorithm});
}

void Hierarchy::name(const std::string& levels, const HierarchyOptions& options) {
  text_ = levels + ", at most " + std::to_string(options.fan_out);
  for (const auto& algorithm : options.algorithms)
    text_ += ", " + (algorithm ? std::string(name_of(*algorithm)) : std::string("auto"));
}

namespace {

void check(const HierarchyOptions& options) {
  if (options.fan_out < 2) refuse("fan_out " + std::to_string(options.fan_out) + " is below 2");
  for (const auto& algorithm : options.algorithms)
    if (algorithm == Algorithm::hierarchical) refuse("a level cannot run hierarchical: give it as levels of its own");
}

std::optional<Algorithm> algorithm_at(const HierarchyOptions& options, std::size_t level) {
  return level < options.algorithms.size() ? options.algorithms[level] : std::nullopt;
}

}  // namespace

Hierarchy Hierarchy::uniform(const std::vector<std::int32_t>& sizes, const HierarchyOptions& options) {
  check(options);
  Hierarchy hierarchy;
  std::int64_t world = 1;
  std::string text;
  for (const std::int32_t size : sizes) {
    if (size < 1) refuse("a level of " + std::to_string(size) + " members");
    world *= size;
    if (world > std::numeric_limits<std::int32_t>::max()) refuse("more ranks than 2^31");
    text += (text.empty() ? "" : "x") + std::to_string(size);
  }
  hierarchy.world_ = static_cast<std::int32_t>(world);
  std::int32_t groups = hierarchy.world_;
  for (std::size_t level = 0; level < sizes.size(); ++level) {
    groups /= sizes[level];
    hierarchy.add(Partition::balanced(groups, sizes[level], 1), algorithm_at(options, level), options.fan_out);
  }
  hierarchy.name(text, options);
  return hierarchy;
}

Hierarchy Hierarchy::of_groups(std::int32_t world, const std::vector<std::vector<std::vector<std::int32_t>>>& levels,
                               const HierarchyOptions& options) {
  check(options);
  if (world < 1) refuse("world " + std::to_string(world) + " is below 1");
  Hierarchy hierarchy;
  hierarchy.world_ = world;
  std::uint64_t hash = 0xcbf29ce484222325;
  std::string text;
  std::vector<std::int32_t> unit_of(static_cast<std::size_t>(world));  // of each rank, at this level
  for (std::int32_t rank = 0; rank < world; ++rank) unit_of[static_cast<std::size_t>(rank)] = rank;
  std::int32_t units = world;
  const auto finish_level = [&](const std::vector<std::vector<std::int32_t>>& groups, std::size_t level) {
    std::vector<std::vector<std::int32_t>> of_units;
    std::vector<std::int32_t> group_of(static_cast<std::size_t>(units), -1), next(unit_of.size(), -1);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      auto& members = of_units.emplace_back();
      for (const std::int32_t rank : groups[g]) {
        if (rank < 0 || rank >= world)
          refuse("level " + std::to_string(level) + ": rank " + std::to_string(rank) + " is outside the world");
        auto& mine = next[static_cast<std::size_t>(rank)];
        if (mine >= 0)
          refuse("level " + std::to_string(level) + ": rank " + std::to_string(rank) + " is in two groups");
        mine = static_cast<std::int32_t>(g);
        hash = mixed(hash, rank);
        const std::int32_t unit = unit_of[static_cast<std::size_t>(rank)];
        auto& group = group_of[static_cast<std::size_t>(unit)];
        if (group < 0) group = mine, members.push_back(unit);
        if (group != mine)
          refuse("level " + std::to_string(level) + ": rank " + std::to_string(rank) +
                 " is not with its group of the level below");
      }
      hash = mixed(hash, -1);
    }
    for (std::int32_t rank = 0; rank < world; ++rank)
      if (next[static_cast<std::size_t>(rank)] < 0)
        refuse("level " + std::to_string(level) + ": rank " + std::to_string(rank) + " is in no group");
    hierarchy.add(Partition::listed(std::move(of_units)), algorithm_at(options, level), options.fan_out);
    unit_of = std::move(next);
    units = static_cast<std::int32_t>(groups.size());
    text += (text.empty() ? "" : "/") + std::to_string(groups.size());
  };
  for (std::size_t level = 0; level < levels.size(); ++level) finish_level(levels[level], level);
  if (units > 1) {
    std::vector<std::int32_t> everyone;
    for (std::int32_t rank = 0; rank < world; ++rank) everyone.push_back(rank);
    finish_level({everyone}, levels.size());
  }
  hierarchy.name("groups " + text + " #" + std::to_string(hash), options);
  return hierarchy;
}

}  // namespace torch_iroh::collective
