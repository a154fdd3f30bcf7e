// What the hosts of a group tell each other through the store while they measure its links. The bytes are in probe.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/error.hpp"
#include "transport/sites.hpp"

namespace torch_iroh::transport::probe {

enum class Kind : std::uint32_t { stop, ask, pings, flows };

// What hosts do next.
struct Step {
  Kind kind = Kind::stop;
  std::vector<std::int32_t> landmarks{};
  std::vector<bool> asks{};             // by host
  std::vector<std::int32_t> site_of{};  // by host
};

std::vector<std::uint8_t> encode(const Step& step);
Step decode_step(const std::vector<std::uint8_t>& bytes, std::size_t hosts);  // throws Error(protocol)

// Whom `host` asks in `step`.
std::vector<std::int32_t> targets_in(const Step& step, std::int32_t host);

// All hosts, those of a site side by side, so that as few links as there are sites lead from one to another.
std::vector<std::int32_t> ring_of(const std::vector<std::int32_t>& site_of);
std::int32_t beside(const std::vector<std::int32_t>& ring, std::int32_t host, std::size_t steps);

// What a host found.
struct Found {
  std::vector<Reach> reaches{};
  std::uint64_t rate = 0;
};

std::vector<std::uint8_t> encode(const Found& found, Kind kind);
std::vector<std::uint8_t> encode(const Error& why_not);
// Of exactly what `host` was to ask. Throws Error(protocol); Error(timeout) with the host's own words where it failed.
Found decode_found(const std::vector<std::uint8_t>& bytes, Kind kind, std::int32_t host,
                   const std::vector<std::int32_t>& targets);

}  // namespace torch_iroh::transport::probe
