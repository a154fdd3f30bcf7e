// What the loops of loops.hpp share: float32 as bits, scales as the wire holds them.
#pragma once

#include "codec/kernels.hpp"

namespace torch_iroh::codec {
namespace {

using i32 = std::int32_t;
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using std::size_t;

constexpr i32 kInfinity = 0x7f800000;
constexpr u32 kNaN = 0x7fc00000;
constexpr float kLargest = 0x1.fffffep127f;
constexpr float kLeastNormal = 0x1p-126f;
constexpr float kRounder = 0x1.8p23f;  // adding it leaves a float without room for a fraction: rounds to nearest even

inline u32 bits_of(float value) {
  u32 bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float float_of(u32 bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
inline i32 magnitude_bits(float value) {
  return static_cast<i32>(bits_of(value) & 0x7fffffffu);
}
inline float power_of_two(i32 exponent) {  // -126 to 127
  return float_of(static_cast<u32>(exponent + 127) << 23);
}
template <class T>
inline T least(T a, T b) {
  return a < b ? a : b;
}
template <class T>
inline T most(T a, T b) {
  return a > b ? a : b;
}

template <bool kAdd>
inline void put(float& to, float value) {
  to = kAdd ? to + value : value;
}

// ---- scales ----

inline size_t scale_bytes(const Blocks& blocks) {
  return blocks.wide_scale ? 4 : 2;
}
inline void put_scale(const Blocks& blocks, float scale, u8* to) {
  const u32 bits = bits_of(scale);
  const u16 upper = static_cast<u16>(bits >> 16);
  if (blocks.wide_scale) {
    __builtin_memcpy(to, &bits, sizeof bits);
  } else {
    __builtin_memcpy(to, &upper, sizeof upper);
  }
}
inline float get_scale(const Blocks& blocks, const u8* from) {
  u32 bits;
  u16 upper;
  if (blocks.wide_scale) {
    __builtin_memcpy(&bits, from, sizeof bits);
  } else {
    __builtin_memcpy(&upper, from, sizeof upper);
    bits = static_cast<u32>(upper) << 16;
  }
  return float_of(bits);
}
// A positive scale as the wire holds it, rounded up but for the largest finite bfloat16.
inline float storable(const Blocks& blocks, float scale) {
  if (blocks.wide_scale) return scale;
  return float_of(least((bits_of(scale) + 0xffffu) & 0xffff0000u, 0x7f7f0000u));
}

// The largest magnitude among the finite values, as bits.
inline i32 largest_finite(const float* __restrict values, size_t count) {
  i32 largest = 0;
  for (size_t i = 0; i < count; ++i) {
    const i32 magnitude = magnitude_bits(values[i]);
    largest = most(largest, magnitude < kInfinity ? magnitude : 0);
  }
  return largest;
}

}  // namespace
}  // namespace torch_iroh::codec
