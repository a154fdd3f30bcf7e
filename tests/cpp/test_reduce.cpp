// The reduction kernels against references that share no code with them: wider integers, double and long double, and
// 16-bit floats rounded by searching for the nearest value.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "collective/reduce.hpp"
#include "support.hpp"

namespace {

using namespace torch_iroh;
using namespace torch_iroh::collective;
using Bytes = std::vector<std::byte>;

const std::vector<ReduceOp> kOps = {ReduceOp::sum, ReduceOp::avg,  ReduceOp::product,
                                    ReduceOp::min, ReduceOp::max,  ReduceOp::band,
                                    ReduceOp::bor, ReduceOp::bxor, ReduceOp::premul_sum};
const std::vector<DType> kDTypes = {DType::boolean, DType::uint8,     DType::int8,       DType::uint16,
                                    DType::int16,   DType::uint32,    DType::int32,      DType::uint64,
                                    DType::int64,   DType::float16,   DType::bfloat16,   DType::float32,
                                    DType::float64, DType::complex64, DType::complex128, DType::float8};

bool is_float(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32 || dtype == DType::float64;
}
bool is_complex(DType dtype) {
  return dtype == DType::complex64 || dtype == DType::complex128;
}
bool is_linear(ReduceOp op) {
  return op == ReduceOp::sum || op == ReduceOp::avg || op == ReduceOp::premul_sum;
}

template <class T>
T at(const std::byte* data, std::size_t index) {
  T value;
  std::memcpy(&value, data + index * sizeof(T), sizeof(T));
  return value;
}

// ---- 16-bit floats, by definition ----

struct Format {
  int exponent_bits;
  int fraction_bits;
  std::uint16_t infinity() const { return static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << fraction_bits); }
};
constexpr Format kHalf{5, 10};
constexpr Format kBFloat{8, 7};
Format format_of(DType dtype) {
  return dtype == DType::float16 ? kHalf : kBFloat;
}

double value_of(Format format, std::uint16_t bits) {
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  const int rest = bits & 0x7fff;
  if (rest > format.infinity()) return std::numeric_limits<double>::quiet_NaN();
  if (rest == format.infinity()) return sign * std::numeric_limits<double>::infinity();
  const int exponent = rest >> format.fraction_bits;
  const int fraction = rest & ((1 << format.fraction_bits) - 1);
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const int whole = exponent == 0 ? fraction : fraction + (1 << format.fraction_bits);
  return sign * std::ldexp(whole, std::max(exponent, 1) - bias - format.fraction_bits);
}

// The nearest value, ties to even; infinity counts as the next power of two.
std::uint16_t nearest(Format format, float value) {
  if (std::isnan(value)) return 0x7fff;
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::fabs(static_cast<double>(value));
  int low = 0, high = format.infinity();  // value_of(low) <= size; positive bit patterns are in order of value
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (value_of(format, static_cast<std::uint16_t>(middle)) <= size ? low : high) = middle;
  }
  const double below = value_of(format, static_cast<std::uint16_t>(low));
  const double above = high == format.infinity() ? std::ldexp(1.0, 1 << (format.exponent_bits - 1))
                                                 : value_of(format, static_cast<std::uint16_t>(high));
  const bool up = size - below > above - size || (size - below == above - size && low % 2 == 1);
  return static_cast<std::uint16_t>(sign | (up ? high : low));
}

bool same_half(Format format, std::uint16_t got, std::uint16_t wanted) {
  const bool nan = (wanted & 0x7fff) > format.infinity();
  return nan ? (got & 0x7fff) > format.infinity() : got == wanted;
}

// ---- one element against its reference ----

template <class T>
bool integer_right(ReduceOp op, T a, T b, T got) {
  const auto x = static_cast<std::uint64_t>(a);
  const auto y = static_cast<std::uint64_t>(b);
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg: return got == static_cast<T>(x + y);
    case ReduceOp::product: return got == static_cast<T>(x * y);
    case ReduceOp::min: return got == std::min(a, b);
    case ReduceOp::max: return got == std::max(a, b);
    case ReduceOp::band: return got == static_cast<T>(x & y);
    case ReduceOp::bor: return got == static_cast<T>(x | y);
    case ReduceOp::bxor: return got == static_cast<T>(x ^ y);
    default: return false;
  }
}

bool boolean_right(ReduceOp op, std::uint8_t a, std::uint8_t b, std::uint8_t got) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::max:
    case ReduceOp::bor: return got == (a || b ? 1 : 0);
    case ReduceOp::bxor: return got == (!a != !b ? 1 : 0);
    default: return got == (a && b ? 1 : 0);
  }
}

// Wide holds every sum and product of two T exactly enough that rounding twice does no harm (float in double), or is T
// itself (double).
template <class Wide>
Wide float_reference(ReduceOp op, Wide a, Wide b) {
  if (is_linear(op)) return a + b;
  if (op == ReduceOp::product) return a * b;
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<Wide>::quiet_NaN();
  return op == ReduceOp::min ? std::fmin(a, b) : std::fmax(a, b);
}
template <class T>
bool same_float(T got, T wanted) {
  return std::isnan(wanted) ? std::isnan(got) : got == wanted;
}

template <class T>
bool complex_right(ReduceOp op, std::complex<T> a, std::complex<T> b, std::complex<T> got) {
  if (is_linear(op)) return same_float(got.real(), a.real() + b.real()) && same_float(got.imag(), a.imag() + b.imag());
  const auto part = [](T x1, T y1, T x2, T y2, T found, long double sign) {  // x1 y1 + sign x2 y2
    const long double first = static_cast<long double>(x1) * y1, second = sign * x2 * y2;
    const long double bound = 4 * static_cast<long double>(std::numeric_limits<T>::epsilon());
    if (!std::isfinite(found)) {  // an overflow on the way, or a special operand
      const long double largest = std::numeric_limits<T>::max();
      return !(std::fabs(first) < largest / 2 && std::fabs(second) < largest / 2);
    }
    return std::fabs(found - (first + second)) <=
           bound * (std::fabs(first) + std::fabs(second)) + 2 * std::numeric_limits<T>::denorm_min();
  };
  return part(a.real(), b.real(), a.imag(), b.imag(), got.real(), -1) &&
         part(a.real(), b.imag(), a.imag(), b.real(), got.imag(), 1);
}

bool element_right(ReduceOp op, DType dtype, const std::byte* a, const std::byte* b, const std::byte* got,
                   std::size_t i) {
  const auto integers = [&]<class T>(T) { return integer_right(op, at<T>(a, i), at<T>(b, i), at<T>(got, i)); };
  switch (dtype) {
    case DType::boolean:
      return boolean_right(op, at<std::uint8_t>(a, i), at<std::uint8_t>(b, i), at<std::uint8_t>(got, i));
    case DType::uint8: return integers(std::uint8_t{});
    case DType::int8: return integers(std::int8_t{});
    case DType::uint16: return integers(std::uint16_t{});
    case DType::int16: return integers(std::int16_t{});
    case DType::uint32: return integers(std::uint32_t{});
    case DType::int32: return integers(std::int32_t{});
    case DType::uint64: return integers(std::uint64_t{});
    case DType::int64: return integers(std::int64_t{});
    case DType::float16:
    case DType::bfloat16: {
      const Format format = format_of(dtype);
      const auto found = at<std::uint16_t>(got, i);
      const double x = value_of(format, at<std::uint16_t>(a, i)), y = value_of(format, at<std::uint16_t>(b, i));
      const auto wanted = static_cast<float>(float_reference(op, x, y));
      if (wanted == 0 && !is_linear(op) && op != ReduceOp::product) return value_of(format, found) == 0;  // either zero
      return same_half(format, found, nearest(format, wanted));
    }
    case DType::float32:
      return same_float(at<float>(got, i),
                        static_cast<float>(float_reference<double>(op, at<float>(a, i), at<float>(b, i))));
    case DType::float64: return same_float(at<double>(got, i), float_reference(op, at<double>(a, i), at<double>(b, i)));
    case DType::complex64:
      return complex_right(op, at<std::complex<float>>(a, i), at<std::complex<float>>(b, i),
                           at<std::complex<float>>(got, i));
    case DType::complex128:
      return complex_right(op, at<std::complex<double>>(a, i), at<std::complex<double>>(b, i),
                           at<std::complex<double>>(got, i));
    default: return false;
  }
}

// ---- data ----

template <class T>
void put_numbers(std::byte* data, std::size_t count, std::mt19937_64& random) {
  using Limits = std::numeric_limits<T>;
  const T special[] = {T(0),
                       T(-0.0),
                       T(1),
                       T(-1),
                       Limits::max(),
                       Limits::lowest(),
                       Limits::min(),
                       Limits::denorm_min(),
                       Limits::infinity(),
                       -Limits::infinity(),
                       Limits::quiet_NaN(),
                       Limits::epsilon()};
  std::uniform_real_distribution<double> near(-2, 2);
  for (std::size_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, data + i * sizeof(T), sizeof(T));
    const auto dice = random() % 8;
    if (dice < 5) value = static_cast<T>(near(random));
    if (dice == 5) value = special[random() % std::size(special)];
    std::memcpy(data + i * sizeof(T), &value, sizeof(T));
  }
}

// Random bits, which are all there is to integers and 16-bit floats; wider floats also get near and special values.
void fill(DType dtype, std::byte* data, std::size_t count, std::mt19937_64& random) {
  const std::size_t bytes = count * size_of(dtype);
  for (std::size_t i = 0; i < bytes; i += 8) {
    const std::uint64_t bits = random();
    std::memcpy(data + i, &bits, std::min<std::size_t>(8, bytes - i));
  }
  for (std::size_t i = 0; i < count; ++i) {  // extremes of integers, zeros, infinities of 16-bit floats
    const std::size_t size = size_of(dtype);
    if (random() % 8 != 0) continue;
    const std::uint64_t special[] = {0,
                                     1,
                                     ~0ull,
                                     1ull << (8 * std::min<std::size_t>(size, 8) - 1),
                                     (1ull << (8 * std::min<std::size_t>(size, 8) - 1)) - 1,
                                     0x7c00,
                                     0xff80};
    const std::uint64_t bits = special[random() % std::size(special)];
    std::memcpy(data + i * size, &bits, std::min<std::size_t>(size, 8));
  }
  if (dtype == DType::float32) put_numbers<float>(data, count, random);
  if (dtype == DType::float64) put_numbers<double>(data, count, random);
  if (dtype == DType::complex64) put_numbers<float>(data, 2 * count, random);
  if (dtype == DType::complex128) put_numbers<double>(data, 2 * count, random);
}

enum class Alias { none, out_is_a, out_is_b, all_one };

// One reduction with every pointer `shift` bytes off alignment; nothing outside `out` may change.
void expect_right(ReduceOp op, DType dtype, std::size_t count, std::size_t shift, Alias alias) {
  const std::uint64_t seed = count * 31 + shift;
  std::mt19937_64 random(seed);
  const std::size_t bytes = count * size_of(dtype);
  Bytes a(bytes + shift + 16, std::byte{0xa5}), b = a, out = a;
  fill(dtype, a.data() + shift, count, random);
  fill(dtype, b.data() + shift, count, random);
  if (alias == Alias::all_one) b = a;
  if (alias == Alias::out_is_a || alias == Alias::all_one) out = a;
  if (alias == Alias::out_is_b) out = b;
  const std::byte* left = alias == Alias::out_is_a || alias == Alias::all_one ? out.data() : a.data();
  const std::byte* right = alias == Alias::out_is_b || alias == Alias::all_one ? out.data() : b.data();
  reduce(op, dtype, left + shift, right + shift, out.data() + shift, count);

  INFO(name_of(op), " ", name_of(dtype), " count ", count, " shift ", shift, " alias ", static_cast<int>(alias));
  std::size_t wrong = count;
  for (std::size_t i = 0; i < count && wrong == count; ++i)
    if (!element_right(op, dtype, a.data() + shift, b.data() + shift, out.data() + shift, i)) wrong = i;
  CHECK_MESSAGE(wrong == count, "first wrong element");
  bool untouched = true;
  for (std::size_t i = 0; i < 16; ++i) untouched &= out[bytes + shift + i] == std::byte{0xa5};
  for (std::size_t i = 0; i < shift; ++i) untouched &= out[i] == std::byte{0xa5};
  CHECK_MESSAGE(untouched, "wrote outside its range");
}

}  // namespace

TEST_CASE("every op and dtype equals its reference, in place or not, aligned or not") {
  for (const ReduceOp op : kOps) {
    for (const DType dtype : kDTypes) {
      if (!supports(op, dtype)) continue;
      for (const std::size_t count : {0, 1, 3, 17, 1000})
        for (const std::size_t shift : {0, 1, 3, 48})
          for (const Alias alias : {Alias::none, Alias::out_is_a, Alias::out_is_b, Alias::all_one})
            expect_right(op, dtype, count, shift, alias);
    }
  }
}

TEST_CASE("every op and dtype equals its reference on a million odd elements") {
  // Sanitizers watch memory, and every branch of a kernel is taken within a few thousand elements.
  const std::size_t count = testing::kSanitized ? 10'003 : 1'000'003;
  for (const ReduceOp op : kOps)
    for (const DType dtype : kDTypes)
      if (supports(op, dtype)) expect_right(op, dtype, count, 1, Alias::out_is_a);
}

TEST_CASE("the supported pairs are those with a meaning") {
  for (const ReduceOp op : kOps) {
    const bool bitwise = op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
    const bool ordered = op == ReduceOp::min || op == ReduceOp::max;
    for (const DType dtype : kDTypes) {
      bool wanted = true;
      if (dtype == DType::float8)
        wanted = false;
      else if (dtype == DType::boolean)
        wanted = op != ReduceOp::avg && op != ReduceOp::premul_sum;
      else if (is_complex(dtype))
        wanted = !bitwise && !ordered;
      else if (is_float(dtype))
        wanted = !bitwise;
      else
        wanted = op != ReduceOp::premul_sum;
      INFO(name_of(op), " ", name_of(dtype));
      CHECK(supports(op, dtype) == wanted);
      std::byte element[16] = {};
      if (wanted) {
        CHECK_NOTHROW(reduce(op, dtype, element, element, element, 1));
        CHECK_NOTHROW(finish(op, dtype, element, 1, 3));
      } else {
        const std::string message = std::string(name_of(op)) + " is not defined for " + std::string(name_of(dtype));
        CHECK_THROWS_WITH_AS(reduce(op, dtype, element, element, element, 1), message.c_str(), std::invalid_argument);
        CHECK_THROWS_AS(finish(op, dtype, element, 1, 3), std::invalid_argument);
      }
    }
  }
}

TEST_CASE("all 16-bit floats survive widening and narrowing bit by bit") {
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    const Format format = format_of(dtype);
    std::vector<std::uint16_t> all(65536), zero(65536, 0x8000), one(65536, nearest(format, 1)), out(65536);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
    const auto bytes = [](std::vector<std::uint16_t>& v) { return reinterpret_cast<std::byte*>(v.data()); };
    std::size_t wrong = 0;
    reduce(ReduceOp::sum, dtype, bytes(all), bytes(zero), bytes(out), all.size());  // x + -0 is x, also for x = -0
    for (std::size_t i = 0; i < all.size(); ++i) wrong += !same_half(format, out[i], all[i]);
    reduce(ReduceOp::product, dtype, bytes(all), bytes(one), bytes(out), all.size());
    for (std::size_t i = 0; i < all.size(); ++i) wrong += !same_half(format, out[i], all[i]);
    reduce(ReduceOp::max, dtype, bytes(all), bytes(all), bytes(out), all.size());
    for (std::size_t i = 0; i < all.size(); ++i) wrong += !same_half(format, out[i], all[i]);
    CHECK_MESSAGE(wrong == 0, name_of(dtype));
  }
}

TEST_CASE("all 16-bit floats times and over many numbers round to nearest even") {
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    const Format format = format_of(dtype);
    // Halving and 1 + 2^-k land on ties, small and large factors on subnormals and infinity. Rounding is a matter of
    // values, which the plain build proves on all of them; sanitizers take every 31st.
    const std::size_t stride = testing::kSanitized ? 31 : 1;
    for (const double factor : {0.5, 0.25, 1.5, 1.0 / 3, 1.00048828125, 1.00390625, 3e-5, 1e-38, 700.0, 3e38, -0.1}) {
      std::size_t wrong = 0;
      std::vector<std::uint16_t> data(65536);
      for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::uint16_t>(i);
      scale(dtype, reinterpret_cast<std::byte*>(data.data()), data.size(), factor);
      for (std::size_t i = 0; i < data.size(); i += stride) {
        const double exact = value_of(format, static_cast<std::uint16_t>(i)) * static_cast<float>(factor);
        wrong += !same_half(format, data[i], nearest(format, static_cast<float>(exact)));
      }
      CHECK_MESSAGE(wrong == 0, name_of(dtype), " times ", factor);
    }
    for (const std::int32_t world : {1, 2, 3, 7, 1000}) {
      std::size_t wrong = 0;
      std::vector<std::uint16_t> data(65536);
      for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::uint16_t>(i);
      finish(ReduceOp::avg, dtype, reinterpret_cast<std::byte*>(data.data()), data.size(), world);
      for (std::size_t i = 0; i < data.size(); i += stride) {
        const double quotient = value_of(format, static_cast<std::uint16_t>(i)) / world;
        wrong += !same_half(format, data[i], nearest(format, static_cast<float>(quotient)));
      }
      CHECK_MESSAGE(wrong == 0, name_of(dtype), " over ", world);
    }
  }
}

namespace {

// Division towards zero by way of magnitudes.
template <class T>
T truncated(T x, std::int32_t world) {
  const bool negative = std::is_signed_v<T> && x < T(0);
  const std::uint64_t size = negative ? 0 - static_cast<std::uint64_t>(x) : static_cast<std::uint64_t>(x);
  const std::uint64_t quotient = size / static_cast<std::uint64_t>(world);
  return static_cast<T>(negative ? 0 - quotient : quotient);
}

template <class T>
void expect_average(DType dtype) {
  std::mt19937_64 random(5);
  for (const std::int32_t world : {1, 2, 3, 7, 300, std::numeric_limits<std::int32_t>::max()}) {
    for (const std::size_t count : {0, 1, 3, 17, 10'003}) {
      Bytes data(count * sizeof(T) + 1);
      fill(dtype, data.data() + 1, count, random);
      const Bytes before = data;
      finish(ReduceOp::avg, dtype, data.data() + 1, count, world);
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < count; ++i) {
        const T x = at<T>(before.data() + 1, i), got = at<T>(data.data() + 1, i);
        if constexpr (std::is_integral_v<T>)
          wrong += got != truncated(x, world);
        else if constexpr (sizeof(T) == 4)  // double divides floats exactly enough
          wrong += !same_float(got, static_cast<T>(static_cast<double>(x) / static_cast<T>(world)));
        else
          wrong += !same_float(got, x / world);
      }
      CHECK_MESSAGE(wrong == 0, name_of(dtype), " world ", world, " count ", count);
    }
  }
}

template <class T>
void expect_scaled(DType dtype, std::size_t parts) {
  std::mt19937_64 random(6);
  for (const double factor : {0.0, 1.0, -0.3, 1e-3, 12345.678}) {
    for (const std::size_t count : {0, 1, 3, 17, 10'003}) {
      Bytes data(count * parts * sizeof(T) + 1);
      fill(dtype, data.data() + 1, count, random);
      const Bytes before = data;
      scale(dtype, data.data() + 1, count, factor);
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < count * parts; ++i)
        wrong += !same_float(at<T>(data.data() + 1, i), at<T>(before.data() + 1, i) * static_cast<T>(factor));
      CHECK_MESSAGE(wrong == 0, name_of(dtype), " times ", factor, " count ", count);
    }
  }
}

}  // namespace

TEST_CASE("avg divides by the world, integers towards zero") {
  expect_average<std::uint8_t>(DType::uint8);
  expect_average<std::int8_t>(DType::int8);
  expect_average<std::uint16_t>(DType::uint16);
  expect_average<std::int16_t>(DType::int16);
  expect_average<std::uint32_t>(DType::uint32);
  expect_average<std::int32_t>(DType::int32);
  expect_average<std::uint64_t>(DType::uint64);
  expect_average<std::int64_t>(DType::int64);
  expect_average<float>(DType::float32);
  expect_average<double>(DType::float64);
  std::complex<float> number{7, -5};
  finish(ReduceOp::avg, DType::complex64, reinterpret_cast<std::byte*>(&number), 1, 2);
  CHECK(number == std::complex<float>{3.5f, -2.5f});
  std::complex<double> wide{7, -5};
  finish(ReduceOp::avg, DType::complex128, reinterpret_cast<std::byte*>(&wide), 1, 2);
  CHECK(wide == std::complex<double>{3.5, -2.5});
}

TEST_CASE("finish leaves every op but avg alone") {
  for (const ReduceOp op : kOps) {
    for (const DType dtype : kDTypes) {
      if (op == ReduceOp::avg || !supports(op, dtype)) continue;
      std::mt19937_64 random(9);
      Bytes data(17 * size_of(dtype));
      fill(dtype, data.data(), 17, random);
      const Bytes before = data;
      finish(op, dtype, data.data(), 17, 3);
      CHECK_MESSAGE(data == before, name_of(op), " ", name_of(dtype));
    }
  }
}

TEST_CASE("scale multiplies floats and complex numbers and refuses the rest") {
  expect_scaled<float>(DType::float32, 1);
  expect_scaled<double>(DType::float64, 1);
  expect_scaled<float>(DType::complex64, 2);
  expect_scaled<double>(DType::complex128, 2);
  std::byte element[16] = {};
  for (const DType dtype : kDTypes) {
    INFO(name_of(dtype));
    if (is_float(dtype) || is_complex(dtype))
      CHECK_NOTHROW(scale(dtype, element, 1, 2.0));
    else
      CHECK_THROWS_AS(scale(dtype, element, 1, 2.0), std::invalid_argument);
  }
}
