#include "link/frame.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/bytes.hpp"

namespace torch_iroh::link {
namespace {

constexpr std::uint16_t kMagic = 'T' | 'I' << 8;

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorKind::protocol, "bad frame: " + why);
}

}  // namespace

std::array<std::byte, kHeaderBytes> encode(const FrameHeader& header) {
  ByteWriter out;
  out.put(kMagic).put(header.type).put(header.version).put(header.length).put(header.group).put(header.sequence);
  out.put(header.message).put(header.chunk).put(header.signature).put(header.number);
  std::array<std::byte, kHeaderBytes> bytes;
  std::copy(out.bytes().begin(), out.bytes().end(), bytes.begin());
  return bytes;
}

FrameHeader decode(std::span<const std::byte, kHeaderBytes> bytes) {
  ByteReader in(bytes);
  FrameHeader header;
  if (in.get<std::uint16_t>() != kMagic) refuse("it does not start with the magic number");
  const auto type = in.get<std::uint8_t>();
  if (type < static_cast<std::uint8_t>(FrameType::hello) || type > static_cast<std::uint8_t>(FrameType::ack)) {
    refuse("unknown type " + std::to_string(type));
  }
  header.type = static_cast<FrameType>(type);
  header.version = in.get<std::uint8_t>();
  if (header.version < kWireVersionMin || header.version > kWireVersionMax) {
    refuse("wire version " + std::to_string(header.version));
  }
  header.length = in.get<std::uint32_t>();
  if (header.length > kMaxFrameBytes) {
    refuse("length " + std::to_string(header.length) + " is over the limit of " + std::to_string(kMaxFrameBytes));
  }
  header.group = in.get<std::uint64_t>();
  header.sequence = in.get<std::uint64_t>();
  header.message = in.get<std::uint32_t>();
  header.chunk = in.get<std::uint32_t>();
  header.signature = in.get<std::uint32_t>();
  header.number = in.get<std::uint32_t>();
  return header;
}

bool is_numbered(FrameType type) {
  return type != FrameType::hello && type != FrameType::heartbeat && type != FrameType::ack;
}

std::uint32_t next_number(std::uint32_t number) {
  return number == ~std::uint32_t{0} ? 1 : number + 1;
}

bool number_before(std::uint32_t left, std::uint32_t right) {
  return static_cast<std::int32_t>(left - right) < 0;
}

std::array<std::byte, HelloBody::kBytes> encode(const HelloBody& hello) {
  std::array<std::byte, HelloBody::kBytes> bytes{};
  bytes[0] = std::byte{hello.lane};
  bytes[1] = std::byte{hello.road};
  std::memcpy(bytes.data() + 8, &hello.session, sizeof hello.session);
  return bytes;
}

HelloBody decode_hello(std::span<const std::byte> bytes) {
  if (bytes.size() != HelloBody::kBytes) refuse("hello of " + std::to_string(bytes.size()) + " bytes");
  ByteReader in(bytes);
  HelloBody hello;
  hello.lane = in.get<std::uint8_t>();
  hello.road = in.get<std::uint8_t>();
  if (in.get<std::uint16_t>() != 0 || in.get<std::uint32_t>() != 0) refuse("hello with reserved bytes");
  hello.session = in.get<std::uint64_t>();
  const bool lane = hello.lane < HelloBody::kMaxLanes || hello.lane == HelloBody::kPulse;
  if (!lane || hello.road >= HelloBody::kMaxRoads) {
    refuse("hello for lane " + std::to_string(hello.lane) + " of road " + std::to_string(hello.road));
  }
  return hello;
}

std::vector<std::byte> encode(const std::vector<Ack>& acks) {
  ByteWriter out;
  for (const Ack& ack : acks) out.put(std::uint32_t{ack.lane}).put(ack.next);
  return out.take();
}

std::vector<Ack> decode_acks(std::span<const std::byte> bytes) {
  if (bytes.size() % Ack::kBytes != 0 || bytes.size() > HelloBody::kMaxLanes * Ack::kBytes) {
    refuse("ack of " + std::to_string(bytes.size()) + " bytes");
  }
  ByteReader in(bytes);
  std::vector<Ack> acks(bytes.size() / Ack::kBytes);
  for (Ack& ack : acks) {
    const auto lane = in.get<std::uint32_t>();
    ack.next = in.get<std::uint32_t>();
    if (lane >= HelloBody::kMaxLanes || ack.next == 0) refuse("ack for lane " + std::to_string(lane));
    ack.lane = static_cast<std::uint8_t>(lane);
  }
  return acks;
}

}  // namespace torch_iroh::link
