#include "link/frame.hpp"

#include <algorithm>
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
  out.put(header.message).put(header.chunk).put(header.signature).put(std::uint32_t{0});
  std::array<std::byte, kHeaderBytes> bytes;
  std::copy(out.bytes().begin(), out.bytes().end(), bytes.begin());
  return bytes;
}

FrameHeader decode(std::span<const std::byte, kHeaderBytes> bytes) {
  ByteReader in(bytes);
  FrameHeader header;
  if (in.get<std::uint16_t>() != kMagic) refuse("it does not start with the magic number");
  const auto type = in.get<std::uint8_t>();
  if (type < static_cast<std::uint8_t>(FrameType::hello) || type > static_cast<std::uint8_t>(FrameType::farewell)) {
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
  if (in.get<std::uint32_t>() != 0) refuse("reserved bytes are not zero");
  return header;
}

std::array<std::byte, HelloBody::kBytes> encode(const HelloBody& hello) {
  return {std::byte{hello.lane}, std::byte{hello.lanes}};
}

HelloBody decode_hello(std::span<const std::byte> bytes) {
  if (bytes.size() != HelloBody::kBytes) refuse("hello of " + std::to_string(bytes.size()) + " bytes");
  const HelloBody hello{std::to_integer<std::uint8_t>(bytes[0]), std::to_integer<std::uint8_t>(bytes[1])};
  if (hello.lanes < 2 || hello.lanes > HelloBody::kMaxLanes || hello.lane >= hello.lanes) {
    refuse("hello for lane " + std::to_string(hello.lane) + " of " + std::to_string(hello.lanes));
  }
  return hello;
}

}  // namespace torch_iroh::link
