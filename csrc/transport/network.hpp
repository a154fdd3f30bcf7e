// What the links between the ranks of a group cost, in whole numbers that are equal on all ranks, and which hosts make
// a site. Numbers only; who measures them is probe.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torch_iroh::transport {

// Between two ranks of one level: host (both on one), site, wan.
struct LinkCost {
  std::uint64_t latency_ns = 0;   // one way: half of what ping shows
  std::uint64_t byte_ps = 0;      // picoseconds that a byte keeps a host's (within a host: a rank's) port busy
  std::uint64_t message_ns = 0;   // of a rank's processor for a chunk, at each end
  std::uint64_t cpu_byte_ps = 0;  // of a rank's processor for a byte, at each end
  bool operator==(const LinkCost&) const = default;
};

struct Network {
  LinkCost host{};
  LinkCost site{};
  LinkCost wan{};
  std::vector<std::int32_t> host_of;  // by rank
  std::vector<std::int32_t> site_of;  // by rank
  bool operator==(const Network&) const = default;
};

// What rank 0 tells the group: the links and `network.site_of` by host (host_of is known to all), or why there is none.
struct Decision {
  Network network{};
  std::string failure{};          // not empty: the network is not known
  std::uint32_t age_seconds = 0;  // since it was measured
};

// Ranks by what they have in common, in the order of their first ranks.
std::vector<std::vector<std::int32_t>> grouped(const std::vector<std::int32_t>& number_of);

std::vector<std::uint8_t> encode(const Decision& decision);
// Throws Error(protocol) when it is no decision for that many hosts.
Decision decode_decision(const std::vector<std::uint8_t>& bytes, std::size_t hosts);

}  // namespace torch_iroh::transport
