// Which compilation of the kernels this CPU runs.
#include "codec/kernels.hpp"

#include <algorithm>
#include <atomic>

namespace torch_iroh::codec {

namespace {

const Kernels* kernels_of([[maybe_unused]] Level level) {
#ifdef TORCH_IROH_CODEC_LEVELS
  if (level == Level::avx512) return &kAvx512Kernels;
  if (level == Level::avx2) return &kAvx2Kernels;
#endif
  return &kBaselineKernels;
}

Level best_level() {
#ifdef TORCH_IROH_CODEC_LEVELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Level::avx512;
  }
  if (__builtin_cpu_supports("avx2")) return Level::avx2;
#endif
  return Level::baseline;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{kernels_of(best_level())};
  return kernels;
}

}  // namespace

const Kernels& kernels() {
  return *chosen().load(std::memory_order_relaxed);
}

Level limit_kernels(Level most) {
  const Level level = std::min(most, best_level());
  chosen() = kernels_of(level);
  return level;
}

}  // namespace torch_iroh::codec
