#include "c10d/tensors.hpp"

#include <ATen/ATen.h>

#include "collective/reduce.hpp"

namespace torch_iroh::c10d_backend {
namespace {

// Do the tensors fill one stretch of memory, in order, without a gap?
bool adjacent(const std::vector<at::Tensor>& tensors) {
  const std::byte* next = nullptr;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_contiguous() || tensor.is_neg() || tensor.is_conj()) return false;
    if (tensor.numel() == 0) continue;
    const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
    if (next != nullptr && data != next) return false;
    next = data + tensor.nbytes();
  }
  return true;
}

at::Tensor first_filled(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) return tensor;
  }
  return tensors.empty() ? at::Tensor() : tensors.front();
}

std::vector<std::uint64_t> counts_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::uint64_t> counts;
  for (const at::Tensor& tensor : tensors) counts.push_back(static_cast<std::uint64_t>(tensor.numel()));
  return counts;
}

at::Tensor new_flat(const std::vector<at::Tensor>& tensors) {
  std::int64_t total = 0;
  for (const at::Tensor& tensor : tensors) total += tensor.numel();
  return at::empty({total}, tensors.front().options().requires_grad(false).memory_format(at::MemoryFormat::Contiguous));
}

}  // namespace

DType dtype_of(const at::Tensor& tensor, const char* op) {
  switch (tensor.scalar_type()) {
    case at::kBool: return DType::boolean;
    case at::kByte: return DType::uint8;
    case at::kChar: return DType::int8;
    case at::kUInt16: return DType::uint16;
    case at::kShort: return DType::int16;
    case at::kUInt32: return DType::uint32;
    case at::kInt: return DType::int32;
    case at::kUInt64: return DType::uint64;
    case at::kLong: return DType::int64;
    case at::kHalf: return DType::float16;
    case at::kBFloat16: return DType::bfloat16;
    case at::kFloat: return DType::float32;
    case at::kDouble: return DType::float64;
    case at::kComplexFloat: return DType::complex64;
    case at::kComplexDouble: return DType::complex128;
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e5m2:
    case at::kFloat8_e5m2fnuz:
    case at::kFloat8_e8m0fnu: return DType::float8;
    default: TORCH_CHECK(false, "ProcessGroupIroh::", op, ": dtype ", tensor.scalar_type(), " is not supported");
  }
}

ReduceOp reduce_op_of(const ::c10d::ReduceOp& reduce, DType dtype, const char* op) {
  const ReduceOp chosen = [&] {
    switch (static_cast<::c10d::ReduceOp::RedOpType>(reduce)) {
      case ::c10d::ReduceOp::SUM: return ReduceOp::sum;
      case ::c10d::ReduceOp::AVG: return ReduceOp::avg;
      case ::c10d::ReduceOp::PRODUCT: return ReduceOp::product;
      case ::c10d::ReduceOp::MIN: return ReduceOp::min;
      case ::c10d::ReduceOp::MAX: return ReduceOp::max;
      case ::c10d::ReduceOp::BAND: return ReduceOp::band;
      case ::c10d::ReduceOp::BOR: return ReduceOp::bor;
      case ::c10d::ReduceOp::BXOR: return ReduceOp::bxor;
      case ::c10d::ReduceOp::PREMUL_SUM: return ReduceOp::premul_sum;
      default: TORCH_CHECK(false, "ProcessGroupIroh::", op, ": unknown reduce op");
    }
  }();
  TORCH_CHECK(collective::supports(chosen, dtype), "ProcessGroupIroh::", op, ": reduce op ",
              std::string(name_of(chosen)), " has no meaning for dtype ", std::string(name_of(dtype)));
  return chosen;
}

double premul_factor_of(const ::c10d::ReduceOp& reduce) {
  const auto* supplement = reinterpret_cast<const ::c10d::NCCLPreMulSumSupplement*>(reduce.supplement_.get());
  if (supplement == nullptr) return 1.0;
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

void check_tensor(const char* op, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), "ProcessGroupIroh::", op, ": an undefined tensor");
  TORCH_CHECK(tensor.layout() == at::kStrided, "ProcessGroupIroh::", op, ": tensor layout ", tensor.layout(),
              " is not supported; only dense tensors are");
}

const at::Tensor& only_tensor(const char* op, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(tensors.size() == 1, "ProcessGroupIroh::", op, ": requires a single-element tensor list, got ",
              tensors.size());
  check_tensor(op, tensors.front());
  return tensors.front();
}

void check_same_dtype(const char* op, const std::vector<at::Tensor>& tensors, const at::Tensor& like) {
  for (const at::Tensor& tensor : tensors) {
    check_tensor(op, tensor);
    TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), "ProcessGroupIroh::", op,
                ": tensors of different dtypes: ", tensor.scalar_type(), " and ", like.scalar_type());
  }
}

void check_rank(const char* op, const char* what, std::int64_t rank, int world) {
  TORCH_CHECK(rank >= 0 && rank < world, "ProcessGroupIroh::", op, ": invalid ", what, " rank ", rank,
              ", allowed are 0..", world - 1);
}

std::string shape_text(const at::Tensor& tensor) {
  std::string text = "[";
  for (const std::int64_t size : tensor.sizes()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

FlatOutput::FlatOutput(std::vector<at::Tensor> tensors, const StagingPtr& staging, bool load)
    : tensors_(std::move(tensors)), direct_(tensors_.empty() || (!staging && adjacent(tensors_))) {
  if (direct_) return;
  flat_ = staging ? staging->host_memory(tensors_) : new_flat(tensors_);
  if (!load) return;
  if (staging) {
    staging->load(tensors_, flat_);
  } else {
    copy_to_flat(tensors_, flat_, false);
  }
}

std::byte* FlatOutput::data() const {
  const at::Tensor first = direct_ ? first_filled(tensors_) : flat_;
  return first.defined() ? static_cast<std::byte*>(first.mutable_data_ptr()) : nullptr;
}

std::vector<std::uint64_t> FlatOutput::blocks() const {
  return counts_of(tensors_);
}

void FlatOutput::copy_back() const {
  if (!direct_) copy_from_flat(flat_, tensors_, true);
}

FlatInput::FlatInput(std::vector<at::Tensor> tensors, const StagingPtr& staging) : tensors_(std::move(tensors)) {
  if (tensors_.empty()) return;
  if (staging) {
    flat_ = staging->host_memory(tensors_);
    staging->load(tensors_, flat_);
  } else if (!adjacent(tensors_)) {
    flat_ = new_flat(tensors_);
    copy_to_flat(tensors_, flat_, false);
  }
}

const std::byte* FlatInput::data() const {
  const at::Tensor first = flat_.defined() ? flat_ : first_filled(tensors_);
  return first.defined() ? static_cast<const std::byte*>(first.const_data_ptr()) : nullptr;
}

std::vector<std::uint64_t> FlatInput::blocks() const {
  return counts_of(tensors_);
}

}  // namespace torch_iroh::c10d_backend
