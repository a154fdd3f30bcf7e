// The loops of kernels.hpp, included once for each instruction set. Plain loops that the compiler vectorises.
//
// Everything is in an unnamed namespace, and nothing of the standard library is called: an inline function of a header,
// compiled here for AVX-512, might become the one copy of the whole program.
//
// A block of n values, byte by byte (integers, signs):
//   int8   scale | u8 zero point | u8 code[n]               value = (code - zero) * scale
//   int4   scale | u8 zero point | u8 codes[(n + 1) / 2]    low nibbles: the block's first half, high ones: its second
//   sign   scale | u8 bits[(n + 7) / 8]                     bit b of byte j: the sign of value b * size + j
//   fp8    bf16 scale, a power of two | u8 code[n]          value = code * scale
// scale is a bf16, or a float32 with wide_scale. Zero is a code of every block, so zeros stay zeros.
// A NaN for a scale: int8's zero point is then an exponent e and its codes are e5m2 floats, value = code * 2^e; int4's
// codes are NaN (0), +inf (1) and -inf (2), finite values become NaN; a block of signs is NaN as a whole.

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

inline void quantise(const float* __restrict values, size_t count, Grid grid, u8* __restrict codes) {
  for (size_t i = 0; i < count; ++i) {
    const float steps = least(most(values[i] * grid.inverse, grid.least), grid.most);
    codes[i] =
        static_cast<u8>(bits_of(steps + kRounder) + static_cast<u32>(grid.zero));  // kRounder ends in a zero byte
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
