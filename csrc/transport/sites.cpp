#include "transport/sites.hpp"

#include <algorithm>
#include <map>

namespace torch_iroh::transport {
namespace {

// New landmarks in a round. With as many as there are sites one round is enough; each is measured to by all hosts that
// have no site, which many hosts notice.
constexpr std::size_t kCandidates = 4;
constexpr std::size_t kCandidatesOfMany = 2;
constexpr std::size_t kMany = 16;

// What a processor does for iroh, as on loopback (docs/scaling.md); nobody measures it at run time.
constexpr std::uint64_t kMessageNs = 230'000;
constexpr std::uint64_t kCpuBytePs = 3'600;
// Ranks of a host that share no memory send through iroh: nothing but the processor is slow.
constexpr LinkCost kLoopback = {50'000, 100, kMessageNs, kCpuBytePs};
// benchmarks/messages.py: 1 byte in some 70 us, 16 MiB in 1.3 to 1.6 ms.
constexpr LinkCost kMemory = {30'000, 50, 20'000, 50};

}  // namespace

std::vector<std::int32_t> targets_of(std::int32_t host, const std::vector<std::int32_t>& landmarks) {
  return {landmarks.begin(), std::find(landmarks.begin(), landmarks.end(), host)};
}

SiteFinder::SiteFinder(const std::vector<std::string>& hints)
    : site_of_(hints.size(), -1), landmark_(hints.size(), -1), reaches_(hints.size()) {
  std::map<std::string, std::int32_t> known;
  for (std::size_t host = 0; host < hints.size(); ++host) {
    if (hints[host].empty()) continue;
    const auto [entry, is_new] = known.emplace(hints[host], sites_);
    if (is_new) ++sites_;
    site_of_[host] = entry->second;
    if (is_new && landmarks_ < kMostLandmarks) {
      landmark_[host] = entry->second;
      ++landmarks_;
      asked_.push_back(static_cast<std::int32_t>(host));
    }
  }
  ask();
}

// Adds candidates, spread over the hosts that have no site.
void SiteFinder::ask() {
  std::vector<std::int32_t> left;
  for (std::size_t host = 0; host < site_of_.size(); ++host) {
    if (site_of_[host] < 0) left.push_back(static_cast<std::int32_t>(host));
  }
  if (left.empty()) return asked_.clear();
  const std::size_t most = left.size() > kMany ? kCandidatesOfMany : kCandidates;
  const std::size_t count = std::min({most, left.size(), kMostLandmarks - landmarks_});
  for (std::size_t i = 0; i < count; ++i) asked_.push_back(left[i * left.size() / count]);
}

bool SiteFinder::is_leaf(std::int32_t host) const {
  const auto& known = reaches_[static_cast<std::size_t>(host)];
  return !known.empty() && std::all_of(known.begin(), known.end(), [](const Reach& one) { return one.relayed; });
}

std::int32_t SiteFinder::near_site(std::int32_t host) const {
  std::int32_t nearest = -1;
  std::uint32_t least = kSiteRttUs;
  for (const Reach& one : reaches_[static_cast<std::size_t>(host)]) {
    const std::int32_t other = one.from == host ? one.to : one.from;
    const std::int32_t site = landmark_[static_cast<std::size_t>(other)];
    if (site < 0 || one.relayed || one.rtt_us > least) continue;
    if (nearest < 0 || one.rtt_us < least) nearest = site, least = one.rtt_us;
  }
  return nearest;
}

std::int32_t SiteFinder::new_site(std::int32_t host) {
  return site_of_[static_cast<std::size_t>(host)] = sites_++;
}

void SiteFinder::add(const std::vector<Reach>& found) {
  for (const Reach& one : found) {
    reaches_[static_cast<std::size_t>(one.from)].push_back(one);
    reaches_[static_cast<std::size_t>(one.to)].push_back(one);
  }
  for (const std::int32_t host : asked_) {
    if (!asks(host)) continue;  // of a hinted site
    const std::int32_t site = near_site(host);
    if (site >= 0) {
      site_of_[static_cast<std::size_t>(host)] = site;
    } else if (is_leaf(host)) {
      new_site(host);
    } else {
      landmark_[static_cast<std::size_t>(host)] = new_site(host);
      ++landmarks_;
    }
  }
  for (std::size_t i = 0; i < site_of_.size(); ++i) {
    const auto host = static_cast<std::int32_t>(i);
    if (!asks(host)) continue;
    const std::int32_t site = near_site(host);
    if (site >= 0) {
      site_of_[i] = site;
    } else if (is_leaf(host) || landmarks_ == kMostLandmarks) {
      new_site(host);
    }
  }
  asked_.clear();
  ask();
}

std::vector<std::int32_t> SiteFinder::sites() const {
  std::map<std::int32_t, std::int32_t> numbers;
  std::vector<std::int32_t> sites;
  for (const std::int32_t site : site_of_) {
    sites.push_back(numbers.emplace(site, static_cast<std::int32_t>(numbers.size())).first->second);
  }
  return sites;
}

std::uint64_t best_rate(const std::vector<Arrival>& arrivals) {
  if (arrivals.size() < 2) return 0;
  const std::uint64_t all = arrivals.back().ns - arrivals.front().ns;
  const std::uint64_t window = std::max<std::uint64_t>(1, std::min(kRateWindowNs, all));
  std::uint64_t best = 0;
  std::uint64_t bytes = 0;
  std::size_t first = 0;
  for (std::size_t last = 1; last < arrivals.size(); ++last) {
    bytes += arrivals[last].bytes;
    while (first + 1 < last && arrivals[last].ns - arrivals[first + 1].ns >= window) bytes -= arrivals[++first].bytes;
    const std::uint64_t span = arrivals[last].ns - arrivals[first].ns;
    if (span >= window) best = std::max(best, bytes * 1'000'000 / std::max<std::uint64_t>(1, span / 1000));
  }
  return best;
}

std::uint64_t rounded(std::uint64_t value) {
  std::uint64_t power = 1;
  while (value / power >= 10) power *= 10;
  // Halfway as factors: the square roots of 2, 10 and 50.
  if (value * 1000 < power * 1414) return power;
  if (value * 1000 < power * 3162) return 2 * power;
  return value * 1000 < power * 7071 ? 5 * power : 10 * power;
}

LinkCost host_link(bool hosts_share) {
  return hosts_share ? kMemory : kLoopback;
}

Network network_of(const std::vector<std::int32_t>& site_of, const std::vector<Reach>& reaches,
                   const std::vector<Flow>& flows, bool hosts_share) {
  Network network;
  network.host = host_link(hosts_share);
  network.site = network.wan = {0, 0, kMessageNs, kCpuBytePs};
  network.site_of = site_of;
  const auto link_between = [&](std::int32_t a, std::int32_t b) -> LinkCost& {
    return site_of[static_cast<std::size_t>(a)] == site_of[static_cast<std::size_t>(b)] ? network.site : network.wan;
  };
  for (const Reach& one : reaches) {
    LinkCost& link = link_between(one.from, one.to);
    link.latency_ns = std::max(link.latency_ns, rounded(std::uint64_t{one.rtt_us} * 500));
  }
  for (const Flow& one : flows) {
    LinkCost& link = link_between(one.from, one.to);
    const std::uint64_t byte_ps = 1'000'000'000'000 / std::max<std::uint64_t>(1'000, one.bytes_per_second);
    link.byte_ps = std::max(link.byte_ps, rounded(std::max<std::uint64_t>(1, byte_ps)));
  }
  if (network.site.byte_ps == 0) network.site = network.wan;
  if (network.wan.byte_ps == 0) network.wan = network.site;
  return network;
}

}  // namespace torch_iroh::transport
