#include "network.hpp"

#include <algorithm>
#include <stdexcept>

namespace torch_iroh::lab {
namespace {

// A super-frame occupies a line for as long as all its packets. In pieces no longer than this, a queue drops few
// packets at once and a slow line carries single packets, as a real one does.
constexpr double kPieceSeconds = 1e-3;

Nanoseconds time_on(double bits_per_second, std::size_t bytes) {
  if (bits_per_second <= 0) return Nanoseconds(0);
  return Nanoseconds(static_cast<std::int64_t>(static_cast<double>(bytes) * 8e9 / bits_per_second));
}

}  // namespace

void Network::require_new(std::string_view name) const {
  if (sites_.size() == kMaxSites) throw std::invalid_argument("there are " + std::to_string(kMaxSites) + " sites");
  for (const Site& site : sites_) {
    if (site.name == name) throw std::invalid_argument("there is a site '" + site.name + "' already");
  }
}

SiteId Network::add_site(std::string_view name, std::string_view region) {
  require_new(name);
  Site& site = sites_.emplace_back();
  site.name = name;
  site.region = region;
  return static_cast<SiteId>(sites_.size() - 1);
}

SiteId Network::find(std::string_view name) const {
  for (SiteId id = 0; id < sites_.size(); ++id) {
    if (sites_[id].name == name) return id;
  }
  throw std::invalid_argument("there is no site '" + std::string(name) + "'");
}

Rule& Network::between_regions(std::string_view from, std::string_view to) {
  return regions_[{std::string(from), std::string(to)}];
}

std::map<std::pair<SiteId, SiteId>, Traffic> Network::traffic() const {
  std::map<std::pair<SiteId, SiteId>, Traffic> found;
  for (const auto& [key, path] : paths_) {
    if (path.traffic.packets == 0) continue;
    found[{static_cast<SiteId>(key >> 32), static_cast<SiteId>(key)}] = path.traffic;
  }
  return found;
}

Network::Way Network::way(SiteId from, SiteId to) {
  const Rule& pair = path(from, to).rule;
  const auto regions = regions_.find(std::pair(sites_[from].region, sites_[to].region));
  const Rule nothing;
  const Rule& region = regions == regions_.end() ? nothing : regions->second;
  const auto said = [&](auto member, auto otherwise) {
    for (const Rule* rule : {&pair, &region, &std::as_const(everywhere_)}) {
      if (rule->*member) return *(rule->*member);
    }
    return otherwise;
  };
  return {.delay = said(&Rule::delay, Nanoseconds(0)),
          .jitter = said(&Rule::jitter, Nanoseconds(0)),
          .loss = said(&Rule::loss, 0.0),
          .reorder = said(&Rule::reorder, false),
          .cut = pair.cut || region.cut || everywhere_.cut || sites_[from].cut || sites_[to].cut};
}

std::optional<SiteId> Network::route(const Address& to) const {
  std::optional<SiteId> found;
  unsigned bits = 0;
  for (SiteId id = 0; id < sites_.size(); ++id) {
    for (const Prefix& prefix : sites_[id].prefixes) {
      if (prefix.bits < bits || (found && prefix.bits == bits) || !prefix.holds(to)) continue;
      found = id;
      bits = prefix.bits;
    }
  }
  return found;
}

void Network::offer(SiteId from, std::span<const std::uint8_t> bytes, Time now) {
  Site& site = sites_[from];
  const std::optional<Frame> frame = Frame::parse(bytes);
  if (!frame) {
    ++site.counters.malformed;
    return;
  }
  const std::size_t segments = frame->segments();
  site.counters.sent_packets += segments;
  site.counters.sent_bytes += frame->ip_bytes();
  const std::optional<SiteId> to = route(frame->destination());
  if (!to || *to == from) {  // its own prefix: sent back, it would come again
    site.counters.unroutable += segments;
    return;
  }
  const Way way = this->way(from, *to);
  if (way.cut) {
    site.counters.cut += segments;
    return;
  }
  if (frame->largest_packet() > std::min(site.line.mtu, sites_[*to].line.mtu)) {
    site.counters.too_big += segments;
    return;
  }
  double narrower = site.line.up_bits_per_second;
  const double down = sites_[*to].line.down_bits_per_second;
  if (narrower <= 0 || (down > 0 && down < narrower)) narrower = down;
  std::size_t width = segments;
  if (narrower > 0) {
    const double packet_bits = 8.0 * static_cast<double>(frame->wire_bytes()) / static_cast<double>(segments);
    const double fitting = std::min(narrower * kPieceSeconds / packet_bits, static_cast<double>(segments));
    width = std::max<std::size_t>(1, static_cast<std::size_t>(fitting));
  }
  for (std::size_t first = 0; first < segments; first += width) {
    send_piece(from, *to, *frame, first, std::min(first + width, segments), way, now);
  }
}

void Network::send_piece(SiteId from, SiteId to, const Frame& frame, std::size_t first, std::size_t last,
                         const Way& way, Time now) {
  Site& site = sites_[from];
  const std::size_t count = last - first;
  const std::size_t wire = frame.wire_bytes() * count / frame.segments();
  const double up = site.line.up_bits_per_second;
  Time begin = now;
  if (up > 0) {
    begin = std::max(now, site.up_free);
    if (begin - now > site.line.queue) {
      site.counters.up_dropped += count;
      return;
    }
    site.up_free = begin + time_on(up, wire);
  }
  // When the first `packets` of this piece have left the line. Those that are lost take their time on it too.
  const auto out = [&](std::size_t packets) { return begin + time_on(up, wire * packets / count); };
  const auto send = [&](std::size_t from_segment, std::size_t to_segment) {
    depart(from, to, frame.cut(from_segment, to_segment), way, out(from_segment - first + 1), out(to_segment - first));
  };
  if (way.loss <= 0) return send(first, last);
  std::bernoulli_distribution lost(std::min(way.loss, 1.0));
  std::size_t kept_from = first;
  for (std::size_t segment = first; segment <= last; ++segment) {
    const bool end = segment == last;
    if (!end && !lost(random_)) continue;
    if (kept_from < segment) send(kept_from, segment);
    kept_from = segment + 1;
    if (!end) ++site.counters.lost;
  }
}

void Network::depart(SiteId from, SiteId to, Frame frame, const Way& way, Time first_out, Time whole_out) {
  if (held_bytes_ + frame.ip_bytes() > kMaxHeldBytes) {
    sites_[from].counters.overflow += frame.segments();
    return;
  }
  held_bytes_ += frame.ip_bytes();
  Nanoseconds travel = way.delay;
  if (way.jitter.count() > 0) {
    travel += Nanoseconds(std::uniform_int_distribution<std::int64_t>(0, way.jitter.count())(random_));
  }
  Time at = first_out + travel;
  Time& last = path(from, to).last;
  if (!way.reorder) at = std::max(at, last);
  const Time whole = at + (whole_out - first_out);
  last = whole;
  push({.at = at, .whole = whole, .order = 0, .from = from, .to = to, .arrives = false, .frame = std::move(frame)});
}

void Network::enter_downlink(UnderWay moving) {
  Site& site = sites_[moving.to];
  const double down = site.line.down_bits_per_second;
  const Time begin = down > 0 ? std::max(moving.at, site.down_free) : moving.at;
  if (begin - moving.at > site.line.queue) {
    site.counters.down_dropped += moving.frame.segments();
    held_bytes_ -= moving.frame.ip_bytes();
    return;
  }
  const Time free = begin + time_on(down, moving.frame.wire_bytes());
  if (down > 0) site.down_free = free;
  // Its first packet may be on this line before its last has left the other.
  moving.at = std::max(free, moving.whole);
  moving.arrives = true;
  push(std::move(moving));
}

std::optional<Time> Network::next() const {
  if (under_way_.empty()) return std::nullopt;
  return under_way_.front().at;
}

void Network::advance(Time now, const Deliver& deliver) {
  while (!under_way_.empty() && under_way_.front().at <= now) {
    std::pop_heap(under_way_.begin(), under_way_.end(), later);
    UnderWay moving = std::move(under_way_.back());
    under_way_.pop_back();
    if (!moving.arrives) {
      enter_downlink(std::move(moving));
      continue;
    }
    const std::size_t bytes = moving.frame.ip_bytes();
    held_bytes_ -= bytes;
    Counters& counters = sites_[moving.to].counters;
    if (!sites_[moving.to].plugged || !deliver(moving.to, moving.frame.bytes())) {
      counters.refused += moving.frame.segments();
      continue;
    }
    counters.received_packets += moving.frame.segments();
    counters.received_bytes += bytes;
    Traffic& traffic = path(moving.from, moving.to).traffic;
    traffic.packets += moving.frame.segments();
    traffic.bytes += bytes;
  }
}

void Network::push(UnderWay moving) {
  moving.order = order_++;
  under_way_.push_back(std::move(moving));
  std::push_heap(under_way_.begin(), under_way_.end(), later);
}

bool Network::later(const UnderWay& a, const UnderWay& b) {
  return a.at != b.at ? a.at > b.at : a.order > b.order;
}

}  // namespace torch_iroh::lab
