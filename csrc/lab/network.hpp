// The emulated internet: sites, the line of each, and the way between each two. A frame waits for its site's uplink
// (rate, queue), travels (delay, jitter, loss, cut), waits for the other site's downlink, and arrives.
//
// Frames go in with `now`, arrivals come out: no socket and no clock here.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "frame.hpp"

namespace torch_iroh::lab {

using Nanoseconds = std::chrono::nanoseconds;
using Time = Nanoseconds;  // since the clock's own beginning
using SiteId = std::uint32_t;

// What all frames under way may take together. Beyond it they are dropped, and counted as `overflow`.
inline constexpr std::size_t kMaxHeldBytes = std::size_t{256} << 20;
inline constexpr std::size_t kMaxSites = 250;

// What is not said here is said by the next wider rule: pair of sites, pair of regions, all.
struct Rule {
  std::optional<Nanoseconds> delay;
  std::optional<Nanoseconds> jitter;  // each frame takes up to this much longer, evenly distributed
  std::optional<double> loss;         // 0 to 1, of single packets
  std::optional<bool> reorder;        // may jitter let a later frame pass an earlier one?
  bool cut = false;                   // by any rule that says so
};

struct Line {
  double up_bits_per_second = 0;  // 0: no limit
  double down_bits_per_second = 0;
  Nanoseconds queue{50'000'000};  // what would wait longer is dropped
  std::size_t mtu = 65'535;       // larger packets are dropped, in both directions and in silence
};

struct Counters {
  std::uint64_t sent_packets = 0, sent_bytes = 0;                // taken from the site
  std::uint64_t received_packets = 0, received_bytes = 0;        // handed to the site
  std::uint64_t lost = 0, cut = 0, unroutable = 0, too_big = 0;  // packets it sent
  std::uint64_t up_dropped = 0, down_dropped = 0;                // queue full
  std::uint64_t malformed = 0, overflow = 0, refused = 0;        // refused: by the site's kernel
};

struct Site {
  std::string name;
  std::string region;
  std::vector<Prefix> prefixes;
  Line line;
  Counters counters;
  bool cut = false;
  bool plugged = true;  // else nothing reaches it; what it sends is its kernel's business
  Time up_free{0}, down_free{0};
};

struct Traffic {
  std::uint64_t packets = 0, bytes = 0;
};

class Network {
 public:
  explicit Network(std::uint64_t seed) : random_(seed) {}

  // Throws std::invalid_argument: a name that is taken, or too many.
  void require_new(std::string_view name) const;
  SiteId add_site(std::string_view name, std::string_view region);
  // Throws std::invalid_argument when there is none of that name.
  SiteId find(std::string_view name) const;
  Site& site(SiteId id) { return sites_[id]; }
  std::span<const Site> sites() const { return sites_; }
  Rule& everywhere() { return everywhere_; }
  Rule& between_regions(std::string_view from, std::string_view to);
  Rule& between_sites(SiteId from, SiteId to) { return path(from, to).rule; }
  // Handed over so far, by (from, to), without pairs that never were.
  std::map<std::pair<SiteId, SiteId>, Traffic> traffic() const;

  // A frame that site `from` sends.
  void offer(SiteId from, std::span<const std::uint8_t> bytes, Time now);
  // When `advance` has something to do next.
  std::optional<Time> next() const;
  // False when the site could not take it. `bytes` are lent until return.
  using Deliver = std::function<bool(SiteId to, std::span<const std::uint8_t> bytes)>;
  void advance(Time now, const Deliver& deliver);

 private:
  struct Path {
    Rule rule;
    Time last{0};
    Traffic traffic;
  };
  struct Way {  // a path's rules, worked out
    Nanoseconds delay, jitter;
    double loss;
    bool reorder, cut;
  };
  struct UnderWay {
    Time at;     // its first segment's, at the downlink; or its arrival
    Time whole;  // all of it has come to the downlink
    std::uint64_t order;
    SiteId from, to;
    bool arrives;
    Frame frame;
  };

  Path& path(SiteId from, SiteId to) { return paths_[std::uint64_t{from} << 32 | to]; }
  Way way(SiteId from, SiteId to);
  std::optional<SiteId> route(const Address& to) const;
  void send_piece(SiteId from, SiteId to, const Frame& frame, std::size_t first, std::size_t last, const Way& way,
                  Time now);
  void depart(SiteId from, SiteId to, Frame frame, const Way& way, Time first_out, Time whole_out);
  void enter_downlink(UnderWay moving);
  void push(UnderWay moving);
  static bool later(const UnderWay& a, const UnderWay& b);

  std::mt19937_64 random_;
  std::vector<Site> sites_;
  Rule everywhere_;
  std::map<std::pair<std::string, std::string>, Rule, std::less<>> regions_;
  std::unordered_map<std::uint64_t, Path> paths_;
  std::vector<UnderWay> under_way_;  // a heap, the next one in front
  std::uint64_t order_ = 0;
  std::size_t held_bytes_ = 0;
};

}  // namespace torch_iroh::lab
