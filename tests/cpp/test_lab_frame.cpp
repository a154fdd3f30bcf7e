// Super-frames of the laboratory: each segment that is cut out is, once the receiver's side has summed it, bit for bit
// the packet that a sender without segmentation would have sent.
#include <random>
#include <stdexcept>

#include <doctest/doctest.h>

#include "lab/frame.hpp"
#include "lab_packets.hpp"

namespace torch_iroh::lab {
namespace {

using namespace testing;  // NOLINT: the packets of this test

// What the receiving kernel does with a packet whose checksum is only that of its pseudo-header.
Octets summed(const Frame& frame, const Shape& shape) {
  Octets ip(frame.bytes().begin() + Frame::kVirtioBytes, frame.bytes().end());
  const std::size_t transport_at = shape.v6 ? 40 : 20;
  const std::size_t sum_at = transport_at + (shape.tcp ? 16 : 6);
  const std::uint32_t sum = long_sum(std::span(ip).subspan(transport_at)) ^ 0xffff;
  ip[sum_at] = static_cast<std::uint8_t>(sum >> 8);
  ip[sum_at + 1] = static_cast<std::uint8_t>(sum);
  return ip;
}

void expect_segments(const Shape& shape, std::size_t payload_bytes, std::size_t segment_bytes) {
  const Octets payload = counting(payload_bytes);
  const auto frame = Frame::parse(framed(shape, packet(shape, payload, false), segment_bytes));
  REQUIRE(frame.has_value());
  const std::size_t count = (payload_bytes + segment_bytes - 1) / segment_bytes;
  REQUIRE(frame->segments() == count);
  std::size_t wire = 0;
  for (std::size_t segment = 0; segment < count; ++segment) {
    const std::size_t at = segment * segment_bytes;
    const std::size_t length = std::min(segment_bytes, payload_bytes - at);
    Shape one = shape;
    one.sequence += static_cast<std::uint32_t>(at);
    one.id = static_cast<std::uint16_t>(one.id + segment);
    if (segment + 1 < count) one.tcp_flags &= 0xf6;  // FIN and PSH: the last
    if (segment > 0) one.tcp_flags &= 0x7f;          // CWR: the first
    const Octets wanted = packet(one, std::span(payload).subspan(at, length), true);
    INFO("segment " << segment << " of " << count);
    const Frame cut = frame->cut(segment, segment + 1);
    CHECK(summed(cut, shape) == wanted);
    if (count > 1) CHECK(cut.bytes()[1] == 0);
    wire += wanted.size() + kWireOverhead;
    // The same out of a part.
    const std::size_t from = segment / 2;
    const std::size_t to = std::min(count, segment + 3);
    CHECK(summed(frame->cut(from, to).cut(segment - from, segment - from + 1), shape) == wanted);
  }
  CHECK(frame->wire_bytes() == wire);
}

}  // namespace

TEST_CASE("lab frame: segments are the packets that a sender without segmentation sends") {
  for (const bool v6 : {false, true}) {
    for (const bool tcp : {false, true}) {
      for (const auto& [payload, segment] : {std::pair(14'400, 1440), {14'399, 1440}, {14'401, 1440}, {1441, 1440}}) {
        CAPTURE(v6);
        CAPTURE(tcp);
        CAPTURE(payload);
        expect_segments({.v6 = v6, .tcp = tcp}, static_cast<std::size_t>(payload), static_cast<std::size_t>(segment));
      }
      expect_segments({.v6 = v6, .tcp = tcp, .tcp_flags = 0x99}, 60'000, 1200);  // CWR, ACK, PSH, FIN
      expect_segments({.v6 = v6, .tcp = tcp}, 65, 1);
    }
  }
}

TEST_CASE("lab frame: a part of several segments says that it is one") {
  const Shape shape{.tcp = true};
  const auto frame = Frame::parse(framed(shape, packet(shape, counting(10'000), false), 1000));
  REQUIRE(frame.has_value());
  const auto again = Frame::parse(frame->cut(3, 8).bytes());
  REQUIRE(again.has_value());
  CHECK(again->segments() == 5);
  CHECK(again->ip_bytes() == 52 + 5000);
  CHECK(frame->cut(0, 10).bytes().size() == frame->bytes().size());
}

TEST_CASE("lab frame: a plain packet is one segment") {
  for (const bool v6 : {false, true}) {
    const Shape shape{.v6 = v6};
    const auto frame = Frame::parse(framed(shape, packet(shape, counting(100), true)));
    REQUIRE(frame.has_value());
    CHECK(frame->segments() == 1);
    CHECK(frame->wire_bytes() == frame->ip_bytes() + kWireOverhead);
    CHECK(frame->destination() == Prefix::parse(v6 ? "2001:db8::2" : "203.0.113.2").address);
  }
}

TEST_CASE("lab frame: the checksum of RFC 1071's own example, and of nothing") {
  const Octets example = {0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7};
  CHECK(internet_checksum(example) == static_cast<std::uint16_t>(~0xddf2));
  CHECK(internet_checksum({}) == 0xffff);
  CHECK(internet_checksum(std::span(example).first(3)) == static_cast<std::uint16_t>(~(0x0001 + 0xf200)));
}

TEST_CASE("lab frame: what points beyond its end is no frame") {
  const Shape shape{.tcp = true};
  const Octets good = framed(shape, packet(shape, counting(3000), false), 1000);
  REQUIRE(Frame::parse(good).has_value());
  for (std::size_t length = 0; length <= Frame::kVirtioBytes + 52; ++length) {
    CHECK(!Frame::parse(std::span(good).first(length)).has_value());
  }
  const auto refused = [&](std::size_t at, std::uint8_t value) {
    Octets bad = good;
    bad[at] = value;
    return !Frame::parse(bad).has_value();
  };
  CHECK(refused(0, 0));                            // summed already
  CHECK(refused(1, 3));                            // UFO
  CHECK(refused(4, 0) == false);                   // gso_size 768
  CHECK(refused(6, 19));                           // transport inside the IP header
  CHECK(refused(7, 0xff));                         // transport beyond the end
  CHECK(refused(8, 6));                            // checksum where UDP has it
  CHECK(refused(Frame::kVirtioBytes, 0x44));       // IP header of 16 bytes
  CHECK(refused(Frame::kVirtioBytes, 0x55));       // neither 4 nor 6
  CHECK(refused(Frame::kVirtioBytes + 32, 0x40));  // TCP header of 16 bytes
  Octets none = good;
  none[4] = none[5] = 0;
  CHECK(!Frame::parse(none).has_value());  // segments of 0 bytes
}

TEST_CASE("lab frame: noise is refused or can be cut anywhere") {
  std::mt19937 random(7);
  const Shape shape{.tcp = true};
  const Octets good = framed(shape, packet(shape, counting(2000), false), 500);
  std::size_t accepted = 0;
  for (int round = 0; round < 20'000; ++round) {
    Octets bytes = good;
    bytes.resize(random() % good.size());
    for (int change = 0; change < 3 && !bytes.empty(); ++change) {
      bytes[random() % std::min<std::size_t>(bytes.size(), 50)] = static_cast<std::uint8_t>(random());
    }
    const auto frame = Frame::parse(bytes);
    if (!frame) continue;
    ++accepted;
    std::size_t payload = 0;
    for (std::size_t at = 0; at < frame->segments(); ++at) payload += frame->cut(at, at + 1).ip_bytes();
    CHECK(payload + frame->segments() * kWireOverhead == frame->wire_bytes());
  }
  CHECK(accepted > 100);
}

TEST_CASE("lab frame: prefixes of both families") {
  const auto holds = [](const char* prefix, const char* address) {
    return Prefix::parse(prefix).holds(Prefix::parse(address).address);
  };
  CHECK(holds("203.0.113.7", "203.0.113.7"));
  CHECK(!holds("203.0.113.7", "203.0.113.6"));
  CHECK(holds("10.0.0.0/9", "10.127.255.255"));
  CHECK(!holds("10.0.0.0/9", "10.128.0.0"));
  CHECK(holds("0.0.0.0/0", "1.2.3.4"));
  CHECK(!holds("0.0.0.0/0", "2001:db8::1"));
  CHECK(holds("2001:db8:7::/48", "2001:db8:7:1::2"));
  CHECK(!holds("2001:db8:7::/48", "2001:db8:8:1::2"));
  for (const char* wrong :
       {"", "/8", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/8x", "2001:db8::/129", "host", "10.0.0/8"}) {
    CAPTURE(wrong);
    CHECK_THROWS_AS(Prefix::parse(wrong), std::invalid_argument);
  }
}

}  // namespace torch_iroh::lab
