// What it costs to move bytes between ranks: three levels of links, a processor per rank. Numbers only; the virtual
// clock that spends them is simulator.cpp.
//
// Words: a *site* is a group of hosts with a fast network of their own; the *wan* lies between sites. Ranks fill hosts
// and hosts fill sites in order, so that levels have uniform sizes (the last host or site may be short).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace torch_iroh::collective {

enum class Level : std::uint8_t { host, site, wan };
inline constexpr std::size_t kLevels = 3;

// One level's links. A port sends at `bandwidth` and, at the same time, receives at `bandwidth`; whatever shares the
// port queues. The port of level host is a rank's own, those of site and wan are each shared by the ranks of a host.
struct Link {
  double latency = 0;                                          // seconds, one way: half of what ping shows
  double bandwidth = std::numeric_limits<double>::infinity();  // bytes per second
  double jitter = 0;                                           // seconds; each chunk is late by 0..jitter, uniformly
  double message_cost = 0;                                     // seconds of a rank's processor per chunk, at each end
  double byte_cost = 0;                                        // seconds of a rank's processor per byte, at each end
};

struct LinkModel {
  Link host;
  Link site;
  Link wan;
  std::int32_t ranks_per_host = 1;
  std::int32_t hosts_per_site = 1;
  double local_byte_cost = 0;  // seconds of a rank's processor per byte that it reduces or copies
  std::size_t chunk_bytes = 256 << 10;
  std::uint64_t seed = 1;   // of the jitter
  bool one_uplink = false;  // a host has one port for both levels, site and wan

  std::int32_t host_of(std::int32_t rank) const { return rank / ranks_per_host; }
  std::int32_t site_of(std::int32_t rank) const { return host_of(rank) / hosts_per_site; }

  Level level_between(std::int32_t a, std::int32_t b) const {
    if (host_of(a) == host_of(b)) return Level::host;
    return site_of(a) == site_of(b) ? Level::site : Level::wan;
  }

  const Link& link(Level level) const {
    switch (level) {
      case Level::host: return host;
      case Level::site: return site;
      case Level::wan: break;
    }
    return wan;
  }
};

}  // namespace torch_iroh::collective
