// Which level the messages of an algorithm cross in a given world, counted once per group: what a cost needs to know of
// where the ranks are. Counts only; prices are in costs.cpp.
//
// Words: levels as in link_model.hpp. A *port* of level site or wan is shared by the ranks of a host; that of level
// host is a rank's own.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "collective/link_model.hpp"

namespace torch_iroh::collective {

using ByLevel = std::array<std::uint64_t, kLevels>;

// Messages that are sent at the same time.
struct Pattern {
  ByLevel edges{};  // all of them
  ByLevel port{};   // most of them that leave through one port, or come in through one
  ByLevel both{};   // the same with what leaves and what comes in added up
  Level worst() const;
};

struct Exchange {
  Pattern pattern;
  std::uint64_t shards = 0;  // in a message
};

// Along both trees, children to parents.
struct Trees {
  Pattern pattern;
  ByLevel path{};  // links from a leaf to the root, where they are worst
};

struct Shape {
  std::int32_t world = 1;
  Pattern ring;                     // r to r+1
  Pattern two_rings;                // r to r+1 and to r-1
  std::vector<Exchange> butterfly;  // its rounds, of a reduce-scatter
  std::vector<Exchange> bruck;      // its rounds, of an all_gather
  ByLevel pairs{};                  // messages through one port when every rank sends to every other one
  ByLevel fan{};                    // the same when only one rank sends
  Trees trees;                      // of an all_reduce
  Trees rooted;                     // of a reduce to rank 0

  // Ranks by host and by site.
  static Shape of(const std::vector<std::int32_t>& host_of, const std::vector<std::int32_t>& site_of);
  // `world` ranks, any two of them at `level`, each sharing its port with `sharing` that do the same in other groups
  // (where one rank sends to many, it alone does).
  static Shape uniform(std::int32_t world, Level level, std::uint64_t sharing);

  Level worst() const;  // of all pairs
};

}  // namespace torch_iroh::collective
