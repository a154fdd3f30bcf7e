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
#include "c10d/staging.hpp"

namespace torch_iroh::c10d_backend {

// The dtype on the wire. Throws RuntimeError, as gloo does, naming a dtype that cannot be moved.
DType dtype_of(const at::Tensor& tensor, const char* op);

// Throws RuntimeError, as gloo does, unless `op` means something for `dtype`.
ReduceOp reduce_op_of(const ::c10d::ReduceOp& reduce, DType dtype, const char* op);
double premul_factor_of(const ::c10d::ReduceOp& reduce);

// Throw RuntimeError: not dense, not one tensor, of another dtype than `like`.
void check_tensor(const char* op, const at::Tensor& tensor);
const at::Tensor& only_tensor(const char* op, const std::vector<at::Tensor>& tensors);
void check_same_dtype(const char* op, const std::vector<at::Tensor>& tensors, const at::Tensor& like);
void check_rank(const char* op, const char* what, std::int64_t rank, int world);

std::string shape_text(const at::Tensor& tensor);  // "[3, 4]"

using StagingPtr = std::shared_ptr<Staging>;  // none: the tensors are on the CPU

// Memory that the core writes: the tensors themselves when they lie on the CPU, contiguous and one after the other,
// else a flat copy that copy_back() returns to them. `load`: it starts with what they hold.
class FlatOutput {
 public:
  FlatOutput(std::vector<at::Tensor> tensors, const StagingPtr& staging, bool load = false);
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
  FlatInput(std::vector<at::Tensor> tensors, const StagingPtr& staging);
  const std::byte* data() const;
  std::vector<std::uint64_t> blocks() const;

 private:
  std::vector<at::Tensor> tensors_;
  at::Tensor flat_;
};

}  // namespace torch_iroh::c10d_backend
