// The kernels of reduce.hpp: one plain loop per (operation, element type), written so that the compiler vectorises it.
//
// Memory is unaligned (a payload starts right after a frame's header), so elements are loaded and stored by memcpy,
// which compiles to plain moves. Signed sums and products run on the unsigned type: same bits, and overflow wraps.
#include "collective/reduce.hpp"

#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

// GCC vectorises loops of unknown length only from -O3 on, and float comparisons only if they need not raise flags.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "no-trapping-math")
#endif

namespace torch_iroh::collective {

namespace {

// ---- element types: what lies in memory (Stored) and what is computed with (Value) ----

template <class T>
struct Plain {
  using Stored = T;
  using Value = T;
  static Value widen(Stored x) { return x; }
  static Stored narrow(Value x) { return x; }
};

// Not std::bit_cast: a function from a header is compiled without the pragma above and would not be inlined below it.
inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Both 16-bit floats convert without branches. NaNs stay NaNs (made quiet on the way back), keeping the upper payload.
struct Half {
  using Stored = std::uint16_t;
  using Value = float;

  // `rest`, the number without its sign, is signed because SSE2 compares only signed integers.
  static float widen(std::uint16_t half) {
    const std::int32_t rest = half & 0x7fff;
    const std::int32_t normal = (rest << 13) + (112 << 23);
    const std::int32_t special = (rest << 13) | 0x7f800000;  // inf, NaN
    const auto small = static_cast<std::int32_t>(bits_of(static_cast<float>(rest) * 0x1p-24f));
    const std::int32_t finite = rest < 0x0400 ? small : normal;
    const std::uint32_t sign = (half & 0x8000u) << 16;
    return float_of(sign | static_cast<std::uint32_t>(rest >= 0x7c00 ? special : finite));
  }

  static std::uint16_t narrow(float value) {
    const std::uint32_t bits = bits_of(value);
    const auto rest = static_cast<std::int32_t>(bits & 0x7fffffffu);
    const std::int32_t normal = (rest - (112 << 23) + 0x0fff + ((rest >> 13) & 1)) >> 13;
    // Below 2^-14 the result is subnormal, a multiple of 2^-24: adding 0.5 makes the FPU round to just that.
    const float shifted = float_of(static_cast<std::uint32_t>(rest)) + 0.5f;
    const std::int32_t small = static_cast<std::int32_t>(bits_of(shifted)) - 0x3f000000;
    const std::int32_t nan = 0x7e00 | ((rest >> 13) & 0x03ff);
    const std::int32_t finite = rest < 0x38800000 ? small : normal;
    const std::int32_t big = rest > 0x7f800000 ? nan : 0x7c00;
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(rest >= 0x477ff000 ? big : finite));  // 65520
  }
};

struct BFloat {
  using Stored = std::uint16_t;
  using Value = float;

  static float widen(std::uint16_t x) { return float_of(static_cast<std::uint32_t>(x) << 16); }

  static std::uint16_t narrow(float value) {
    const auto bits = bits_of(value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const std::uint32_t nan = (bits >> 16) | 0x0040u;
    const auto rest = static_cast<std::int32_t>(bits & 0x7fffffffu);
    return static_cast<std::uint16_t>(rest > 0x7f800000 ? nan : rounded);
  }
};

template <class T>
struct Complex {
  T re;
  T im;
};

// ---- operations on two values ----

// The type to add and multiply T in: unsigned and not promoted to int (uint16 * uint16 overflows int).
template <class T>
using Modular = std::conditional_t<(sizeof(T) < sizeof(std::uint32_t)), std::uint32_t, T>;

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>)
      return static_cast<T>(static_cast<Modular<T>>(a) + static_cast<Modular<T>>(b));
    else
      return a + b;
  }
};
struct Product {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>)
      return static_cast<T>(static_cast<Modular<T>>(a) * static_cast<Modular<T>>(b));
    else
      return a * b;
  }
  template <class T>
  static Complex<T> apply(Complex<T> a, Complex<T> b) {
    return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  }
};
// A NaN on either side wins: on the left by a != a, on the right because it compares false.
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return ((a != a) | (a < b)) ? a : b;
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    return ((a != a) | (a > b)) ? a : b;
  }
};
struct And {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// bool: any byte but 0 is true, the result is 0 or 1.
template <class Bits>
struct Logical {
  static std::uint8_t apply(std::uint8_t a, std::uint8_t b) {
    return static_cast<std::uint8_t>(Bits::apply(static_cast<std::uint8_t>(a != 0), static_cast<std::uint8_t>(b != 0)));
  }
};

// ---- loops ----

template <class Type>
typename Type::Value load(const std::byte* from, std::size_t index) {
  typename Type::Stored stored;
  std::memcpy(&stored, from + index * sizeof(stored), sizeof(stored));
  return Type::widen(stored);
}

template <class Type>
void store(std::byte* to, std::size_t index, typename Type::Value value) {
  const typename Type::Stored stored = Type::narrow(value);
  std::memcpy(to + index * sizeof(stored), &stored, sizeof(stored));
}

// One loop for each way the three ranges may coincide: in place there are only two pointers, which the compiler can
// prove apart at run time; with three it would see `out` overlap an operand and not vectorise.
template <class Type, class Operation>
void combine(const std::byte* a, const std::byte* b, std::byte* out, std::size_t count) {
  if (out == a) {
    for (std::size_t i = 0; i < count; ++i) store<Type>(out, i, Operation::apply(load<Type>(out, i), load<Type>(b, i)));
  } else if (out == b) {
    for (std::size_t i = 0; i < count; ++i) store<Type>(out, i, Operation::apply(load<Type>(a, i), load<Type>(out, i)));
  } else {
    for (std::size_t i = 0; i < count; ++i) store<Type>(out, i, Operation::apply(load<Type>(a, i), load<Type>(b, i)));
  }
}

template <class Type, class Function>
void transform(std::byte* data, std::size_t count, Function function) {
  for (std::size_t i = 0; i < count; ++i) store<Type>(data, i, function(load<Type>(data, i)));
}

[[noreturn]] void refuse(std::string_view what, DType dtype) {
  throw std::invalid_argument(std::string(what) + " is not defined for " + std::string(name_of(dtype)));
}

// A complex number is two floats for everything linear.
struct Linear {
  DType dtype;
  std::size_t count;
};
Linear parts_of(DType dtype, std::size_t count) {
  if (dtype == DType::complex64) return {DType::float32, 2 * count};
  if (dtype == DType::complex128) return {DType::float64, 2 * count};
  return {dtype, count};
}

// ---- choice of the loop ----

using Kernel = void (*)(const std::byte*, const std::byte*, std::byte*, std::size_t);

template <class T>
Kernel integer_kernel(ReduceOp op) {
  using Bits = Plain<std::make_unsigned_t<T>>;
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg: return combine<Bits, Sum>;
    case ReduceOp::product: return combine<Bits, Product>;
    case ReduceOp::min: return combine<Plain<T>, Min>;
    case ReduceOp::max: return combine<Plain<T>, Max>;
    case ReduceOp::band: return combine<Bits, And>;
    case ReduceOp::bor: return combine<Bits, Or>;
    case ReduceOp::bxor: return combine<Bits, Xor>;
    case ReduceOp::premul_sum: return nullptr;  // a float factor has no place in an integer
  }
  return nullptr;
}

template <class Type>
Kernel float_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
    case ReduceOp::premul_sum: return combine<Type, Sum>;
    case ReduceOp::product: return combine<Type, Product>;
    case ReduceOp::min: return combine<Type, Min>;
    case ReduceOp::max: return combine<Type, Max>;
    default: return nullptr;
  }
}

Kernel bool_kernel(ReduceOp op) {
  using Byte = Plain<std::uint8_t>;
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::max:
    case ReduceOp::bor: return combine<Byte, Logical<Or>>;
    case ReduceOp::product:
    case ReduceOp::min:
    case ReduceOp::band: return combine<Byte, Logical<And>>;
    case ReduceOp::bxor: return combine<Byte, Logical<Xor>>;
    default: return nullptr;
  }
}

// nullptr where the pair has no meaning. Linear operations on complex numbers come as their parts.
Kernel kernel_of(ReduceOp op, DType dtype) {
  switch (dtype) {
    case DType::boolean: return bool_kernel(op);
    case DType::uint8: return integer_kernel<std::uint8_t>(op);
    case DType::int8: return integer_kernel<std::int8_t>(op);
    case DType::uint16: return integer_kernel<std::uint16_t>(op);
    case DType::int16: return integer_kernel<std::int16_t>(op);
    case DType::uint32: return integer_kernel<std::uint32_t>(op);
    case DType::int32: return integer_kernel<std::int32_t>(op);
    case DType::uint64: return integer_kernel<std::uint64_t>(op);
    case DType::int64: return integer_kernel<std::int64_t>(op);
    case DType::float16: return float_kernel<Half>(op);
    case DType::bfloat16: return float_kernel<BFloat>(op);
    case DType::float32: return float_kernel<Plain<float>>(op);
    case DType::float64: return float_kernel<Plain<double>>(op);
    case DType::complex64: return op == ReduceOp::product ? combine<Plain<Complex<float>>, Product> : nullptr;
    case DType::complex128: return op == ReduceOp::product ? combine<Plain<Complex<double>>, Product> : nullptr;
    case DType::float8: return nullptr;
  }
  return nullptr;
}

bool is_linear(ReduceOp op) {
  return op == ReduceOp::sum || op == ReduceOp::avg || op == ReduceOp::premul_sum;
}

template <class T>
void divide_integers(std::byte* data, std::size_t count, std::int32_t world) {
  using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
  transform<Plain<T>>(data, count, [by = static_cast<Wide>(world)](T x) { return static_cast<T>(x / by); });
}

template <class Type>
void divide_floats(std::byte* data, std::size_t count, std::int32_t world) {
  using Value = typename Type::Value;
  transform<Type>(data, count, [by = static_cast<Value>(world)](Value x) { return x / by; });
}

template <class Type>
void multiply(std::byte* data, std::size_t count, double factor) {
  using Value = typename Type::Value;
  transform<Type>(data, count, [by = static_cast<Value>(factor)](Value x) { return x * by; });
}

template <class Type>
float load_wide(const std::byte* from, std::size_t index) {
  typename Type::Stored stored;
  std::memcpy(&stored, from + index * sizeof stored, sizeof stored);
  return Type::widen(stored);
}

template <class Type, class Operation>
void begin(const std::byte* a, const std::byte* b, float* sum, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sum[i] = Operation::apply(load_wide<Type>(a, i), load_wide<Type>(b, i));
}

template <class Type, class Operation>
void add(float* sum, const std::byte* b, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sum[i] = Operation::apply(sum[i], load_wide<Type>(b, i));
}

template <class Type>
void load_all(const std::byte* from, float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    typename Type::Stored stored;
    std::memcpy(&stored, from + i * sizeof stored, sizeof stored);
    values[i] = static_cast<float>(Type::widen(stored));
  }
}

template <class Type>
void end(const float* sum, float divisor, std::byte* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const typename Type::Stored stored = Type::narrow(sum[i] / divisor);
    std::memcpy(out + i * sizeof stored, &stored, sizeof stored);
  }
}

}  // namespace

bool accumulates_wide(ReduceOp op, DType dtype) {
  return (dtype == DType::float16 || dtype == DType::bfloat16) && (is_linear(op) || op == ReduceOp::product);
}

void begin_wide(ReduceOp op, DType dtype, const std::byte* a, const std::byte* b, float* sum, std::size_t count) {
  const bool product = op == ReduceOp::product;
  if (dtype == DType::float16) return (product ? begin<Half, Product> : begin<Half, Sum>)(a, b, sum, count);
  (product ? begin<BFloat, Product> : begin<BFloat, Sum>)(a, b, sum, count);
}

void add_wide(ReduceOp op, DType dtype, float* sum, const std::byte* b, std::size_t count) {
  const bool product = op == ReduceOp::product;
  if (dtype == DType::float16) return (product ? add<Half, Product> : add<Half, Sum>)(sum, b, count);
  (product ? add<BFloat, Product> : add<BFloat, Sum>)(sum, b, count);
}

void end_wide(DType dtype, const float* sum, float divisor, std::byte* out, std::size_t count) {
  (dtype == DType::float16 ? end<Half> : end<BFloat>)(sum, divisor, out, count);
}

void widen(DType dtype, const std::byte* from, float* values, std::size_t count) {
  switch (dtype) {
    case DType::float16: return load_all<Half>(from, values, count);
    case DType::bfloat16: return load_all<BFloat>(from, values, count);
    case DType::float32: std::memcpy(values, from, count * sizeof(float)); return;
    case DType::float64: return load_all<Plain<double>>(from, values, count);
    default: refuse("widen", dtype);
  }
}

void narrow(DType dtype, const float* values, float divisor, std::byte* out, std::size_t count) {
  switch (dtype) {
    case DType::float16: return end<Half>(values, divisor, out, count);
    case DType::bfloat16: return end<BFloat>(values, divisor, out, count);
    case DType::float32: return end<Plain<float>>(values, divisor, out, count);
    case DType::float64: return end<Plain<double>>(values, divisor, out, count);
    default: refuse("narrow", dtype);
  }
}

bool supports(ReduceOp op, DType dtype) {
  return kernel_of(op, is_linear(op) ? parts_of(dtype, 0).dtype : dtype) != nullptr;
}

void reduce(ReduceOp op, DType dtype, const std::byte* a, const std::byte* b, std::byte* out, std::size_t count) {
  const Linear as = is_linear(op) ? parts_of(dtype, count) : Linear{dtype, count};
  const Kernel kernel = kernel_of(op, as.dtype);
  if (kernel == nullptr) refuse(name_of(op), dtype);
  kernel(a, b, out, as.count);
}

void finish(ReduceOp op, DType dtype, std::byte* data, std::size_t count, std::int32_t world) {
  if (!supports(op, dtype)) refuse(name_of(op), dtype);
  if (op != ReduceOp::avg) return;
  const Linear as = parts_of(dtype, count);
  switch (as.dtype) {
    case DType::uint8: return divide_integers<std::uint8_t>(data, as.count, world);
    case DType::int8: return divide_integers<std::int8_t>(data, as.count, world);
    case DType::uint16: return divide_integers<std::uint16_t>(data, as.count, world);
    case DType::int16: return divide_integers<std::int16_t>(data, as.count, world);
    case DType::uint32: return divide_integers<std::uint32_t>(data, as.count, world);
    case DType::int32: return divide_integers<std::int32_t>(data, as.count, world);
    case DType::uint64: return divide_integers<std::uint64_t>(data, as.count, world);
    case DType::int64: return divide_integers<std::int64_t>(data, as.count, world);
    case DType::float16: return divide_floats<Half>(data, as.count, world);
    case DType::bfloat16: return divide_floats<BFloat>(data, as.count, world);
    case DType::float32: return divide_floats<Plain<float>>(data, as.count, world);
    case DType::float64: return divide_floats<Plain<double>>(data, as.count, world);
    default: refuse(name_of(op), dtype);
  }
}

void scale(DType dtype, std::byte* data, std::size_t count, double factor) {
  const Linear as = parts_of(dtype, count);
  switch (as.dtype) {
    case DType::float16: return multiply<Half>(data, as.count, factor);
    case DType::bfloat16: return multiply<BFloat>(data, as.count, factor);
    case DType::float32: return multiply<Plain<float>>(data, as.count, factor);
    case DType::float64: return multiply<Plain<double>>(data, as.count, factor);
    default: refuse("premul_sum: scale", dtype);
  }
}

}  // namespace torch_iroh::collective
