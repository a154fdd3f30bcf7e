#include "transport/network.hpp"

#include <algorithm>
#include <array>
#include <map>

#include "base/bytes.hpp"

namespace torch_iroh::transport {
namespace {

constexpr std::uint32_t kMagic = 0x324d4954;  // "TIM2"
constexpr std::size_t kMostFailureBytes = 1000;
constexpr std::uint32_t kMostAgeSeconds = 600;
// Beyond these no formula needs to go: a minute, and 8 Kbit/s.
constexpr std::uint64_t kMostNs = 60'000'000'000;
constexpr std::uint64_t kMostPs = 1'000'000'000;

// u32 magic | u8 found | found: u32 age in seconds, u64 x 12 costs, u32 hosts, u32 site of each host | else: text
using Costs = std::array<std::uint64_t, 12>;

Costs costs_of(const Network& network) {
  Costs costs{};
  std::size_t next = 0;
  for (const LinkCost* link : {&network.host, &network.site, &network.wan}) {
    for (const std::uint64_t cost : {link->latency_ns, link->byte_ps, link->message_ns, link->cpu_byte_ps})
      costs[next++] = cost;
  }
  return costs;
}

}  // namespace

std::vector<std::vector<std::int32_t>> grouped(const std::vector<std::int32_t>& number_of) {
  std::vector<std::vector<std::int32_t>> groups;
  std::map<std::int32_t, std::size_t> known;
  for (std::size_t rank = 0; rank < number_of.size(); ++rank) {
    const auto [entry, is_new] = known.emplace(number_of[rank], groups.size());
    if (is_new) groups.emplace_back();
    groups[entry->second].push_back(static_cast<std::int32_t>(rank));
  }
  return groups;
}

std::vector<std::uint8_t> encode(const Decision& decision) {
  ByteWriter out;
  out.put(kMagic).put(static_cast<std::uint8_t>(decision.failure.empty()));
  if (decision.failure.empty()) {
    out.put(decision.age_seconds);
    for (const std::uint64_t cost : costs_of(decision.network)) out.put(cost);
    out.put(static_cast<std::uint32_t>(decision.network.site_of.size()));
    for (const std::int32_t site : decision.network.site_of) out.put(site);
  } else {
    out.put_text(decision.failure.substr(0, kMostFailureBytes));
  }
  return out.octets();
}

Decision decode_decision(const std::vector<std::uint8_t>& bytes, std::size_t hosts) {
  ByteReader in(std::as_bytes(std::span(bytes)));
  if (in.get<std::uint32_t>() != kMagic) throw Error(ErrorKind::protocol, "not a description of links");
  Decision decision;
  const auto found = in.get<std::uint8_t>();
  if (found > 1) throw Error(ErrorKind::protocol, "not a description of links");
  if (found == 0) {
    decision.failure = printable(in.get_text());
    if (decision.failure.empty() || decision.failure.size() > kMostFailureBytes) {
      throw Error(ErrorKind::protocol, "a failure of no or too many words");
    }
  } else {
    decision.age_seconds = in.get<std::uint32_t>();
    if (decision.age_seconds > kMostAgeSeconds) throw Error(ErrorKind::protocol, "links measured too long ago");
    Costs costs{};
    for (std::size_t i = 0; i < costs.size(); ++i) {
      costs[i] = in.get<std::uint64_t>();
      const bool is_time = i % 2 == 0;
      if (costs[i] > (is_time ? kMostNs : kMostPs)) throw Error(ErrorKind::protocol, "links slower than any link");
    }
    Network& network = decision.network;
    network.host = {costs[0], costs[1], costs[2], costs[3]};
    network.site = {costs[4], costs[5], costs[6], costs[7]};
    network.wan = {costs[8], costs[9], costs[10], costs[11]};
    if (in.get<std::uint32_t>() != hosts) throw Error(ErrorKind::protocol, "links of another number of hosts");
    std::int32_t sites = 0;
    for (std::size_t host = 0; host < hosts; ++host) {
      const auto site = in.get<std::int32_t>();
      if (site < 0 || site > sites) throw Error(ErrorKind::protocol, "sites out of order");
      sites = std::max(sites, site + 1);
      network.site_of.push_back(site);
    }
  }
  if (in.left() != 0) throw Error(ErrorKind::protocol, "links with bytes behind their end");
  return decision;
}

}  // namespace torch_iroh::transport
