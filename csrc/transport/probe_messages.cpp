#include "transport/probe_messages.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "base/bytes.hpp"

namespace torch_iroh::transport::probe {
namespace {

constexpr std::uint32_t kMostRttUs = 10'000'000;
constexpr std::size_t kMostTextBytes = 500;

using Bytes = std::vector<std::uint8_t>;

ByteReader reader_of(const Bytes& bytes) {
  return ByteReader(std::as_bytes(std::span(bytes)));
}

}  // namespace

// ---- what hosts are told ----

Bytes encode(const Step& step) {
  ByteWriter out;
  out.put(step.kind);
  if (step.kind == Kind::ask) {
    out.put(static_cast<std::uint32_t>(step.landmarks.size()));
    for (const std::int32_t host : step.landmarks) out.put(host);
    for (const bool asks : step.asks) out.put(static_cast<std::uint8_t>(asks));
  }
  if (step.kind == Kind::pings || step.kind == Kind::flows) {
    for (const std::int32_t site : step.site_of) out.put(site);
  }
  return out.octets();
}

Step decode_step(const Bytes& bytes, std::size_t hosts) {
  ByteReader in = reader_of(bytes);
  Step step;
  const auto kind = in.get<std::uint32_t>();
  if (kind > static_cast<std::uint32_t>(Kind::flows)) throw Error(ErrorKind::protocol, "an unknown step");
  step.kind = static_cast<Kind>(kind);
  const auto index = [&](std::size_t below) {
    const auto value = in.get<std::uint32_t>();
    if (value >= below) throw Error(ErrorKind::protocol, "a host that is none");
    return static_cast<std::int32_t>(value);
  };
  if (step.kind == Kind::ask) {
    const auto landmarks = in.get<std::uint32_t>();
    if (landmarks > kMostLandmarks) throw Error(ErrorKind::protocol, "too many landmarks");
    for (std::uint32_t i = 0; i < landmarks; ++i) step.landmarks.push_back(index(hosts));
    for (std::size_t i = 0; i < hosts; ++i) step.asks.push_back(in.get<std::uint8_t>() != 0);
  }
  if (step.kind == Kind::pings || step.kind == Kind::flows) {
    for (std::size_t i = 0; i < hosts; ++i) step.site_of.push_back(index(hosts));
  }
  if (in.left() != 0) throw Error(ErrorKind::protocol, "bytes behind its end");
  return step;
}

// ---- what they answer ----

Bytes encode(const Found& found, Kind kind) {
  ByteWriter out;
  if (kind == Kind::flows) {
    out.put(std::uint32_t{1}).put(found.rate);
    return out.octets();
  }
  out.put(std::uint32_t{1}).put(static_cast<std::uint32_t>(found.reaches.size()));
  for (const Reach& one : found.reaches) out.put(one.to).put(one.rtt_us).put(static_cast<std::uint8_t>(one.relayed));
  return out.octets();
}

Bytes encode(const Error& error) {
  ByteWriter out;
  out.put(std::uint32_t{0}).put_text(std::string_view(error.what()).substr(0, kMostTextBytes));
  return out.octets();
}

Found decode_found(const Bytes& bytes, Kind kind, std::int32_t host, const std::vector<std::int32_t>& targets) {
  ByteReader in = reader_of(bytes);
  if (in.get<std::uint32_t>() == 0) {
    std::string text = in.get_text();
    if (text.size() > kMostTextBytes) throw Error(ErrorKind::protocol, "too many words");
    throw Error(ErrorKind::timeout, printable(std::move(text)));
  }
  Found found;
  if (kind == Kind::flows) {
    found.rate = in.get<std::uint64_t>();
  } else {
    if (in.get<std::uint32_t>() != targets.size()) throw Error(ErrorKind::protocol, "another number of answers");
    for (std::size_t i = 0; i < targets.size(); ++i) {
      Reach reach;
      reach.from = host;
      reach.to = in.get<std::int32_t>();
      reach.rtt_us = in.get<std::uint32_t>();
      if (reach.rtt_us > kMostRttUs) throw Error(ErrorKind::protocol, "an answer after longer than anybody waits");
      reach.relayed = in.get<std::uint8_t>() != 0;
      if (std::find(targets.begin(), targets.end(), reach.to) == targets.end()) {
        throw Error(ErrorKind::protocol, "an answer that was not asked for");
      }
      found.reaches.push_back(reach);
    }
  }
  if (in.left() != 0) throw Error(ErrorKind::protocol, "bytes behind its end");
  return found;
}

// ---- who asks whom ----

// Hosts of a site side by side, so that as few links as there are sites lead from one to another.
std::vector<std::int32_t> ring_of(const std::vector<std::int32_t>& site_of) {
  std::vector<std::int32_t> ring(site_of.size());
  std::iota(ring.begin(), ring.end(), 0);
  std::stable_sort(ring.begin(), ring.end(), [&](std::int32_t a, std::int32_t b) {
    return site_of[static_cast<std::size_t>(a)] < site_of[static_cast<std::size_t>(b)];
  });
  return ring;
}

std::int32_t beside(const std::vector<std::int32_t>& ring, std::int32_t host, std::size_t steps) {
  const auto at = static_cast<std::size_t>(std::find(ring.begin(), ring.end(), host) - ring.begin());
  return ring[(at + steps) % ring.size()];
}

// Whom `host` asks in `step`.
std::vector<std::int32_t> targets_in(const Step& step, std::int32_t host) {
  if (step.kind == Kind::pings) return {beside(ring_of(step.site_of), host, 1)};
  if (step.kind != Kind::ask || !step.asks[static_cast<std::size_t>(host)]) return {};
  return targets_of(host, step.landmarks);
}

}  // namespace torch_iroh::transport::probe
