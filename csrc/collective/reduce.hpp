// The arithmetic of reductions on raw memory. Knows dtypes, no schedule and no network.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"

namespace torch_iroh::collective {

// Which (op, dtype) pairs have a meaning. bool: sum/max/bor are OR, product/min/band are AND, bxor is XOR, no avg.
// float8 reduces with nothing. Floats have no bitwise ops, complex numbers no order. avg of integers truncates.
bool supports(ReduceOp op, DType dtype);

// out[i] = a[i] op b[i] for `count` elements; `out` may be `a` or `b`. avg and premul_sum add here (see `finish`).
// float16 and bfloat16 compute in float32 and round to nearest even. min and max keep a NaN.
void reduce(ReduceOp op, DType dtype, const std::byte* a, const std::byte* b, std::byte* out, std::size_t count);

// avg: divides by `world` (integers truncate towards zero). Every other op: nothing.
void finish(ReduceOp op, DType dtype, std::byte* data, std::size_t count, std::int32_t world);

// Sums and products of 16-bit floats whose contributions all meet at one rank are kept in float32 and rounded once.
bool accumulates_wide(ReduceOp op, DType dtype);
// sum[i] = a[i] op b[i];  sum[i] = sum[i] op b[i];  out[i] = sum[i] / divisor, rounded.
void begin_wide(ReduceOp op, DType dtype, const std::byte* a, const std::byte* b, float* sum, std::size_t count);
void add_wide(ReduceOp op, DType dtype, float* sum, const std::byte* b, std::size_t count);
void end_wide(DType dtype, const float* sum, float divisor, std::byte* out, std::size_t count);

// The real floats as float32, and back: out[i] = values[i] / divisor, rounded.
void widen(DType dtype, const std::byte* from, float* values, std::size_t count);
void narrow(DType dtype, const float* values, float divisor, std::byte* out, std::size_t count);

// data[i] *= factor, for premul_sum. Floats and complex only.
void scale(DType dtype, std::byte* data, std::size_t count, double factor);

}  // namespace torch_iroh::collective
