// Sparse gradients (embeddings): every rank gathers the indices and values of all, and sums them in rank order. How
// much each rank has travels first; the two gathers that follow learn it when their turn comes.
#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "c10d/operation.hpp"

namespace torch_iroh::c10d_backend {
namespace {

using collective::Op;

constexpr std::int64_t kMostItems = std::int64_t{1} << 40;

struct Sparse {
  at::Tensor target;
  at::Tensor indices;      // [sparse_dim, own count]
  at::Tensor values;       // [own count, dense sizes...]
  std::int64_t own_count;  // lent to the first gather
  std::vector<std::int64_t> counts;
  at::Tensor all_indices;  // flat: the ranks' blocks one after the other
  at::Tensor all_values;

  std::int64_t total() const {
    std::int64_t sum = 0;
    for (const std::int64_t count : counts) sum += count;
    return sum;
  }

  at::Tensor sum() const {
    Tensors columns;
    std::int64_t offset = 0;
    for (const std::int64_t count : counts) {
      const std::int64_t length = count * target.sparse_dim();
      columns.push_back(all_indices.narrow(0, offset, length).view({target.sparse_dim(), count}));
      offset += length;
    }
    std::vector<std::int64_t> shape = values.sizes().vec();
    shape.front() = total();
    const at::Tensor indices = at::cat(columns, 1);
    const at::Tensor summands = all_values.view(shape);
    at::_validate_sparse_coo_tensor_args(indices, summands, target.sizes());  // they came from other ranks
    return at::_sparse_coo_tensor_unsafe(indices, summands, target.sizes()).coalesce();
  }
};

// The blocks that each rank contributes when every item is `width` elements.
std::vector<std::uint64_t> blocks_of(const Sparse& sparse, std::int64_t width) {
  std::vector<std::uint64_t> blocks;
  for (const std::int64_t count : sparse.counts) {
    if (count < 0 || count > kMostItems) {
      throw Error(ErrorKind::protocol, "a rank has " + std::to_string(count) + " items in a sparse tensor");
    }
    blocks.push_back(static_cast<std::uint64_t>(count * width));
  }
  return blocks;
}

}  // namespace

void Operation::add_sparse_all_reduce(const at::Tensor& tensor, const ::c10d::ReduceOp& reduce) {
  const auto kind = static_cast<::c10d::ReduceOp::RedOpType>(reduce);
  const bool average = kind == ::c10d::ReduceOp::AVG;
  TORCH_CHECK(average || kind == ::c10d::ReduceOp::SUM, "ProcessGroupIroh::", op,
              ": sparse tensors can only be reduced with SUM or AVG");
  TORCH_CHECK(tensor.layout() == at::kSparse, "ProcessGroupIroh::", op, ": tensor layout ", tensor.layout(),
              " is not supported; dense and sparse COO tensors are");
  const at::NoGradGuard no_grad;
  const at::Tensor own = tensor.detach().coalesce().cpu();
  auto sparse = std::make_shared<Sparse>();
  sparse->target = tensor;
  sparse->indices = own.indices().contiguous();
  sparse->values = own.values().contiguous();
  sparse->own_count = sparse->values.size(0);
  sparse->counts.resize(static_cast<std::size_t>(world_));
  const DType dtype = dtype_of(sparse->values, op);
  const std::int64_t width = c10::multiply_integers(sparse->values.sizes().slice(1));
  reduce_op_of(average ? ::c10d::ReduceOp::AVG : ::c10d::ReduceOp::SUM, dtype, op);

  Part& count = add(Op::all_gather, 0, DType::int64);
  count.call.request.blocks.assign(static_cast<std::size_t>(world_), 1);
  count.call.shape = "[1] (the length of a sparse " + std::string(name_of(dtype)) + shape_text(tensor) + " with " +
                     std::to_string(tensor.sparse_dim()) + " sparse dimensions)";
  count.call.work.input = reinterpret_cast<const std::byte*>(&sparse->own_count);
  count.call.work.output = reinterpret_cast<std::byte*>(sparse->counts.data());
  count.call.work.keep = sparse;

  Part& indices = add(Op::all_gather, 0, DType::int64);
  indices.call.work.input = static_cast<const std::byte*>(sparse->indices.const_data_ptr());
  indices.call.work.keep = sparse;
  indices.call.prepare = [sparse](collective::CollectiveCall& call) {
    call.request.blocks = blocks_of(*sparse, sparse->target.sparse_dim());
    sparse->all_indices = at::empty({sparse->total() * sparse->target.sparse_dim()}, at::kLong);
    call.work.output = static_cast<std::byte*>(sparse->all_indices.mutable_data_ptr());
  };

  Part& values = add(Op::all_gather, 0, dtype);
  values.call.work.input = static_cast<const std::byte*>(sparse->values.const_data_ptr());
  values.call.work.keep = sparse;
  values.call.prepare = [sparse, width](collective::CollectiveCall& call) {
    call.request.blocks = blocks_of(*sparse, width);
    sparse->all_values = at::empty({sparse->total() * width}, sparse->values.options());
    call.work.output = static_cast<std::byte*>(sparse->all_values.mutable_data_ptr());
  };
  values.after = [sparse, average, staging = description.staging, world = world_] {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;  // as for dense tensors: inference tensors too
    at::Tensor sum = sparse->sum();
    if (average)
      sum = at::_sparse_coo_tensor_unsafe(sum.indices(), sum.values() / world, sum.sizes())._coalesced_(true);
    sparse->target.copy_(sum);
    if (!staging) return;
    staging->hand_over(sparse->target._indices());
    staging->hand_over(sparse->target._values());
  };
}

}  // namespace torch_iroh::c10d_backend
