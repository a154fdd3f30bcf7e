// The loops over values, compiled for several instruction sets. All sets give equal bits: sums keep their order, and no
// multiplication is fused with an addition. Knows no frame header and no checksum.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_iroh::codec {

struct Blocks {
  std::size_t block;        // at most kMostBlock
  bool wide_scale = false;  // float32 scales, else bfloat16
  bool stochastic = false;
  std::uint64_t seed = 0;
};

inline constexpr std::size_t kLeastBlock = 16;
inline constexpr std::size_t kMostBlock = 4096;

// How many bytes the blocks of `count` values take: the caller's to know (body_bytes()), the loops' to fill.
struct Format {
  // `decoded`, if not null, receives what `decode` gives; it may be `values`.
  void (*encode)(const Blocks& blocks, const float* values, std::size_t count, std::byte* out, float* decoded);
  void (*decode)(const Blocks& blocks, const std::byte* in, std::size_t count, float* values);
  void (*add)(const Blocks& blocks, const std::byte* in, std::size_t count, float* sums);
};

struct Kernels {
  Format float32, bfloat16, e4m3, e5m2, int8, int4, sign;
  // Values that are NaN or infinite.
  std::size_t (*count_nonfinite)(const float* values, std::size_t count);
  // Writes the indices of all values with magnitude() >= `least` in order and returns how many; stops and returns
  // `room` + 1 as soon as there might be more than `room`.
  std::size_t (*find_large)(const float* values, std::size_t count, std::int32_t least, std::uint32_t* found,
                            std::size_t room);
};

enum class Level : std::uint8_t { baseline, avx2, avx512 };

const Kernels& kernels();  // the best that this CPU runs
// From now on none above `most`; for tests. Returns the level that kernels() has now.
Level limit_kernels(Level most);

extern const Kernels kBaselineKernels;
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define TORCH_IROH_CODEC_LEVELS 1
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace torch_iroh::codec
