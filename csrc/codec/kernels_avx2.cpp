// The kernels for CPUs with AVX2.
#include "codec/kernels.hpp"

#ifdef TORCH_IROH_CODEC_LEVELS
// To the end of the file: what is above, from headers, stays as it is.
#pragma GCC target("avx2")
#pragma GCC optimize("O3", "no-trapping-math", "fp-contract=off")

#include "codec/loops.hpp"

namespace torch_iroh::codec {
const Kernels kAvx2Kernels = kThisLevel;
}  // namespace torch_iroh::codec
#endif
