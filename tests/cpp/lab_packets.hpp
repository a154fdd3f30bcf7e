// Packets for the laboratory's tests, built from nothing and summed the long way: the reference for what the emulator
// cuts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace torch_iroh::lab::testing {

using Octets = std::vector<std::uint8_t>;

struct Shape {
  bool v6 = false;
  bool tcp = false;
  std::uint8_t tcp_flags = 0x18;        // PSH, ACK
  std::uint32_t sequence = 0xfffffff0;  // wraps inside a super-frame
  std::uint16_t id = 0xfffe;
  std::uint8_t destination = 2;  // last octet
};

inline void append16(Octets& to, std::size_t value) {
  to.push_back(static_cast<std::uint8_t>(value >> 8));
  to.push_back(static_cast<std::uint8_t>(value));
}

inline std::uint32_t long_sum(std::span<const std::uint8_t> bytes) {
  std::uint64_t sum = 0;
  for (std::size_t at = 0; at < bytes.size(); ++at) sum += std::uint64_t{bytes[at]} << (at % 2 ? 0 : 8);
  while (sum > 0xffff) sum = sum % 0x10000 + sum / 0x10000;
  return static_cast<std::uint32_t>(sum);
}

inline Octets addresses(const Shape& shape) {
  Octets both;
  for (const std::uint8_t last : {std::uint8_t{1}, shape.destination}) {
    Octets one =
        shape.v6 ? Octets{0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last} : Octets{203, 0, 113, last};
    both.insert(both.end(), one.begin(), one.end());
  }
  return both;
}

inline Octets pseudo_header(const Shape& shape, std::size_t transport_bytes) {
  Octets bytes = addresses(shape);
  append16(bytes, 0);
  append16(bytes, transport_bytes);
  append16(bytes, 0);
  append16(bytes, shape.tcp ? 6 : 17);
  return bytes;
}

// Header, IP packet and checksum field of one datagram; `summed`: the whole sum, else that of the pseudo-header alone.
inline Octets packet(const Shape& shape, std::span<const std::uint8_t> payload, bool summed) {
  Octets transport;
  append16(transport, 1111);
  append16(transport, 2222);
  if (shape.tcp) {
    append16(transport, shape.sequence >> 16);
    append16(transport, shape.sequence & 0xffff);
    transport.insert(transport.end(), {0, 0, 0, 9, 0x80, shape.tcp_flags, 1, 0});  // 32 bytes: 12 of options
    transport.insert(transport.end(), {0, 0, 0, 0, 1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8});
  } else {
    append16(transport, 8 + payload.size());
    append16(transport, 0);
  }
  transport.insert(transport.end(), payload.begin(), payload.end());
  const std::size_t sum_at = shape.tcp ? 16 : 6;
  Octets covered = pseudo_header(shape, transport.size());
  if (summed) covered.insert(covered.end(), transport.begin(), transport.end());
  const std::uint32_t sum = summed ? long_sum(covered) ^ 0xffff : long_sum(covered);
  transport[sum_at] = static_cast<std::uint8_t>(sum >> 8);
  transport[sum_at + 1] = static_cast<std::uint8_t>(sum);

  Octets ip;
  const Octets ends = addresses(shape);
  if (shape.v6) {
    ip = {0x60, 0, 0, 0};
    append16(ip, transport.size());
    ip.insert(ip.end(), {static_cast<std::uint8_t>(shape.tcp ? 6 : 17), 64});
    ip.insert(ip.end(), ends.begin(), ends.end());
  } else {
    ip = {0x45, 0};
    append16(ip, 20 + transport.size());
    append16(ip, shape.id);
    ip.insert(ip.end(), {0x40, 0, 64, static_cast<std::uint8_t>(shape.tcp ? 6 : 17), 0, 0});
    ip.insert(ip.end(), ends.begin(), ends.end());
    const std::uint32_t header_sum = long_sum(ip) ^ 0xffff;
    ip[10] = static_cast<std::uint8_t>(header_sum >> 8);
    ip[11] = static_cast<std::uint8_t>(header_sum);
  }
  ip.insert(ip.end(), transport.begin(), transport.end());
  return ip;
}

// With the virtio header of a plain packet, or of a super-frame of segments of `segment_bytes`.
inline Octets framed(const Shape& shape, const Octets& ip, std::size_t segment_bytes = 0) {
  const std::size_t transport_at = shape.v6 ? 40 : 20;
  const std::size_t header = transport_at + (shape.tcp ? 32 : 8);
  const auto type = static_cast<std::uint8_t>(segment_bytes == 0 ? 0 : shape.tcp ? (shape.v6 ? 4 : 1) : 5);
  Octets bytes = {1, type};
  for (const std::size_t field : {header, segment_bytes, transport_at, std::size_t{shape.tcp ? 16U : 6U}}) {
    bytes.push_back(static_cast<std::uint8_t>(field));  // little-endian
    bytes.push_back(static_cast<std::uint8_t>(field >> 8));
  }
  bytes.insert(bytes.end(), ip.begin(), ip.end());
  return bytes;
}

inline Octets counting(std::size_t count) {
  Octets bytes(count);
  for (std::size_t at = 0; at < count; ++at) bytes[at] = static_cast<std::uint8_t>(at * 31 + at / 256);
  return bytes;
}

}  // namespace torch_iroh::lab::testing
