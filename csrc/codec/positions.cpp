#include "codec/positions.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.hpp"

namespace torch_iroh::codec {

namespace {

constexpr unsigned kMostParameter = 32;  // positions are 32 bits

std::uint64_t bound(std::uint64_t kept, std::uint64_t count, unsigned parameter) {
  return kept * (parameter + 1) + ((count - kept) >> parameter);
}

[[noreturn]] void refuse(const char* what) {
  throw Error(ErrorKind::protocol, std::string("codec: a sparse frame whose positions ") + what);
}

// The up to 64 bits from bit `at` on (at least 57 where there are as many), zeros behind the end.
std::uint64_t bits_from(std::span<const std::byte> in, std::uint64_t at) {
  const std::size_t byte = at / 8;
  if (byte >= in.size()) return 0;
  std::uint64_t word = 0;
  std::memcpy(&word, in.data() + byte, std::min<std::size_t>(8, in.size() - byte));
  return word >> (at % 8);
}

// Sets bits in bytes that are zero there.
void set_bits(std::span<std::byte> out, std::uint64_t at, std::uint64_t bits, unsigned width) {
  const std::size_t byte = at / 8;
  const std::size_t size = std::min<std::size_t>(8, out.size() - byte);
  std::uint64_t word = 0;
  std::memcpy(&word, out.data() + byte, size);
  word |= (bits & ((std::uint64_t{1} << width) - 1)) << (at % 8);  // width + 7 is at most 40
  std::memcpy(out.data() + byte, &word, size);
}

}  // namespace

unsigned rice_parameter(std::uint64_t kept, std::uint64_t count) {
  unsigned best = 0;
  for (unsigned parameter = 1; parameter <= kMostParameter; ++parameter) {
    if (bound(kept, count, parameter) < bound(kept, count, best)) best = parameter;
  }
  return best;
}

std::uint64_t position_bits(std::uint64_t kept, std::uint64_t count) {
  return bound(kept, count, rice_parameter(kept, count));
}

std::size_t position_bytes(std::uint64_t kept, std::uint64_t count) {
  return static_cast<std::size_t>((position_bits(kept, count) + 7) / 8);
}

void write_positions(std::span<const std::uint32_t> positions, std::uint64_t count, std::span<std::byte> out) {
  std::fill(out.begin(), out.end(), std::byte{0});
  const unsigned parameter = rice_parameter(positions.size(), count);
  std::uint64_t at = 0, next = 0;
  for (const std::uint32_t position : positions) {
    const std::uint64_t gap = position - next;
    at += gap >> parameter;
    set_bits(out, at, (gap << 1) | 1, parameter + 1);
    at += parameter + 1;
    next = std::uint64_t{position} + 1;
  }
}

void read_positions(std::span<const std::byte> in, std::uint64_t count, std::span<std::uint32_t> positions) {
  const std::uint64_t kept = positions.size();
  const unsigned parameter = rice_parameter(kept, count);
  const std::uint64_t low_bits = (std::uint64_t{1} << parameter) - 1;
  const std::uint64_t end = 8 * std::uint64_t{in.size()};
  std::uint64_t at = 0, next = 0, room = count - kept;  // room: values that gaps may still leave out
  for (std::uint32_t& position : positions) {
    std::uint64_t zeros = 0;
    std::uint64_t window = bits_from(in, at);
    while (window == 0) {
      const std::uint64_t seen = 64 - at % 8;
      at += seen;
      zeros += seen;
      if (at >= end) refuse("end too early");
      window = bits_from(in, at);
    }
    const auto rest = static_cast<unsigned>(std::countr_zero(window));
    zeros += rest;
    at += rest + 1;
    if (zeros > room >> parameter) refuse("are not below its count");
    const std::uint64_t gap = (zeros << parameter) | (bits_from(in, at) & low_bits);
    at += parameter;
    if (gap > room) refuse("are not below its count");
    room -= gap;
    position = static_cast<std::uint32_t>(next + gap);
    next = std::uint64_t{position} + 1;
  }
  // One way to write them: else equal values might come in unequal frames.
  for (; at < end; at = (at / 8 + 1) * 8) {
    if ((bits_from(in, at) & (0xffu >> (at % 8))) != 0) refuse("are followed by bits that are not zero");
  }
}

}  // namespace torch_iroh::codec
