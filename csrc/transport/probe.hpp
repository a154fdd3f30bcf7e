// How a group of several hosts measures its links when it is made. One rank of each host takes part, through the store
// and a few messages: first to landmarks, which finds sites (sites.hpp), then around one ring of all hosts, neighbours
// of a site side by side, which finds latencies and rates. Rank 0 decides; all ranks read what it wrote.
//
//   store, below the group's prefix:
//   probe/step/N       rank 0: what all hosts do next     u32 kind, then by kind
//     ask      u32 landmarks, u32 host each, u8 for each host: whether it asks
//     pings    u32 site of each host: ask the next in the ring
//     flows    u32 site of each host: send to the next in the ring
//     stop
//   probe/found/N/H    first rank of host H: what it found   u32 ok, then
//     not ok   text
//     ask, pings    u32 count, for each: u32 host, u32 rtt_us, u8 relayed
//     flows    u64 bytes per second, from the previous in the ring
//   probe/decision     rank 0: see network.hpp
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/membership.hpp"
#include "transport/network.hpp"

namespace torch_iroh::transport {

// Longer than this a group does not wait for its probes.
inline constexpr Duration kMostProbeTime = milliseconds(5000);

// Blocks until the links are known, or are known not to become known: then none, and rank 0's log says why. All ranks
// of the group call it, with the same `joined` but for its transport. Throws Error(timeout) when rank 0 says nothing at
// all, Error(protocol) when what it says is none of the above.
std::optional<Network> probe_network(KeyValueStore& store, const std::shared_ptr<link::Node>& node,
                                     const JoinRequest& request, const Joined& joined);

}  // namespace torch_iroh::transport
