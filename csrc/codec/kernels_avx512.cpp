// The kernels for CPUs with AVX-512 (F, BW, DQ, VL).
#include "codec/kernels.hpp"

#ifdef TORCH_IROH_CODEC_LEVELS
// To the end of the file: what is above, from headers, stays as it is.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#pragma GCC optimize("O3", "no-trapping-math", "fp-contract=off")

#include "codec/loops.hpp"

namespace torch_iroh::codec {
const Kernels kAvx512Kernels = kThisLevel;
}  // namespace torch_iroh::codec
#endif
