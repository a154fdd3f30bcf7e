// What the links between the ranks of a group cost, in whole numbers that are equal on all ranks, and which hosts make
// a site. Numbers only; who measures them is network_probe.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_iroh::transport {

// Between two ranks of one level: host (both on one), site, wan.
struct LinkCost {
  std::uint64_t latency_ns = 0;  // one way: half of what ping shows
  std::uint64_t byte_ps = 0;     // picoseconds that a byte keeps a host's (within a host: a rank's) port busy
  bool operator==(const LinkCost&) const = default;
};

struct Network {
  LinkCost host{};
  LinkCost site{};
  LinkCost wan{};
  std::uint64_t message_ns = 0;       // of a rank's processor for a chunk, at each end
  std::uint64_t cpu_byte_ps = 0;      // of a rank's processor for a byte, at each end
  std::vector<std::int32_t> host_of;  // by rank
  std::vector<std::int32_t> site_of;  // by rank
  bool operator==(const Network&) const = default;
};

}  // namespace torch_iroh::transport
