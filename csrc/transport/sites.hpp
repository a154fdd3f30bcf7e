// Which hosts make a site, and what the links of each level cost, from what hosts measured. Pure: who measures is
// probe.cpp.
//
// Words: a *site* is a set of hosts that reach its *landmark* (one of them) directly within kSiteRtt. A host that says
// its site (TORCH_IROH_SITE) is in that one, whatever it measures. A host that all others reach through a relay only is
// a site of its own and nobody's landmark.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/network.hpp"

namespace torch_iroh::transport {

inline constexpr std::uint32_t kSiteRttUs = 3000;
inline constexpr std::size_t kMostLandmarks = 16;

// What one host found about the way to another.
struct Reach {
  std::int32_t from = 0;
  std::int32_t to = 0;
  std::uint32_t rtt_us = 0;
  bool relayed = false;
};

// Whom `host` asks when these are the landmarks: all of them, and as one of them those before it.
std::vector<std::int32_t> targets_of(std::int32_t host, const std::vector<std::int32_t>& landmarks);

// Places hosts round by round, so that no host measures to more than kMostLandmarks others whatever the world is.
class SiteFinder {
 public:
  explicit SiteFinder(const std::vector<std::string>& hints);  // by host; empty: it says none

  // Whom the hosts without a site measure to now. Empty: all have one, or there are landmarks enough and the hosts that
  // are left are sites of their own.
  const std::vector<std::int32_t>& landmarks() const { return asked_; }
  bool asks(std::int32_t host) const { return site_of_[static_cast<std::size_t>(host)] < 0; }

  // All that was asked for.
  void add(const std::vector<Reach>& found);

  // By host, numbered in the order of their first hosts.
  std::vector<std::int32_t> sites() const;

 private:
  void ask();
  bool is_leaf(std::int32_t host) const;
  std::int32_t near_site(std::int32_t host) const;  // -1: none
  std::int32_t new_site(std::int32_t host);

  std::vector<std::int32_t> site_of_;        // -1: not placed
  std::vector<std::int32_t> landmark_;       // by host: the site that it is the landmark of, or -1
  std::vector<std::vector<Reach>> reaches_;  // by either end
  std::vector<std::int32_t> asked_;
  std::size_t landmarks_ = 0;
  std::int32_t sites_ = 0;
};

// Bytes that came, and when (nanoseconds of any clock).
struct Arrival {
  std::uint64_t ns = 0;
  std::uint64_t bytes = 0;
};

// The best rate over a window of kRateWindowNs, or over all when that is shorter; bytes per second, 0 when it cannot be
// told. The first arrival only starts the clock.
inline constexpr std::uint64_t kRateWindowNs = 20'000'000;
std::uint64_t best_rate(const std::vector<Arrival>& arrivals);

struct Flow {
  std::int32_t from = 0;
  std::int32_t to = 0;
  std::uint64_t bytes_per_second = 0;
};

// The slowest of each level decides, for a collective waits for it; rounded to 1, 2 or 5 times a power of ten, so that
// two measurements of the same links agree as a rule. A level without links costs what the other one does.
// `hosts_share`: what ranks of a host send each other goes through memory.
Network network_of(const std::vector<std::int32_t>& site_of, const std::vector<Reach>& reaches,
                   const std::vector<Flow>& flows, bool hosts_share);

// Within a host, where nothing is measured.
LinkCost host_link(bool hosts_share);

std::uint64_t rounded(std::uint64_t value);

}  // namespace torch_iroh::transport
