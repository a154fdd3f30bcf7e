// Which level the messages of an algorithm cross in a given world, counted once per group: what a cost needs to know of
// where the ranks are. Counts only; prices are in costs.cpp.
//
// Words: levels as in link_model.hpp. A host has one *uplink* for site and wan, which its ranks share; within a host
// each rank has a port of its own.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "collective/link_model.hpp"

namespace torch_iroh::collective {

using ByLevel = std::array<std::uint64_t, kLevels>;

// Messages through one port or uplink in one direction, where they are most. Which uplink that is depends on prices:
// all that could be are kept.
class Load {
 public:
  struct Uplink {
    std::uint64_t site = 0;
    std::uint64_t wan = 0;
  };
  void add_port(std::uint64_t messages) { port_ = std::max(port_, messages); }
  void add_uplink(const Uplink& one);
  void share(std::uint64_t ranks);  // of a host, which all do the same

  std::uint64_t port() const { return port_; }
  const std::vector<Uplink>& uplinks() const { return uplinks_; }

 private:
  std::uint64_t port_ = 0;
  std::vector<Uplink> uplinks_;
};

// Messages that are sent at the same time.
struct Pattern {
  ByLevel edges{};  // all of them
  Load load;        // where they leave or come in
  Load both;        // the same with what leaves and what comes in added up
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
  Load pairs;                       // when every rank sends to every other one
  Load fan;                         // when only one rank does
  Level worst = Level::host;        // of all pairs
  Trees trees;                      // of an all_reduce
  Trees rooted;                     // of a reduce to rank 0

  // Ranks by host and by site.
  static Shape of(const std::vector<std::int32_t>& host_of, const std::vector<std::int32_t>& site_of);
  // `world` ranks, any two of them at `level`, each sharing its port with `sharing` that do the same in other groups
  // (where one rank sends to many, it alone does).
  static Shape uniform(std::int32_t world, Level level, std::uint64_t sharing);
};

}  // namespace torch_iroh::collective
