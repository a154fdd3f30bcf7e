// What a TUN device with a virtio header gives and takes: one IP packet, or a super-frame of several that differ only
// in payload. Knows headers and checksums; knows no network.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace torch_iroh::lab {

// Preamble, Ethernet header, check sequence and gap: what each packet adds on a line that is sold by the Mbit/s.
inline constexpr std::size_t kWireOverhead = 38;

// IPv4 as ::ffff:a.b.c.d, so that both families share one table.
struct Address {
  std::array<std::uint8_t, 16> bytes{};
  bool operator==(const Address&) const = default;
};

struct Prefix {
  Address address;
  unsigned bits = 128;
  bool holds(const Address& candidate) const;
  // "203.0.113.1", "10.0.0.0/8", "2001:db8::/64"; throws std::invalid_argument.
  static Prefix parse(std::string_view text);
};

class Frame {
 public:
  static constexpr std::size_t kVirtioBytes = 10;

  // Empty when these are not the bytes of an IP packet, or its headers point beyond its end.
  static std::optional<Frame> parse(std::span<const std::uint8_t> bytes);

  std::span<const std::uint8_t> bytes() const { return bytes_; }
  std::size_t ip_bytes() const { return bytes_.size() - kVirtioBytes; }
  Address destination() const;
  std::size_t segments() const { return segments_; }
  std::size_t wire_bytes() const;
  std::size_t largest_packet() const;  // in bytes of IP
  // Segments first..last-1 as a frame of their own: a plain packet if that is one.
  Frame cut(std::size_t first, std::size_t last) const;

 private:
  explicit Frame(std::span<const std::uint8_t> bytes) : bytes_(bytes.begin(), bytes.end()) {}
  bool measure();
  bool measure_super_frame(unsigned gso_type);
  std::uint8_t* ip() { return bytes_.data() + kVirtioBytes; }
  const std::uint8_t* ip() const { return bytes_.data() + kVirtioBytes; }
  bool is_v4() const { return ip()[0] >> 4 == 4; }

  std::vector<std::uint8_t> bytes_;
  // Of a super-frame; a plain packet has one segment and zeros. Offsets count from the IP header.
  std::size_t segments_ = 1;
  std::size_t segment_bytes_ = 0;
  std::size_t transport_at_ = 0;
  std::size_t payload_at_ = 0;
  bool is_tcp_ = false;
};

// The Internet checksum of RFC 1071, as it stands in a header.
std::uint16_t internet_checksum(std::span<const std::uint8_t> bytes);

}  // namespace torch_iroh::lab
