// The element types that cross the wire and the reductions over them. Knows sizes and names, no arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace torch_iroh {

enum class DType : std::uint8_t {
  boolean,
  uint8,
  int8,
  uint16,
  int16,
  uint32,
  int32,
  uint64,
  int64,
  float16,
  bfloat16,
  float32,
  float64,
  complex64,
  complex128,
  float8,  // any 8-bit float: moved as bytes, never reduced
};

enum class ReduceOp : std::uint8_t {
  sum,
  avg,
  product,
  min,
  max,
  band,
  bor,
  bxor,
  premul_sum,  // the caller scales its own input first; on the wire it is a sum
};

constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::boolean:
    case DType::uint8:
    case DType::int8:
    case DType::float8: return 1;
    case DType::uint16:
    case DType::int16:
    case DType::float16:
    case DType::bfloat16: return 2;
    case DType::uint32:
    case DType::int32:
    case DType::float32: return 4;
    case DType::uint64:
    case DType::int64:
    case DType::float64:
    case DType::complex64: return 8;
    case DType::complex128: return 16;
  }
  return 0;
}

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::boolean: return "bool";
    case DType::uint8: return "uint8";
    case DType::int8: return "int8";
    case DType::uint16: return "uint16";
    case DType::int16: return "int16";
    case DType::uint32: return "uint32";
    case DType::int32: return "int32";
    case DType::uint64: return "uint64";
    case DType::int64: return "int64";
    case DType::float16: return "float16";
    case DType::bfloat16: return "bfloat16";
    case DType::float32: return "float32";
    case DType::float64: return "float64";
    case DType::complex64: return "complex64";
    case DType::complex128: return "complex128";
    case DType::float8: return "float8";
  }
  return "?";
}

constexpr std::string_view name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return "sum";
    case ReduceOp::avg: return "avg";
    case ReduceOp::product: return "product";
    case ReduceOp::min: return "min";
    case ReduceOp::max: return "max";
    case ReduceOp::band: return "band";
    case ReduceOp::bor: return "bor";
    case ReduceOp::bxor: return "bxor";
    case ReduceOp::premul_sum: return "premul_sum";
  }
  return "?";
}

}  // namespace torch_iroh
