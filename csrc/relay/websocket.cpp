#include "relay/websocket.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace torch_iroh::relay {
namespace {

constexpr std::size_t kMostControlPayload = 125;
constexpr std::size_t kKeptWhenIdle = 4096;

unsigned at(View bytes, std::size_t index) {
  return std::to_integer<unsigned>(bytes[index]);
}

std::uint64_t big_endian(View bytes) {
  std::uint64_t value = 0;
  for (const std::byte byte : bytes) value = value << 8 | std::to_integer<std::uint64_t>(byte);
  return value;
}

}  // namespace

void unmask(const Frame& frame, std::size_t from, std::byte* to) {
  // Eight bytes at a time, with the mask turned so that it begins at `from`.
  const std::uint32_t turned = std::rotr(frame.mask, static_cast<int>(from % 4 * 8));
  const std::uint64_t wide = static_cast<std::uint64_t>(turned) << 32 | turned;
  const std::byte* source = frame.masked.data() + from;
  const std::size_t count = frame.masked.size() - from;
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    std::uint64_t word;
    std::memcpy(&word, source + i, 8);
    word ^= wide;
    std::memcpy(to + i, &word, 8);
  }
  for (; i < count; ++i) to[i] = source[i] ^ static_cast<std::byte>(turned >> (i % 4 * 8));
}

std::optional<FrameReader::Header> FrameReader::header(View bytes) const {
  if (bytes.size() < 2) return std::nullopt;
  const unsigned first = at(bytes, 0);
  const unsigned second = at(bytes, 1);
  if ((first & 0x70) != 0) throw Violation(kCloseProtocol, "a websocket frame with reserved bits");
  if ((second & 0x80) == 0) throw Violation(kCloseProtocol, "a websocket frame without a mask");
  const auto opcode = static_cast<Opcode>(first & 15);
  const bool control = opcode >= Opcode::close;
  if (opcode > Opcode::pong || (opcode > Opcode::binary && !control)) {
    throw Violation(kCloseProtocol, "a websocket frame with unknown opcode " + std::to_string(first & 15));
  }
  std::size_t length_bytes = 0;
  std::uint64_t payload = second & 0x7f;
  if (control && (payload > kMostControlPayload || (first & 0x80) == 0)) {
    throw Violation(kCloseProtocol, "a websocket control frame that is too long or in parts");
  }
  if (payload >= 126) {
    length_bytes = payload == 126 ? 2 : 8;
    if (bytes.size() < 2 + length_bytes) return std::nullopt;
    payload = big_endian(bytes.subspan(2, length_bytes));
  }
  if (payload > most_payload_) {
    throw Violation(kCloseTooBig, "a websocket frame of " + std::to_string(payload) + " bytes; at most " +
                                      std::to_string(most_payload_) + " are allowed");
  }
  return Header{2 + length_bytes + 4, static_cast<std::size_t>(payload)};
}

std::optional<Frame> FrameReader::complete(View bytes) const {
  const auto head = header(bytes);
  if (!head || bytes.size() < head->bytes + head->payload) return std::nullopt;
  Frame frame;
  frame.opcode = static_cast<Opcode>(at(bytes, 0) & 15);
  frame.last = (at(bytes, 0) & 0x80) != 0;
  std::memcpy(&frame.mask, bytes.data() + head->bytes - 4, 4);
  frame.masked = bytes.subspan(head->bytes, head->payload);
  return frame;
}

// Moves input to kept_ until that has `until` bytes; whether it has.
bool FrameReader::keep(View& input, std::size_t until) {
  const std::size_t count = kept_.size() < until ? std::min(until - kept_.size(), input.size()) : 0;
  kept_.insert(kept_.end(), input.begin(), input.begin() + static_cast<std::ptrdiff_t>(count));
  input = input.subspan(count);
  return kept_.size() >= until;
}

std::optional<Frame> FrameReader::next(View& input) {
  if (used_) {
    used_ = false;
    kept_.clear();
    if (kept_.capacity() > kKeptWhenIdle) kept_.shrink_to_fit();  // most clients are silent most of the time
  }
  if (kept_.empty()) {
    if (const auto frame = complete(input)) {
      const std::byte* end = frame->masked.data() + frame->masked.size();
      input = input.subspan(static_cast<std::size_t>(end - input.data()));
      return frame;
    }
    if (const auto head = header(input)) kept_.reserve(head->bytes + head->payload);
  }
  // Only as many bytes as this frame has are copied; what follows is read where it lies.
  std::optional<Header> head;
  for (std::size_t known = 2; !(head = header(kept_)); ++known) {
    if (!keep(input, known)) return std::nullopt;
  }
  if (!keep(input, head->bytes + head->payload)) return std::nullopt;
  used_ = true;
  return complete(kept_);
}

std::size_t put_header(Opcode opcode, std::size_t payload, std::byte* to) {
  to[0] = static_cast<std::byte>(0x80 | static_cast<unsigned>(opcode));
  const std::size_t length_bytes = payload < 126 ? 0 : payload < 65536 ? 2 : 8;
  to[1] = static_cast<std::byte>(length_bytes == 0 ? payload : length_bytes == 2 ? 126 : 127);
  for (std::size_t i = 0; i < length_bytes; ++i) {
    to[2 + i] = static_cast<std::byte>(payload >> 8 * (length_bytes - 1 - i));
  }
  return 2 + length_bytes;
}

}  // namespace torch_iroh::relay
