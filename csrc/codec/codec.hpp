// Codecs of values on the wire: pure functions between float32 buffers and frames. A frame describes itself (version,
// codec, parameters, number of values) and carries a checksum, and its size follows from codec and count alone, so a
// receiver knows it before anything comes. Knows no transport and no group.
//
// Equal frames decode to equal bits everywhere; who must hold what others will decode keeps `decoded`, not its values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace torch_iroh::codec {

enum class Kind : std::uint8_t { none, bf16, fp8_e4m3, fp8_e5m2, int8, int4, sign, topk, topk_int8, topk_int4 };

enum class Rounding : std::uint8_t { nearest, stochastic };

// Equal on all ranks.
struct Codec {
  Kind kind = Kind::none;
  std::uint32_t block = 128;              // values that share a scale: 16 to 4096, a power of two
  bool wide_scale = false;                // scales in float32, else in bfloat16, rounded up
  double density = 0.01;                  // topk*: share of the values that is kept, above 0 and at most 1
  Rounding rounding = Rounding::nearest;  // int8 and int4, also of topk
  bool refuses_nonfinite = false;         // encode() throws where a value is NaN or infinite; else they stay visible

  bool operator==(const Codec&) const = default;
};

// "int8", "int8:block=64,scale=fp32", "topk-int8:density=0.001,rounding=stochastic,nonfinite=raise", "fp8" (e4m3).
// Throws Error(invalid) that lists the known names, or what a codec's parameters are.
Codec parse(std::string_view text);
std::string to_string(const Codec& codec);  // the shortest text that parse() reads as this codec

bool is_sparse(Kind kind);
// Of `count` values a sparse codec keeps exactly so many.
std::uint64_t kept(const Codec& codec, std::uint64_t count);

std::size_t frame_bytes(const Codec& codec, std::uint64_t count);

// What becomes of a value:
//   none, topk        itself
//   bf16              the nearest, as torch's cast: what is beyond the largest becomes infinite
//   fp8               the nearest times a power of two by block; infinite ones become NaN (fp8_e5m2: stay)
//   int8, int4        a multiple of the block's scale, at most half of it off (stochastic: less than all of it, and
//   right
//                     on average). In a block that holds a NaN or an infinity those stay; int8's other values are then
//                     fp8_e5m2, int4's become NaN
//   sign              its sign times the mean magnitude of the block; a block that holds NaN or infinity becomes NaN
//   topk*             0 if it is not kept; NaN counts as larger than infinity, of equal ones the first are kept
// No finite value becomes infinite but in bf16; within the last binade of float32 the error may be larger.
//
// `frame` has frame_bytes(). `decoded`, if not null, receives what decode() gives; it may be `values`. `seed` is for
// stochastic rounding: equal seeds give equal frames. Throws Error(invalid) for what refuses_nonfinite refuses.
void encode(const Codec& codec, std::span<const float> values, std::uint64_t seed, std::span<std::byte> frame,
            float* decoded = nullptr);

// Throw Error(protocol) where the frame is not one of `codec` and values.size(), or was changed on its way.
void decode(const Codec& codec, std::span<const std::byte> frame, std::span<float> values);
void add(const Codec& codec, std::span<const std::byte> frame, std::span<float> sums);  // sums += what decode() gives

}  // namespace torch_iroh::codec
