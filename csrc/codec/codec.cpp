// The entries of codec.hpp: what a frame is made of, which kernels fill it, and the sparse codecs on top of them.
//
// Body: dense codecs, the blocks of all values. Sparse codecs, the blocks of the kept values, then their positions.
#include "codec/codec.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "codec/frame.hpp"
#include "codec/kernels.hpp"
#include "codec/parameters.hpp"
#include "codec/positions.hpp"
#include "codec/selection.hpp"

namespace torch_iroh::codec {

namespace {

constexpr std::uint64_t kMostValues = std::uint64_t{1} << 48;
constexpr std::uint64_t kMostSparseValues = 0xffffffff;  // positions are 32 bits

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorKind::invalid, "codec: " + text);
}

void check_count(const Codec& codec, std::uint64_t count) {
  const std::uint64_t most = is_sparse(codec.kind) ? kMostSparseValues : kMostValues;
  if (count > most) {
    refuse(std::string(name_of(codec.kind)) + " takes at most " + std::to_string(most) + " values, not " +
           std::to_string(count));
  }
}

// How the values themselves, or those that a sparse codec keeps, are written.
Kind value_kind(Kind kind) {
  switch (kind) {
    case Kind::topk: return Kind::none;
    case Kind::topk_int8: return Kind::int8;
    case Kind::topk_int4: return Kind::int4;
    default: return kind;
  }
}

const Format& format_of(Kind kind) {
  const Kernels& all = kernels();
  switch (value_kind(kind)) {
    case Kind::bf16: return all.bfloat16;
    case Kind::fp8_e4m3: return all.e4m3;
    case Kind::fp8_e5m2: return all.e5m2;
    case Kind::int8: return all.int8;
    case Kind::int4: return all.int4;
    case Kind::sign: return all.sign;
    default: return all.float32;
  }
}

Blocks blocks_of(const Codec& codec, std::uint64_t seed) {
  constexpr std::size_t kWithoutScales = 2048;  // values that stay in the nearest cache
  return {.block = takes_block(codec.kind) ? codec.block : kWithoutScales,
          .wide_scale = codec.wide_scale,
          .stochastic = codec.rounding == Rounding::stochastic,
          .seed = seed};
}

// The sizes of the blocks in loops_floats.hpp and loops_integers.hpp.
std::uint64_t block_bytes(const Codec& codec, std::uint64_t count) {
  const std::uint64_t scale = codec.wide_scale ? 4 : 2;
  switch (value_kind(codec.kind)) {
    case Kind::none: return 4 * count;
    case Kind::bf16: return 2 * count;
    case Kind::fp8_e4m3:
    case Kind::fp8_e5m2: return 2 + count;
    case Kind::int8: return scale + 1 + count;
    case Kind::int4: return scale + 1 + (count + 1) / 2;
    default: return scale + (count + 7) / 8;
  }
}

std::uint64_t value_bytes(const Codec& codec, std::uint64_t count) {
  if (!takes_block(codec.kind)) return block_bytes(codec, count);
  const std::uint64_t whole = count / codec.block, rest = count % codec.block;
  return whole * block_bytes(codec, codec.block) + (rest == 0 ? 0 : block_bytes(codec, rest));
}

void refuse_nonfinite(std::span<const float> values) {
  const std::size_t bad = kernels().count_nonfinite(values.data(), values.size());
  if (bad == 0) return;
  const auto first = std::find_if(values.begin(), values.end(), [](float value) { return !std::isfinite(value); });
  refuse(std::to_string(bad) + " of " + std::to_string(values.size()) + " values are not finite, from index " +
         std::to_string(first - values.begin()) + " on");
}

// ---- sparse ----

void encode_sparse(const Codec& codec, std::span<const float> values, std::uint64_t seed, std::span<std::byte> body,
                   float* decoded) {
  const std::vector<std::uint32_t> positions = select_largest(values, kept(codec, values.size()));
  std::vector<float> large(positions.size());
  std::transform(positions.begin(), positions.end(), large.begin(), [&](std::uint32_t at) { return values[at]; });
  format_of(codec.kind)
      .encode(blocks_of(codec, seed), large.data(), large.size(), body.data(),
              decoded == nullptr ? nullptr : large.data());
  write_positions(positions, values.size(), body.subspan(value_bytes(codec, positions.size())));
  if (decoded == nullptr) return;
  std::fill_n(decoded, values.size(), 0.0f);
  for (std::size_t i = 0; i < positions.size(); ++i) decoded[positions[i]] = large[i];
}

struct Kept {
  std::vector<std::uint32_t> positions;
  std::vector<float> values;
};

Kept read_sparse(const Codec& codec, std::span<const std::byte> body, std::size_t count) {
  const std::size_t size = kept(codec, count);
  Kept found{std::vector<std::uint32_t>(size), std::vector<float>(size)};
  read_positions(body.subspan(value_bytes(codec, size)), count, found.positions);
  format_of(codec.kind).decode(blocks_of(codec, 0), body.data(), size, found.values.data());
  return found;
}

// The body of a frame that is whole.
std::span<const std::byte> body_of(const Codec& codec, std::span<const std::byte> frame, std::size_t count) {
  check_frame(codec, count, frame_bytes(codec, count), frame);
  return frame.subspan(kHeaderBytes);
}

}  // namespace

std::uint64_t kept(const Codec& codec, std::uint64_t count) {
  check(codec);
  if (!is_sparse(codec.kind)) return count;
  check_count(codec, count);
  if (count == 0) return 0;
  const double share = std::ceil(codec.density * static_cast<double>(count));
  return std::clamp<std::uint64_t>(static_cast<std::uint64_t>(share), 1, count);
}

std::size_t frame_bytes(const Codec& codec, std::uint64_t count) {
  check(codec);
  check_count(codec, count);
  if (!is_sparse(codec.kind)) return kHeaderBytes + value_bytes(codec, count);
  const std::uint64_t size = kept(codec, count);
  return kHeaderBytes + value_bytes(codec, size) + position_bytes(size, count);
}

void encode(const Codec& codec, std::span<const float> values, std::uint64_t seed, std::span<std::byte> frame,
            float* decoded) {
  const std::size_t bytes = frame_bytes(codec, values.size());
  if (frame.size() != bytes) {
    refuse(std::to_string(frame.size()) + " bytes for a frame of " + std::to_string(bytes));
  }
  if (codec.refuses_nonfinite) refuse_nonfinite(values);
  write_header(codec, values.size(), frame);
  const std::span<std::byte> body = frame.subspan(kHeaderBytes);
  if (!is_sparse(codec.kind)) {
    format_of(codec.kind).encode(blocks_of(codec, seed), values.data(), values.size(), body.data(), decoded);
  } else if (!values.empty()) {
    encode_sparse(codec, values, seed, body, decoded);
  }
  seal(frame);
}

void decode(const Codec& codec, std::span<const std::byte> frame, std::span<float> values) {
  const auto body = body_of(codec, frame, values.size());
  if (!is_sparse(codec.kind)) {
    return format_of(codec.kind).decode(blocks_of(codec, 0), body.data(), values.size(), values.data());
  }
  const Kept found = read_sparse(codec, body, values.size());
  std::fill(values.begin(), values.end(), 0.0f);
  for (std::size_t i = 0; i < found.positions.size(); ++i) values[found.positions[i]] = found.values[i];
}

void add(const Codec& codec, std::span<const std::byte> frame, std::span<float> sums) {
  const auto body = body_of(codec, frame, sums.size());
  if (!is_sparse(codec.kind)) {
    return format_of(codec.kind).add(blocks_of(codec, 0), body.data(), sums.size(), sums.data());
  }
  const Kept found = read_sparse(codec, body, sums.size());
  for (std::size_t i = 0; i < found.positions.size(); ++i) sums[found.positions[i]] += found.values[i];
}

}  // namespace torch_iroh::codec
