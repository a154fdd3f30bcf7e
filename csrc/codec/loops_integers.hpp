// Blocks of integers and of signs. n values, byte by byte:
//
//   int8   scale | u8 zero point | u8 code[n]               value = (code - zero) * scale
//   int4   scale | u8 zero point | u8 codes[(n + 1) / 2]    low nibbles: the block's first half, high ones: its second
//   sign   scale | u8 bits[(n + 7) / 8]                     bit b of byte j: the sign of value b * size + j
//
// A scale is a bfloat16, or a float32 with wide_scale. With a zero point the codes span from the block's lowest value
// to its highest: a tenth less error than 127 steps for the largest magnitude, for a byte a block. Zeros stay zeros,
// and but for the last binade of float32 no value moves by more than half a scale (stochastic rounding: by a whole
// one). A NaN for a scale: int8's zero point is then an exponent e and its codes are e5m2 floats, value = code * 2^e;
// int4's codes are NaN (0), +inf (1) and -inf (2), finite values become NaN; a block of signs is NaN as a whole.
#pragma once

#include "codec/loops_floats.hpp"

namespace torch_iroh::codec {
namespace {

// ---- int8, int4 ----

// Floats as integers of the same order.
inline i32 ordered(float value) {
  const i32 bits = static_cast<i32>(bits_of(value));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
inline float from_ordered(i32 order) {
  return float_of(static_cast<u32>(order ^ ((order >> 31) & 0x7fffffff)));
}

struct Range {
  float low, high;  // of the block's values and zero
  bool finite;
};
inline Range range_of(const float* __restrict values, size_t count) {
  i32 low = 0, high = 0;
  for (size_t i = 0; i < count; ++i) {
    const i32 order = ordered(values[i]);
    low = least(low, order);
    high = most(high, order);
  }
  return {from_ordered(low), from_ordered(high), high < kInfinity && low > ~kInfinity};
}

struct Grid {
  float scale, inverse;
  float least, most;  // of (code - zero)
  i32 zero;
};

// `top` + 1 codes. A scale is 0 or a normal number.
inline Grid grid_of(const Blocks& blocks, Range range, i32 top) {
  if (range.low == range.high) return {0, 0, 0, 0, 0};  // both are zero
  // With `top` steps from low to high, the code of zero can always be such that both ends are within half a step. What
  // is rounded to either side needs one step more.
  const float steps = static_cast<float>(blocks.stochastic ? top - 1 : top);
  float scale = range.high / steps - range.low / steps;         // high - low might overflow
  if (blocks.wide_scale) scale = float_of(bits_of(scale) + 2);  // for the three roundings above
  scale = most(storable(blocks, scale), kLeastNormal);
  const float inverse = 1.0f / scale;
  const float lowest = range.low * inverse;
  float first = (lowest + kRounder) - kRounder;
  if (blocks.stochastic && first > lowest) first -= 1.0f;
  const i32 zero = least(static_cast<i32>(-first), top);
  float finite = static_cast<float>(top);  // near the end of float32 the outermost codes would be infinite
  while (finite * scale > kLargest) finite -= 1.0f;
  const float below = static_cast<float>(zero), above = static_cast<float>(top - zero);
  return {scale, inverse, -least(below, finite), least(above, finite), zero};
}

// The lowest byte of kRounder's bits is 0, so that of the sum is the rounded number.
inline void quantise(const float* __restrict values, size_t count, Grid grid, u8* __restrict codes) {
  for (size_t i = 0; i < count; ++i) {
    const float steps = least(most(values[i] * grid.inverse, grid.least), grid.most);
    codes[i] = static_cast<u8>(bits_of(steps + kRounder) + static_cast<u32>(grid.zero));
  }
}

inline u64 mixed(u64 x) {  // the finaliser of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Rounds up with a probability that is the fraction: compares it with 24 bits of a hash of (seed, block, i).
inline void quantise_stochastic(const float* __restrict values, size_t count, Grid grid, u64 key,
                                u8* __restrict codes) {
  const u32 first = static_cast<u32>(key), second = static_cast<u32>(key >> 32);
  for (size_t i = 0; i < count; ++i) {
    u32 hash = static_cast<u32>(i) * 0x9e3779b9u + first;
    hash = (hash ^ (hash >> 16)) * 0x7feb352du;
    hash = (hash ^ (hash >> 15) ^ second) * 0x846ca68bu;
    hash ^= hash >> 16;
    const float uniform = static_cast<float>(static_cast<i32>(hash >> 8)) * 0x1p-24f;
    const float steps = values[i] * grid.inverse;
    i32 below = static_cast<i32>(steps);
    below -= static_cast<float>(below) > steps ? 1 : 0;
    const float fraction = steps - static_cast<float>(below);
    const float rounded = static_cast<float>(below) + (uniform < fraction ? 1.0f : 0.0f);
    codes[i] = static_cast<u8>(static_cast<i32>(least(most(rounded, grid.least), grid.most)) + grid.zero);
  }
}

inline void quantise(const Blocks& blocks, const float* values, size_t count, Grid grid, u64 index, u8* codes) {
  if (!blocks.stochastic) return quantise(values, count, grid, codes);
  quantise_stochastic(values, count, grid, mixed(blocks.seed + mixed(index + 0x9e3779b97f4a7c15u)), codes);
}

struct Int8 {
  static size_t bytes(const Blocks& blocks, size_t count) { return scale_bytes(blocks) + 1 + count; }
  static void encode(const Blocks& blocks, const float* values, size_t count, u64 index, u8* out) {
    u8* codes = out + scale_bytes(blocks) + 1;
    const Range range = range_of(values, count);
    if (!range.finite) {
      const i32 largest = largest_finite(values, count);
      const i32 exponent = exponent_for<E5M2>(largest);
      put_scale(blocks, float_of(kNaN), out);
      codes[-1] = static_cast<u8>(exponent);
      return encode_floats<E5M2>(values, count, largest, exponent, codes);
    }
    const Grid grid = grid_of(blocks, range, 255);
    put_scale(blocks, grid.scale, out);
    codes[-1] = static_cast<u8>(grid.zero);
    quantise(blocks, values, count, grid, index, codes);
  }
  template <bool kAdd>
  static void decode(const Blocks& blocks, const u8* __restrict in, size_t count, float* __restrict out) {
    const float scale = get_scale(blocks, in);
    const u8* __restrict codes = in + scale_bytes(blocks) + 1;
    const i32 zero = codes[-1];
    if (scale != scale) {
      const i32 exponent = most(static_cast<i32>(static_cast<std::int8_t>(zero)), -126);
      return decode_floats<E5M2, kAdd>(codes, count, power_of_two(exponent), out);
    }
    for (size_t i = 0; i < count; ++i) put<kAdd>(out[i], static_cast<float>(codes[i] - zero) * scale);
  }
};

struct Int4 {
  static size_t bytes(const Blocks& blocks, size_t count) { return scale_bytes(blocks) + 1 + (count + 1) / 2; }
  static void encode(const Blocks& blocks, const float* values, size_t count, u64 index, u8* __restrict out) {
    u8 codes[kMostBlock + 1];
    const Range range = range_of(values, count);
    Grid grid{float_of(kNaN), 0, 0, 0, 0};
    if (range.finite) {
      grid = grid_of(blocks, range, 15);
      quantise(blocks, values, count, grid, index, codes);
    } else {
      for (size_t i = 0; i < count; ++i) {
        codes[i] = static_cast<u8>(magnitude_bits(values[i]) != kInfinity ? 0 : values[i] > 0 ? 1 : 2);
      }
    }
    put_scale(blocks, grid.scale, out);
    out += scale_bytes(blocks);
    *out++ = static_cast<u8>(grid.zero);
    const size_t half = (count + 1) / 2;
    codes[count] = 0;  // the nibble beside the last of an odd number
    for (size_t i = 0; i < half; ++i) out[i] = static_cast<u8>(codes[i] | (codes[half + i] << 4));
  }
  template <bool kAdd>
  static void decode(const Blocks& blocks, const u8* __restrict in, size_t count, float* __restrict out) {
    const float scale = get_scale(blocks, in);
    const i32 zero = in[scale_bytes(blocks)];
    const u8* __restrict codes = in + scale_bytes(blocks) + 1;
    const size_t half = (count + 1) / 2;
    if (scale != scale) {
      for (size_t i = 0; i < count; ++i) {
        const i32 code = i < half ? codes[i] & 15 : codes[i - half] >> 4;
        const u32 bits = code == 1 ? 0x7f800000u : code == 2 ? 0xff800000u : kNaN;
        put<kAdd>(out[i], float_of(bits));
      }
      return;
    }
    float* __restrict second = out + half;
    for (size_t i = 0; i < half; ++i) put<kAdd>(out[i], static_cast<float>((codes[i] & 15) - zero) * scale);
    for (size_t i = 0; i < count - half; ++i) put<kAdd>(second[i], static_cast<float>((codes[i] >> 4) - zero) * scale);
  }
};

// ---- sign ----

// In 16 lanes whatever the vector width, each value already divided: the sum of large ones must not overflow.
inline float mean_magnitude(const float* __restrict values, size_t count) {
  constexpr size_t kLanes = 16;
  const float share = 1.0f / static_cast<float>(count);
  float lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += float_of(bits_of(values[i + lane]) & 0x7fffffffu) * share;
    }
  }
  for (; i < count; ++i) lanes[i % kLanes] += float_of(bits_of(values[i]) & 0x7fffffffu) * share;
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

struct Sign {
  static size_t bytes(const Blocks& blocks, size_t count) { return scale_bytes(blocks) + (count + 7) / 8; }
  static void encode(const Blocks& blocks, const float* __restrict values, size_t count, u64, u8* __restrict out) {
    u8 negative[kMostBlock + 8];
    float scale = float_of(kNaN);
    const i32 largest = largest_finite(values, count);
    const Range range = range_of(values, count);
    if (range.finite) {
      // Sums round: never beyond the largest value, which is finite.
      const float mean = least(mean_magnitude(values, count), float_of(static_cast<u32>(largest)));
      scale = largest == 0 ? 0.0f : most(storable(blocks, mean), kLeastNormal);
    }
    put_scale(blocks, scale, out);
    out += scale_bytes(blocks);
    const size_t size = (count + 7) / 8;
    for (size_t i = 0; i < count; ++i) negative[i] = static_cast<u8>(bits_of(values[i]) >> 31);
    for (size_t i = count; i < 8 * size; ++i) negative[i] = 0;
    for (size_t j = 0; j < size; ++j) {
      u32 bits = 0;
      for (size_t b = 0; b < 8; ++b) bits |= static_cast<u32>(negative[b * size + j]) << b;
      out[j] = static_cast<u8>(bits);
    }
  }
  template <bool kAdd>
  static void decode(const Blocks& blocks, const u8* __restrict in, size_t count, float* __restrict out) {
    const u32 scale = bits_of(get_scale(blocks, in));
    const u8* __restrict bytes = in + scale_bytes(blocks);
    const size_t size = (count + 7) / 8;
    for (size_t b = 0; b < 8; ++b) {
      const size_t from = least(b * size, count), to = least(from + size, count);
      float* __restrict part = out + from;
      for (size_t j = 0; j < to - from; ++j) {
        put<kAdd>(part[j], float_of(scale ^ (static_cast<u32>((bytes[j] >> b) & 1) << 31)));
      }
    }
  }
};

}  // namespace
}  // namespace torch_iroh::codec
