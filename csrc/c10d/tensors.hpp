// Between tensors and the core's (pointer, count, dtype): checks in gloo's words, flat views where memory allows, flat
// copies where it does not. Knows no group.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "base/dtype.hpp"

namespace torch_iroh::c10d_backend {

// The dtype on the wire. Throws ValueError naming a dtype that cannot be moved.
DType dtype_of(const at::Tensor& tensor, const char* op);

// Throws ValueError unless `op` means something for `dtype`.
ReduceOp reduce_op_of(const ::c10d::ReduceOp& reduce, DType dtype, const char* op);
double premul_factor_of(const ::c10d::ReduceOp& reduce);

// Throw ValueError: not dense, on another device than the CPU, not one tensor, of another dtype than `like`.
void check_tensor(const char* op, const at::Tensor& tensor);
const at::Tensor& only_tensor(const char* op, const std::vector<at::Tensor>& tensors);
void check_same_dtype(const char* op, const std::vector<at::Tensor>& tensors, const at::Tensor& like);
void check_rank(const char* op, const char* what, std::int64_t rank, int world);

std::string shape_text(const at::Tensor& tensor);  // "[3, 4]"

// Memory that the core writes: the tensors themselves when they lie contiguous and one after the other, else a flat
// copy that copy_back() returns to them.
class FlatOutput {
 public:
  explicit FlatOutput(std::vector<at::Tensor> tensors, bool load = false);
  std::byte* data() const;
  std::vector<std::uint64_t> blocks() const;  // elements of each tensor
  bool needs_copy_back() const { return !direct_; }
  void copy_back() const;

 private:
  std::vector<at::Tensor> tensors_;
  at::Tensor flat_;
  bool direct_;
};

// Memory that the core reads, likewise.
class FlatInput {
 public:
  explicit FlatInput(std::vector<at::Tensor> tensors);
  const std::byte* data() const;
  std::vector<std::uint64_t> blocks() const;

 private:
  std::vector<at::Tensor> tensors_;
  at::Tensor flat_;
};

}  // namespace torch_iroh::c10d_backend
