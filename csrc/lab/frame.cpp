#include "frame.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <stdexcept>

namespace torch_iroh::lab {
namespace {

// Fields of struct virtio_net_hdr (linux/virtio_net.h), in the machine's byte order.
constexpr std::size_t kFlagsAt = 0, kGsoTypeAt = 1, kHeaderBytesAt = 2, kGsoSizeAt = 4, kChecksumStartAt = 6,
                      kChecksumOffsetAt = 8;
constexpr unsigned kNeedsChecksum = 1;
constexpr unsigned kGsoNone = 0, kGsoTcp4 = 1, kGsoTcp6 = 4, kGsoUdp = 5, kGsoEcn = 0x80;

constexpr std::size_t kIp4Bytes = 20, kIp6Bytes = 40, kTcpBytes = 20, kUdpBytes = 8;
constexpr std::size_t kTcpChecksumAt = 16, kUdpChecksumAt = 6, kUdpLengthAt = 4, kTcpSequenceAt = 4, kTcpFlagsAt = 13;
constexpr std::uint8_t kTcpFin = 0x01, kTcpPush = 0x08, kTcpWindowReduced = 0x80;

std::uint16_t get16(const std::uint8_t* at) {
  return static_cast<std::uint16_t>(at[0] << 8 | at[1]);
}
void put16(std::uint8_t* at, std::size_t value) {
  at[0] = static_cast<std::uint8_t>(value >> 8);
  at[1] = static_cast<std::uint8_t>(value);
}
std::uint32_t get32(const std::uint8_t* at) {
  return static_cast<std::uint32_t>(get16(at)) << 16 | get16(at + 2);
}
void put32(std::uint8_t* at, std::uint32_t value) {
  put16(at, value >> 16);
  put16(at + 2, value & 0xffff);
}
std::uint16_t get_native16(const std::uint8_t* at) {
  std::uint16_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
void put_native16(std::uint8_t* at, std::size_t value) {
  const auto narrow = static_cast<std::uint16_t>(value);
  std::memcpy(at, &narrow, sizeof narrow);
}

// A header's length in units of four bytes.
std::size_t nibble(int value) {
  return static_cast<std::size_t>(value & 15);
}

std::uint16_t fold(std::uint32_t sum) {
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  return static_cast<std::uint16_t>(sum);
}

}  // namespace

std::uint16_t internet_checksum(std::span<const std::uint8_t> bytes) {
  std::uint32_t sum = 0;
  for (std::size_t at = 0; at + 1 < bytes.size(); at += 2) sum += get16(&bytes[at]);
  if (bytes.size() % 2) sum += static_cast<std::uint32_t>(bytes.back()) << 8;
  return static_cast<std::uint16_t>(~fold(sum));
}

bool Prefix::holds(const Address& candidate) const {
  const std::size_t whole = bits / 8;
  if (!std::equal(address.bytes.begin(), address.bytes.begin() + whole, candidate.bytes.begin())) return false;
  const unsigned rest = bits % 8;
  return rest == 0 || ((address.bytes[whole] ^ candidate.bytes[whole]) >> (8 - rest)) == 0;
}

Prefix Prefix::parse(std::string_view text) {
  const auto refuse = [&] { return std::invalid_argument("'" + std::string(text) + "' is no address or prefix"); };
  const std::size_t slash = text.find('/');
  const std::string host(text.substr(0, slash));
  Prefix prefix;
  unsigned before = 0;
  if (inet_pton(AF_INET, host.c_str(), &prefix.address.bytes[12]) == 1) {
    prefix.address.bytes[10] = prefix.address.bytes[11] = 0xff;
    before = 96;
  } else if (inet_pton(AF_INET6, host.c_str(), prefix.address.bytes.data()) != 1) {
    throw refuse();
  }
  if (slash == std::string_view::npos) return prefix;
  const std::string_view length = text.substr(slash + 1);
  unsigned bits = 0;
  const auto [end, error] = std::from_chars(length.data(), length.data() + length.size(), bits);
  if (error != std::errc() || end != length.data() + length.size() || bits > 128 - before) throw refuse();
  prefix.bits = before + bits;
  return prefix;
}

std::optional<Frame> Frame::parse(std::span<const std::uint8_t> bytes) {
  if (bytes.size() < kVirtioBytes + kIp4Bytes) return std::nullopt;
  Frame frame(bytes);
  if (!frame.measure()) return std::nullopt;
  return frame;
}

bool Frame::measure() {
  const std::size_t header = is_v4() ? nibble(ip()[0]) * 4 : kIp6Bytes;
  if (!is_v4() && ip()[0] >> 4 != 6) return false;
  if (header < kIp4Bytes || header > ip_bytes()) return false;
  const unsigned gso_type = bytes_[kGsoTypeAt] & ~kGsoEcn;
  return gso_type == kGsoNone || measure_super_frame(gso_type);
}

bool Frame::measure_super_frame(unsigned gso_type) {
  is_tcp_ = gso_type == kGsoTcp4 || gso_type == kGsoTcp6;
  if (!is_tcp_ && gso_type != kGsoUdp) return false;
  // The kernel leaves the sum of a super-frame to whoever cuts it; one that is already summed could not be cut.
  if (!(bytes_[kFlagsAt] & kNeedsChecksum)) return false;
  transport_at_ = get_native16(&bytes_[kChecksumStartAt]);
  if (transport_at_ < (is_v4() ? kIp4Bytes : kIp6Bytes)) return false;
  if (transport_at_ + (is_tcp_ ? kTcpBytes : kUdpBytes) > ip_bytes()) return false;
  if (get_native16(&bytes_[kChecksumOffsetAt]) != (is_tcp_ ? kTcpChecksumAt : kUdpChecksumAt)) return false;
  const std::size_t header = is_tcp_ ? nibble(ip()[transport_at_ + 12] >> 4) * 4 : kUdpBytes;
  payload_at_ = transport_at_ + header;
  segment_bytes_ = get_native16(&bytes_[kGsoSizeAt]);
  if ((is_tcp_ && header < kTcpBytes) || payload_at_ >= ip_bytes() || segment_bytes_ == 0) return false;
  segments_ = (ip_bytes() - payload_at_ + segment_bytes_ - 1) / segment_bytes_;
  return true;
}

Address Frame::destination() const {
  Address address;
  if (is_v4()) {
    address.bytes[10] = address.bytes[11] = 0xff;
    std::copy_n(ip() + 16, 4, &address.bytes[12]);
  } else {
    std::copy_n(ip() + 24, 16, address.bytes.data());
  }
  return address;
}

std::size_t Frame::wire_bytes() const {
  return ip_bytes() + (segments_ - 1) * payload_at_ + segments_ * kWireOverhead;
}

std::size_t Frame::largest_packet() const {
  return segments_ == 1 ? ip_bytes() : payload_at_ + segment_bytes_;
}

Frame Frame::cut(std::size_t first, std::size_t last) const {
  if (first == 0 && last == segments_) return *this;
  const std::size_t payload = ip_bytes() - payload_at_;
  const std::size_t from = first * segment_bytes_;
  const std::size_t count = std::min(last * segment_bytes_, payload) - from;
  const std::size_t head = kVirtioBytes + payload_at_;

  Frame part{std::span(bytes_).first(head)};
  part.bytes_.insert(part.bytes_.end(), bytes_.begin() + head + from, bytes_.begin() + head + from + count);

  std::uint8_t* ip = part.ip();
  if (is_v4()) {
    const std::size_t header = nibble(ip[0]) * 4;
    put16(ip + 2, part.ip_bytes());
    put16(ip + 4, get16(ip + 4) + first);  // identification counts up, as where the kernel cuts
    put16(ip + 10, 0);
    put16(ip + 10, internet_checksum({ip, header}));
  } else {
    put16(ip + 4, part.ip_bytes() - kIp6Bytes);
  }

  // The checksum field holds the sum of the pseudo-header alone, which includes the length; the receiver's side does
  // the rest. RFC 1624: sum - old + new.
  std::uint8_t* transport = ip + transport_at_;
  std::uint8_t* sum = transport + (is_tcp_ ? kTcpChecksumAt : kUdpChecksumAt);
  const auto old_length = static_cast<std::uint16_t>(ip_bytes() - transport_at_);
  const auto new_length = static_cast<std::uint16_t>(part.ip_bytes() - transport_at_);
  put16(sum, fold(std::uint32_t{get16(sum)} + static_cast<std::uint16_t>(~old_length) + new_length));
  if (is_tcp_) {
    put32(transport + kTcpSequenceAt, get32(transport + kTcpSequenceAt) + static_cast<std::uint32_t>(from));
    if (last < segments_) transport[kTcpFlagsAt] &= static_cast<std::uint8_t>(~(kTcpFin | kTcpPush));
    if (first > 0) transport[kTcpFlagsAt] &= static_cast<std::uint8_t>(~kTcpWindowReduced);
  } else {
    put16(transport + kUdpLengthAt, new_length);
  }

  put_native16(&part.bytes_[kHeaderBytesAt], payload_at_);
  if (last - first == 1) {
    part.bytes_[kGsoTypeAt] = kGsoNone;
    put_native16(&part.bytes_[kGsoSizeAt], 0);
  } else {
    part.segments_ = last - first;
    part.segment_bytes_ = segment_bytes_;
    part.transport_at_ = transport_at_;
    part.payload_at_ = payload_at_;
    part.is_tcp_ = is_tcp_;
  }
  return part;
}

}  // namespace torch_iroh::lab
