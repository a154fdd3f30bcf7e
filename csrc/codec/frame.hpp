// The head of a codec's frame and its checksum. Knows which codec and count a frame is for, nothing of its body.
//
//   0 u32 magic "TIcf" | 4 u8 version | 5 u8 kind | 6 u8 log2(block) | 7 u8 1: float32 scales
//   8 u64 count | 16 f64 density | 24 u64 checksum of all other bytes | 32 body
//
// A field that its codec does not use is 0. Rounding and the rule for NaN are the sender's own business: not said here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/codec.hpp"

namespace torch_iroh::codec {

inline constexpr std::size_t kHeaderBytes = 32;

// 64 bits, not cryptographic, at the speed of memory: eight lanes of x = rotl((x ^ word) * odd, 29), each step of which
// is a bijection of x and of the word. So a change within one word of 8 bytes is always seen, any other one but with a
// probability of about 2^-64.
std::uint64_t checksum(std::span<const std::byte> bytes);

void write_header(const Codec& codec, std::uint64_t count, std::span<std::byte> frame);  // all but the checksum
void seal(std::span<std::byte> frame);  // writes the checksum of a frame that is otherwise complete

// Throws Error(protocol) unless the frame is a whole one of `bytes` for this codec and count.
void check_frame(const Codec& codec, std::uint64_t count, std::size_t bytes, std::span<const std::byte> frame);

}  // namespace torch_iroh::codec
