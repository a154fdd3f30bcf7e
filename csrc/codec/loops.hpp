// The loops of kernels.hpp, compiled once for each instruction set: plain ones, that the compiler vectorises.
//
// Everything is in an unnamed namespace, and nothing of the standard library is called: an inline function of a header,
// compiled here for AVX-512, might become the one copy of the whole program.
#pragma once

#include "codec/loops_floats.hpp"
#include "codec/loops_integers.hpp"

namespace torch_iroh::codec {
namespace {

// ---- all blocks of a buffer ----

template <class Block>
void encode_all(const Blocks& blocks, const float* values, size_t count, std::byte* to, float* decoded) {
  u8* out = reinterpret_cast<u8*>(to);
  u64 index = 0;
  for (size_t at = 0; at < count; at += blocks.block, ++index) {
    const size_t size = least(blocks.block, count - at);
    Block::encode(blocks, values + at, size, index, out);
    if (decoded != nullptr) Block::template decode<false>(blocks, out, size, decoded + at);  // still in the cache
    out += Block::bytes(blocks, size);
  }
}
template <class Block, bool kAdd>
void decode_all(const Blocks& blocks, const std::byte* from, size_t count, float* out) {
  const u8* in = reinterpret_cast<const u8*>(from);
  for (size_t at = 0; at < count; at += blocks.block) {
    const size_t size = least(blocks.block, count - at);
    Block::template decode<kAdd>(blocks, in, size, out + at);
    in += Block::bytes(blocks, size);
  }
}

template <class Block>
constexpr Format format_of() {
  return {encode_all<Block>, decode_all<Block, false>, decode_all<Block, true>};
}

// ---- looking for values ----

size_t count_nonfinite(const float* values, size_t count) {
  constexpr size_t kStride = size_t{1} << 20;  // so that a 32-bit counter does
  size_t found = 0;
  for (size_t at = 0; at < count; at += kStride) {
    const size_t size = least(kStride, count - at);
    i32 here = 0;
    for (size_t i = 0; i < size; ++i) here += magnitude_bits(values[at + i]) >= kInfinity ? 1 : 0;
    found += static_cast<size_t>(here);
  }
  return found;
}

size_t find_large(const float* values, size_t count, i32 threshold, u32* __restrict found, size_t room) {
  constexpr size_t kStride = 32;  // looked at as a whole first
  size_t size = 0;
  for (size_t at = 0; at < count; at += kStride) {
    const size_t here = least(kStride, count - at);
    i32 largest = 0;
    if (here == kStride) {
      for (size_t i = 0; i < kStride; ++i) largest = most(largest, magnitude_bits(values[at + i]));
      if (largest < threshold) continue;
    }
    if (size + kStride > room) return room + 1;
    for (size_t i = 0; i < here; ++i) {  // without a branch: writes each, steps past those that count
      found[size] = static_cast<u32>(at + i);
      size += magnitude_bits(values[at + i]) >= threshold ? 1 : 0;
    }
  }
  return size;
}

constexpr Kernels kThisLevel{
    .float32 = format_of<Float32>(),
    .bfloat16 = format_of<BFloat16>(),
    .e4m3 = format_of<ScaledFloats<E4M3>>(),
    .e5m2 = format_of<ScaledFloats<E5M2>>(),
    .int8 = format_of<Int8>(),
    .int4 = format_of<Int4>(),
    .sign = format_of<Sign>(),
    .count_nonfinite = count_nonfinite,
    .find_large = find_large,
};

}  // namespace
}  // namespace torch_iroh::codec
