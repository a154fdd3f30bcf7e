// The kernels for any CPU of the architecture.
#include "codec/kernels.hpp"

// As in collective/reduce.cpp; and no fused multiply-add, which some CPUs have and others have not.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("O3", "no-trapping-math", "fp-contract=off")
#endif

#include "codec/loops.hpp"

namespace torch_iroh::codec {
const Kernels kBaselineKernels = kThisLevel;
}  // namespace torch_iroh::codec
