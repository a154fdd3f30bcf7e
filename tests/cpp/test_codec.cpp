// What codecs make of values: each against a plain loop that knows the format only from its description, at counts
// around the ends of blocks; NaN, infinity and both ends of float32; and equal bits from all compilations of the loops.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "codec/codec.hpp"
#include "codec/kernels.hpp"
#include "codec/parameters.hpp"
#include "support.hpp"

namespace {

using namespace torch_iroh;
using namespace torch_iroh::testing;
using namespace torch_iroh::codec;
using Bytes = std::vector<std::byte>;
using Values = std::vector<float>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();
const std::vector<std::size_t> kCounts = {0, 1, 2, 7, 127, 128, 129, 1000, 4099};

// Every name, and every parameter once.
const std::vector<std::string> kCodecs = {
    "none",
    "bf16",
    "fp8",
    "fp8:block=32",
    "fp8-e5m2",
    "int8",
    "int8:block=16",
    "int8:scale=fp32",
    "int8:block=4096,rounding=stochastic",
    "int4",
    "int4:block=16",
    "int4:rounding=stochastic,scale=fp32",
    "sign",
    "sign:block=16,scale=fp32",
    "topk",
    "topk:density=1",
    "topk:density=0.3",
    "topk-int8",
    "topk-int8:block=16,density=0.1,rounding=stochastic",
    "topk-int4:density=0.2",
};

Bytes encoded(const Codec& codec, const Values& values, std::uint64_t seed = 1, float* decoded = nullptr) {
  Bytes frame(frame_bytes(codec, values.size()), std::byte{0xa5});
  encode(codec, values, seed, frame, decoded);
  return frame;
}
Values decoded(const Codec& codec, const Bytes& frame, std::size_t count) {
  Values values(count, 77.0f);
  decode(codec, frame, values);
  return values;
}
Values round_trip(const std::string& codec, const Values& values) {
  return decoded(parse(codec), encoded(parse(codec), values), values.size());
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}
// Equal numbers, and NaN where NaN is wanted: its bits and the sign of zero are no promise.
std::size_t first_difference(std::span<const float> a, std::span<const float> b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])))) return i;
  }
  return a.size();
}

struct Sample {
  std::string name;
  Values values;
};
std::vector<Sample> samples(std::size_t count) {
  std::mt19937_64 random(count + 1);
  std::normal_distribution<float> normal;
  const auto fill = [&](const std::string& name, auto value) {
    Sample sample{name, Values(count)};
    for (std::size_t i = 0; i < count; ++i) sample.values[i] = value(i);
    return sample;
  };
  std::vector<Sample> all;
  all.push_back(fill("normal", [&](std::size_t) { return normal(random); }));
  all.push_back(fill("zeros", [](std::size_t i) { return i % 3 == 0 ? -0.0f : 0.0f; }));
  all.push_back(fill("equal", [](std::size_t) { return -3.25f; }));
  all.push_back(fill("positive", [&](std::size_t) { return 5 + std::abs(normal(random)); }));
  all.push_back(fill("tiny", [&](std::size_t) { return normal(random) * 0x1p-135f; }));
  all.push_back(fill("huge", [&](std::size_t i) { return i % 2 == 0 ? kLargest : -kLargest / (1 + float(i % 7)); }));
  all.push_back(fill("any bits", [&](std::size_t) {
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    return std::isfinite(value) ? value : 0.5f;
  }));
  all.push_back(fill("steps", [](std::size_t i) { return float(int(i % 511) - 255) * 0.5f; }));
  return all;
}

// ---- references ----

float bfloat_up(float value) {
  const auto bits = (std::bit_cast<std::uint32_t>(value) + 0xffff) & 0xffff0000;
  return std::bit_cast<float>(std::min<std::uint32_t>(bits, 0x7f7f0000));
}

Values reference_integers(const Codec& codec, std::span<const float> values, float top) {
  Values out;
  const float low = std::min(0.0f, *std::min_element(values.begin(), values.end()));
  const float high = std::max(0.0f, *std::max_element(values.begin(), values.end()));
  if (low == high) return Values(values.size(), 0.0f);
  float scale = high / top - low / top;
  if (codec.wide_scale) {
    scale = std::nextafter(std::nextafter(scale, kInf), kInf);
  } else {
    scale = bfloat_up(scale);
  }
  scale = std::max(scale, 0x1p-126f);
  const float zero = std::min(-std::nearbyint(low * (1 / scale)), top);
  for (const float value : values) {
    float steps = std::nearbyint(std::clamp(value * (1 / scale), -zero, top - zero));
    while (std::isinf(steps * scale)) steps -= std::copysign(1.0f, steps);
    out.push_back(steps * scale);
  }
  return out;
}

// The code nearest to the value, the even one of two: by looking at all.
Values reference_fp8(std::span<const float> values, int mantissa_bits, int bias, int codes, float most) {
  Values table;
  for (int code = 0; code < codes; ++code) {
    const int exponent = code >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
    const int whole = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
    table.push_back(std::ldexp(float(whole), std::max(exponent, 1) - bias - mantissa_bits));
  }
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::abs(value));
  int exponent = -126;
  while (std::ldexp(most, exponent) < largest) ++exponent;
  if (largest == 0) exponent = 0;
  Values out;
  for (const float value : values) {
    const double wanted = std::ldexp(double{std::min(std::abs(value), 0x1.cp127f)}, -exponent);
    std::size_t best = 0;
    for (std::size_t code = 1; code < table.size(); ++code) {
      const double better = std::abs(wanted - table[best]) - std::abs(wanted - table[code]);
      if (better > 0 || (better == 0 && code % 2 == 0)) best = code;
    }
    out.push_back(std::copysign(std::ldexp(table[best], exponent), value));
  }
  return out;
}

Values reference_sign(const Codec& codec, std::span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += std::abs(double{value});
  float mean = static_cast<float>(sum / static_cast<double>(values.size()));
  if (!codec.wide_scale) mean = bfloat_up(mean);
  if (sum != 0) mean = std::max(mean, 0x1p-126f);
  Values out;
  for (const float value : values) out.push_back(std::copysign(mean, value));
  return out;
}

Values reference_block(const Codec& codec, std::span<const float> values) {
  switch (codec.kind) {
    case Kind::fp8_e4m3: return reference_fp8(values, 3, 7, 0x7f, 448);
    case Kind::fp8_e5m2: return reference_fp8(values, 2, 15, 0x7c, 57344);
    case Kind::int8:
    case Kind::topk_int8: return reference_integers(codec, values, 255);
    case Kind::int4:
    case Kind::topk_int4: return reference_integers(codec, values, 15);
    case Kind::sign: return reference_sign(codec, values);
    case Kind::bf16: {
      Values out(values.begin(), values.end());
      for (float& value : out) {  // halfway is even: what lies between two bfloat16 goes to the nearer
        const auto bits = std::bit_cast<std::uint32_t>(value);
        const std::uint32_t rest = bits & 0xffff, lower = bits & 0xffff0000;
        const bool up = rest > 0x8000 || (rest == 0x8000 && (lower & 0x10000) != 0);
        value = std::bit_cast<float>(up ? lower + 0x10000 : lower);
      }
      return out;
    }
    default: return {values.begin(), values.end()};
  }
}

Values reference(const Codec& codec, const Values& values) {
  if (is_sparse(codec.kind)) {
    std::vector<std::size_t> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return std::abs(values[a]) > std::abs(values[b]); });
    order.resize(kept(codec, values.size()));
    std::sort(order.begin(), order.end());
    Values large, out(values.size(), 0.0f);
    for (const std::size_t at : order) large.push_back(values[at]);
    Codec dense = codec;
    dense.kind = codec.kind == Kind::topk_int8 ? Kind::int8 : codec.kind == Kind::topk_int4 ? Kind::int4 : Kind::none;
    large = reference(dense, large);
    for (std::size_t i = 0; i < order.size(); ++i) out[order[i]] = large[i];
    return out;
  }
  Values out;
  for (std::size_t at = 0; at < values.size(); at += codec.block) {
    const std::size_t size = std::min<std::size_t>(codec.block, values.size() - at);
    const Values block = reference_block(codec, std::span(values).subspan(at, size));
    out.insert(out.end(), block.begin(), block.end());
  }
  return out;
}

}  // namespace

TEST_CASE("codec: every codec gives what a plain loop gives") {
  for (const std::string& text : kCodecs) {
    const Codec codec = parse(text);
    if (codec.rounding == Rounding::stochastic) continue;
    for (const std::size_t count : kCounts) {
      for (const auto& [name, values] : samples(count)) {
        const Values found = decoded(codec, encoded(codec, values), count), wanted = reference(codec, values);
        std::size_t at = first_difference(found, wanted);
        // A mean depends on the order of its sum.
        if (codec.kind == Kind::sign && at < count) {
          at = 0;
          while (at < count && std::abs(found[at] - wanted[at]) <= 0.008f * std::abs(wanted[at])) ++at;
        }
        if (at < count) {
          FAIL_CHECK(text << ", " << name << ", " << count << " values: " << values[at] << " at " << at << " became "
                          << found[at] << ", wanted " << wanted[at]);
        }
      }
    }
  }
}

TEST_CASE("codec: stochastic rounding moves no value by a step and keeps what needs no rounding") {
  for (const std::string text : {"int8:rounding=stochastic", "int4:rounding=stochastic,block=32"}) {
    const Codec codec = parse(text);
    const float top = codec.kind == Kind::int8 ? 254 : 14;
    for (const std::size_t count : kCounts) {
      const Values values = samples(count)[0].values, found = round_trip(text, values);
      for (std::size_t at = 0; at < count; at += codec.block) {
        const auto block = std::span(values).subspan(at, std::min<std::size_t>(codec.block, count - at));
        const float low = std::min(0.0f, *std::min_element(block.begin(), block.end()));
        const float high = std::max(0.0f, *std::max_element(block.begin(), block.end()));
        const float scale = bfloat_up(high / top - low / top);
        for (std::size_t i = 0; i < block.size(); ++i) CHECK(std::abs(block[i] - found[at + i]) < scale * 1.0001f);
      }
    }
  }
  Values steps(128);
  for (std::size_t i = 0; i < steps.size(); ++i) steps[i] = float(i % 127) * (i % 2 == 0 ? 0.25f : -0.25f);
  steps[0] = 31.75f;  // 127 steps of 0.25 to either side
  steps[1] = -31.75f;
  CHECK(first_difference(round_trip("int8:rounding=stochastic", steps), steps) == steps.size());
}

TEST_CASE("codec: `decoded` is what decode gives, also in place; add adds just that; equal seeds give equal frames") {
  for (const std::string& text : kCodecs) {
    const Codec codec = parse(text);
    for (const std::size_t count : kCounts) {
      for (auto& [name, values] : samples(count)) {
        CAPTURE(text);
        CAPTURE(count);
        CAPTURE(name);
        Values told(count, 1.0f);
        const Bytes frame = encoded(codec, values, 9, told.data());
        const Values wanted = decoded(codec, frame, count);
        CHECK(same_bits(told, wanted));
        CHECK(encoded(codec, values, 9) == frame);
        Values sums(count), by_hand(count);
        for (std::size_t i = 0; i < count; ++i) sums[i] = std::sin(float(i) + 1);
        for (std::size_t i = 0; i < count; ++i) by_hand[i] = sums[i] + wanted[i];
        add(codec, frame, sums);
        CHECK(same_bits(sums, by_hand));
        if (codec.rounding == Rounding::stochastic && count >= 127 && name == "normal") {
          CHECK(encoded(codec, values, 10) != frame);
        }
        CHECK(encoded(codec, values, 9, values.data()) == frame);
        CHECK(same_bits(values, wanted));
      }
    }
  }
}

TEST_CASE("codec: all compilations of the loops give equal bits") {
  const Level best = limit_kernels(Level::avx512);
  for (const std::string& text : kCodecs) {
    const Codec codec = parse(text);
    for (const std::size_t count : {std::size_t{129}, std::size_t{4099}, std::size_t{30'000}}) {
      for (auto& [name, values] : samples(count)) {
        for (const bool finite : {true, false}) {
          if (!finite) values[count / 2] = kNaN, values[count / 3] = -kInf;
          limit_kernels(Level::baseline);
          Values told(count), sums(count, 0.7f);
          const Bytes frame = encoded(codec, values, 3, told.data());
          add(codec, frame, sums);
          for (const Level level : {Level::avx2, Level::avx512}) {
            if (limit_kernels(level) != level) continue;
            CAPTURE(text);
            CAPTURE(name);
            Values told_here(count), sums_here(count, 0.7f);
            CHECK(encoded(codec, values, 3, told_here.data()) == frame);
            add(codec, frame, sums_here);
            CHECK(same_bits(told_here, told));
            CHECK(same_bits(sums_here, sums));
          }
        }
      }
    }
  }
  CHECK(limit_kernels(Level::avx512) == best);
}

TEST_CASE("codec: NaN and infinity stay what they are, and spoil no more than their block") {
  Values values(384);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.001f * (1 + float(i % 50));
  values[130] = kNaN;
  values[140] = kInf;
  values[150] = -kInf;
  const auto outside = [&](std::size_t i) { return i < 128 || i >= 256; };
  for (const std::string text : {"none", "bf16", "fp8", "fp8-e5m2", "int8", "int8:scale=fp32", "int4", "sign"}) {
    CAPTURE(text);
    const Values found = round_trip(text, values);
    CHECK(std::isnan(found[130]));
    const bool infinite = text != "fp8" && text != "sign";
    CHECK((infinite ? found[140] == kInf : std::isnan(found[140])));
    CHECK((infinite ? found[150] == -kInf : std::isnan(found[150])));
    for (std::size_t i = 0; i < values.size(); ++i) {
      CAPTURE(i);
      if (outside(i)) {
        CHECK(std::isfinite(found[i]));
      } else if (!std::isfinite(values[i])) {
        continue;
      } else if (text == "int4" || text == "sign") {
        CHECK(std::isnan(found[i]));
      } else {
        CHECK(std::abs(found[i] - values[i]) <= 0.126f * values[i]);  // two bits of mantissa
      }
    }
  }
  for (const float beside : {kLargest, -kLargest, 0x1.ep127f, 0x1p-140f, 0.0f, -1e-30f}) {  // int8: beside a NaN
    Values block(128, beside);
    block[5] = kNaN;
    const Values found = round_trip("int8", block);
    CHECK(std::abs(found[0] / 2 - beside / 2) <= std::abs(beside) / 16 + 0x1p-144f);
  }
  CHECK(std::isnan(round_trip("int8", Values(128, kNaN))[100]));
}

TEST_CASE("codec: of finite values none becomes infinite, but for bf16's rounding") {
  for (const std::string& text : kCodecs) {
    if (text == "bf16") continue;
    for (const float least : {kLargest, 0x1.fcp127f, 0x1.cp127f, 0x1p127f}) {
      Values values(128, least);
      for (std::size_t i = 0; i < values.size(); i += 3) values[i] = -least;
      for (const float value : round_trip(text, values)) {
        if (!std::isfinite(value)) FAIL_CHECK(text << ": " << least);
      }
    }
  }
  CHECK(std::isinf(round_trip("bf16", {kLargest})[0]));  // as torch's cast does
}

TEST_CASE("codec: a sparse codec keeps NaN before infinity before the largest, and the first of equals") {
  Values values(1000, 1.0f);
  for (const std::size_t at : {3, 500, 999}) values[at] = kLargest;
  values[700] = -kInf;
  values[800] = -kNaN;
  values[801] = std::bit_cast<float>(0x7fffffffu);  // a NaN of more bits is no larger
  const auto kept_by = [&](const std::string& density) {
    std::vector<std::size_t> found;
    const Values out = round_trip("topk:density=" + density, values);
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (out[i] != 0) found.push_back(i);
    }
    return found;
  };
  CHECK(kept_by("0.001") == std::vector<std::size_t>{800});
  CHECK(kept_by("0.002") == std::vector<std::size_t>{800, 801});
  CHECK(kept_by("0.003") == std::vector<std::size_t>{700, 800, 801});
  CHECK(kept_by("0.004") == std::vector<std::size_t>{3, 700, 800, 801});
  CHECK(kept_by("0.008") == std::vector<std::size_t>{0, 1, 3, 500, 700, 800, 801, 999});
}

TEST_CASE("codec: the selection is exact for values of which a sample tells nothing") {
  constexpr std::size_t kCount = 70'000;
  std::mt19937_64 random(4);
  const Codec codec = parse("topk");
  const auto check = [&](const char* name, auto value) {
    Values values(kCount);
    for (std::size_t i = 0; i < kCount; ++i) values[i] = value(i);
    const std::size_t at = first_difference(decoded(codec, encoded(codec, values), kCount), reference(codec, values));
    CHECK_MESSAGE(at == kCount, name << " at " << at);
  };
  check("mostly zero", [&](std::size_t) { return random() % 200 == 0 ? float(random() % 9) : 0.0f; });
  check("all equal", [](std::size_t) { return 2.0f; });
  check("two values", [&](std::size_t) { return random() % 100 < 1 ? 2.0f : 1.0f; });
  check("large ones at the end", [](std::size_t i) { return i < 69'900 ? 1e-3f : float(i); });
  check("large ones at the start", [](std::size_t i) { return i < 5'000 ? 1e3f + float(i % 97) : float(i) * 1e-9f; });
  check("rising", [](std::size_t i) { return float(i); });
  check("falling", [](std::size_t i) { return -float(kCount - i); });
  check("normal", [&, normal = std::normal_distribution<float>()](std::size_t) mutable { return normal(random); });
}

TEST_CASE("codec: nonfinite=raise says how many and from where, and leaves what it was given") {
  for (const char* name : {"none", "bf16", "int8", "topk"}) {
    const Codec codec = parse(std::string(name) + ":nonfinite=raise");
    Values values(300, 1.0f);
    encoded(codec, values);
    values[17] = -kInf;
    values[200] = kNaN;
    const Values before = values;
    try {
      encoded(codec, values, 0, values.data());
      FAIL_CHECK("accepted by " << name);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::invalid);
      CHECK(contains(error.what(), "2 of 300 values are not finite, from index 17 on"));
    }
    CHECK(same_bits(values, before));
  }
}
