// Blocks of floats: float32, bfloat16, and the two 8-bit floats with the bits that torch's casts give.
//
//   fp8    bf16 scale, a power of two | u8 code[n]          value = code * scale
#pragma once

#include "codec/loops_base.hpp"

namespace torch_iroh::codec {
namespace {

// ---- 8-bit floats: the bits that torch's casts give ----

struct E4M3 {
  static constexpr i32 kTopExponent = 8;  // 448 = 1.75 * 2^8; no infinity: what is beyond becomes NaN
  static u8 narrow(float value) {
    const i32 rest = magnitude_bits(value);
    const i32 normal = (rest - (120 << 23) + 0x7ffff + ((rest >> 20) & 1)) >> 20;
    // Below 2^-6 a code counts multiples of 2^-9: adding 2^14 makes the FPU round to just that.
    const i32 small = static_cast<i32>(bits_of(float_of(static_cast<u32>(rest)) + 0x1p14f)) - (141 << 23);
    const i32 finite = rest < (121 << 23) ? small : normal;
    const i32 code = rest >= 0x43f00000 ? 0x7f : finite;
    return static_cast<u8>(static_cast<u32>(code) | ((bits_of(value) >> 24) & 0x80u));
  }
  static float widen(u8 code) {
    const i32 rest = code & 0x7f;
    const i32 normal = (rest << 20) + (120 << 23);
    const i32 small = static_cast<i32>(bits_of(static_cast<float>(rest) * 0x1p-9f));
    const i32 finite = rest < 8 ? small : normal;
    const i32 all = rest == 0x7f ? static_cast<i32>(kNaN) : finite;
    return float_of(static_cast<u32>(all) | (static_cast<u32>(code & 0x80) << 24));
  }
};

struct E5M2 {
  static constexpr i32 kTopExponent = 15;  // 57344 = 1.75 * 2^15
  static u8 narrow(float value) {
    const i32 rest = magnitude_bits(value);
    const i32 normal = (rest - (112 << 23) + 0xfffff + ((rest >> 21) & 1)) >> 21;
    const i32 small = static_cast<i32>(bits_of(float_of(static_cast<u32>(rest)) + 0x1p7f)) - (134 << 23);
    const i32 finite = rest < (113 << 23) ? small : normal;
    const i32 beyond = rest > kInfinity ? 0x7f : 0x7c;
    const i32 code = rest >= (143 << 23) ? beyond : finite;
    return static_cast<u8>(static_cast<u32>(code) | ((bits_of(value) >> 24) & 0x80u));
  }
  static float widen(u8 code) {
    const i32 rest = code & 0x7f;
    const i32 normal = (rest << 21) + (112 << 23);
    const i32 small = static_cast<i32>(bits_of(static_cast<float>(rest) * 0x1p-16f));
    const i32 finite = rest < 4 ? small : normal;
    const i32 all = rest >= 0x7c ? (rest << 21) | kInfinity : finite;
    return float_of(static_cast<u32>(all) | (static_cast<u32>(code & 0x80) << 24));
  }
};

// The exponent by which a block whose largest finite magnitude is `largest` fits into Float, 1.75 * 2^kTopExponent at
// most. Not below -126: the scale and its reciprocal are normal numbers, which no thread flushes to zero.
template <class Float>
inline i32 exponent_for(i32 largest) {
  if (largest == 0) return 0;
  const i32 over = (largest & 0x7fffff) > 0x600000 ? 1 : 0;
  return most((largest >> 23) - 127 - Float::kTopExponent + over, -126);
}

// What is rounded up from beyond 1.75 * 2^127 would come out infinite: it is taken for that.
constexpr i32 kLargestRounded = 0x7f600000;
inline void saturate(const float* __restrict values, size_t count, float* __restrict saturated) {
  for (size_t i = 0; i < count; ++i) {
    const i32 magnitude = magnitude_bits(values[i]);
    const bool beyond = (magnitude > kLargestRounded) & (magnitude < kInfinity);
    const u32 sign = bits_of(values[i]) & 0x80000000u;
    saturated[i] = float_of(sign | static_cast<u32>(beyond ? kLargestRounded : magnitude));
  }
}

template <class Float>
inline void encode_floats(const float* __restrict values, size_t count, i32 largest, i32 exponent,
                          u8* __restrict codes) {
  float saturated[kMostBlock];
  if (largest > kLargestRounded) {
    saturate(values, count, saturated);
    values = saturated;
  }
  const float factor = power_of_two(-exponent);
  for (size_t i = 0; i < count; ++i) codes[i] = Float::narrow(values[i] * factor);
}
template <class Float, bool kAdd>
inline void decode_floats(const u8* __restrict codes, size_t count, float scale, float* __restrict out) {
  for (size_t i = 0; i < count; ++i) put<kAdd>(out[i], Float::widen(codes[i]) * scale);
}

template <class Float>
struct ScaledFloats {
  static size_t bytes(const Blocks&, size_t count) { return 2 + count; }
  static void encode(const Blocks&, const float* values, size_t count, u64, u8* out) {
    const i32 largest = largest_finite(values, count);
    const i32 exponent = exponent_for<Float>(largest);
    put_scale(Blocks{0}, power_of_two(exponent), out);
    encode_floats<Float>(values, count, largest, exponent, out + 2);
  }
  template <bool kAdd>
  static void decode(const Blocks&, const u8* in, size_t count, float* out) {
    decode_floats<Float, kAdd>(in + 2, count, get_scale(Blocks{0}, in), out);
  }
};

// ---- float32, bfloat16 ----

struct Float32 {
  static size_t bytes(const Blocks&, size_t count) { return 4 * count; }
  static void encode(const Blocks&, const float* values, size_t count, u64, u8* out) {
    __builtin_memcpy(out, values, 4 * count);
  }
  template <bool kAdd>
  static void decode(const Blocks&, const u8* __restrict in, size_t count, float* __restrict out) {
    for (size_t i = 0; i < count; ++i) {
      float value;
      __builtin_memcpy(&value, in + 4 * i, 4);
      put<kAdd>(out[i], value);
    }
  }
};

struct BFloat16 {
  static size_t bytes(const Blocks&, size_t count) { return 2 * count; }
  static void encode(const Blocks&, const float* __restrict values, size_t count, u64, u8* __restrict out) {
    for (size_t i = 0; i < count; ++i) {
      const u32 bits = bits_of(values[i]);
      const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
      const u32 nan = (bits >> 16) | 0x0040u;
      const u16 stored = static_cast<u16>(magnitude_bits(values[i]) > kInfinity ? nan : rounded);
      __builtin_memcpy(out + 2 * i, &stored, 2);
    }
  }
  template <bool kAdd>
  static void decode(const Blocks&, const u8* __restrict in, size_t count, float* __restrict out) {
    for (size_t i = 0; i < count; ++i) {
      u16 stored;
      __builtin_memcpy(&stored, in + 2 * i, 2);
      put<kAdd>(out[i], float_of(static_cast<u32>(stored) << 16));
    }
  }
};

}  // namespace
}  // namespace torch_iroh::codec
