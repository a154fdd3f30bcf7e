#include "c10d/operation.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/ATen.h>

namespace torch_iroh::c10d_backend {
namespace {

using collective::Op;
using Flats = std::pair<FlatOutput, FlatInput>;

bool all_equal(const std::vector<std::uint64_t>& counts) {
  return std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) == counts.end();
}

Tensors joined(const Tensors& first, const Tensors& second) {
  Tensors all = first;
  all.insert(all.end(), second.begin(), second.end());
  return all;
}

}  // namespace

Operation::Operation(const char* op, int rank, int world, ::c10d::OpType type, const char* title, Tensors inputs,
                     Tensors outputs)
    : op(op), rank_(rank), world_(world) {
  description.type = type;
  description.title = title;
  description.staging = Staging::of(op, joined(inputs, outputs));
  description.inputs = std::move(inputs);
  description.outputs = std::move(outputs);
}

void Operation::give_lists(const TensorLists& lists) {
  description.value_type = c10::ListType::create(c10::ListType::create(c10::TensorType::get()));
  description.value = c10::IValue(lists);
}

Operation::Part& Operation::add(Op kind, int root, DType dtype) {
  Part& part = parts.emplace_back();
  part.call.request.op = kind;
  part.call.request.root = root;
  part.call.work.dtype = dtype;
  return part;
}

void Operation::set_reduction(Part& part, const ::c10d::ReduceOp& reduce) const {
  part.call.work.reduce = reduce_op_of(reduce, part.call.work.dtype, op);
  if (part.call.work.reduce == ReduceOp::premul_sum) part.call.work.premul = premul_factor_of(reduce);
}

template <typename Held>
void Operation::lend(Part& part, const std::shared_ptr<Held>& flats, const std::byte* input,
                     const FlatOutput& output) const {
  part.call.work.input = input;
  part.call.work.output = output.data();
  part.call.work.keep = flats;
  if (output.needs_copy_back()) part.after = [flats, &output] { output.copy_back(); };
}

Operation::Part& Operation::add_reduce(Op kind, const at::Tensor& tensor, const ::c10d::ReduceOp& reduce, int root) {
  Part& part = add(kind, root, dtype_of(tensor, op));
  part.call.request.count = static_cast<std::uint64_t>(tensor.numel());
  part.call.shape = shape_text(tensor);
  if (kind != Op::broadcast) set_reduction(part, reduce);
  // broadcast reads at the root and writes elsewhere; reduce reads everywhere and writes at the root.
  const bool is_root = rank_ == root;
  const bool read = kind != Op::broadcast || is_root;
  const bool written = kind == Op::all_reduce || (kind == Op::reduce) == is_root;
  auto flat = std::make_shared<FlatOutput>(Tensors{tensor}, description.staging, read);
  lend(part, flat, flat->data(), *flat);
  if (!written) part.after = nullptr;
  return part;
}

Operation::Part& Operation::add_gather(Op kind, const Tensors& outputs, const Tensors& inputs, int root) {
  const at::Tensor& like = inputs.empty() ? outputs.front() : inputs.front();
  check_same_dtype(op, outputs, like);
  check_same_dtype(op, inputs, like);
  Part& part = add(kind, root, dtype_of(like, op));
  auto flats =
      std::make_shared<Flats>(FlatOutput(outputs, description.staging), FlatInput(inputs, description.staging));
  lend(part, flats, flats->second.data(), flats->first);
  // The blocks in rank order are on the side that has one per rank; elsewhere all are as large as this rank's.
  const auto whole = kind == Op::scatter ? flats->second.blocks() : flats->first.blocks();
  const auto own = kind == Op::scatter ? flats->first.blocks() : flats->second.blocks();
  const auto rank = static_cast<std::size_t>(rank_);
  const auto world = static_cast<std::size_t>(world_);
  auto& blocks = part.call.request.blocks;
  if (kind == Op::all_to_all) {
    blocks = flats->first.blocks();
    part.call.request.send_blocks = flats->second.blocks();
    TORCH_CHECK(blocks[rank] == part.call.request.send_blocks[rank], "ProcessGroupIroh::", op, ": rank ", rank_,
                " sends itself ", part.call.request.send_blocks[rank], " elements but receives ", blocks[rank]);
    return part;
  }
  blocks = whole.size() == world ? whole : std::vector<std::uint64_t>(world, own.front());
  TORCH_CHECK(blocks[rank] == own.front(), "ProcessGroupIroh::", op, ": rank ", rank_, " has a block of ", own.front(),
              " elements where the list has ", blocks[rank]);
  TORCH_CHECK(kind == Op::all_gather || all_equal(blocks), "ProcessGroupIroh::", op,
              ": all blocks must have the same number of elements");
  if (all_equal(blocks)) part.call.shape = "[" + std::to_string(own.front()) + "]";
  return part;
}

Operation::Part& Operation::add_reduce_scatter(const at::Tensor& output, const Tensors& inputs,
                                               const ::c10d::ReduceOp& reduce) {
  check_same_dtype(op, inputs, output);
  Part& part = add(Op::reduce_scatter, 0, dtype_of(output, op));
  set_reduction(part, reduce);
  auto flats =
      std::make_shared<Flats>(FlatOutput({output}, description.staging), FlatInput(inputs, description.staging));
  lend(part, flats, flats->second.data(), flats->first);
  auto& blocks = part.call.request.blocks;
  blocks = flats->second.blocks();
  const auto own = static_cast<std::uint64_t>(output.numel());
  if (blocks.size() != static_cast<std::size_t>(world_)) blocks.assign(static_cast<std::size_t>(world_), own);
  const std::uint64_t mine = blocks[static_cast<std::size_t>(rank_)];
  TORCH_CHECK(mine == own, "ProcessGroupIroh::", op, ": the output has ", own, " elements where rank ", rank_,
              "'s input block has ", mine);
  if (all_equal(blocks)) part.call.shape = "[" + std::to_string(own) + "]";
  return part;
}

Operation::Part& Operation::add_barrier() {
  return add(Op::barrier, 0, DType::uint8);
}

Tensors Operation::split_evenly(const char* what, const at::Tensor& whole, const at::Tensor& block) const {
  check_tensor(op, whole);
  check_tensor(op, block);
  TORCH_CHECK(whole.numel() == block.numel() * world_, "ProcessGroupIroh::", op, ": ", what, " has ", whole.numel(),
              " elements, must be the world size ", world_, " times ", block.numel());
  // One flat tensor counts as one block of each rank; a strided one is copied anyway.
  if (!whole.is_contiguous()) return {whole};
  const at::Tensor flat = whole.view({-1});
  return flat.numel() == 0 ? Tensors(static_cast<std::size_t>(world_), flat) : Tensors(flat.chunk(world_));
}

Tensors Operation::split_by(const at::Tensor& whole, const std::vector<std::int64_t>& splits) const {
  std::vector<std::int64_t> sizes = splits;
  const std::int64_t length = whole.dim() == 0 ? whole.numel() : whole.size(0);
  if (sizes.empty()) {
    TORCH_CHECK(length % world_ == 0, "ProcessGroupIroh::", op, ": dimension 0 of size ", length,
                " does not divide equally across ", world_, " ranks");
    sizes.assign(static_cast<std::size_t>(world_), length / world_);
  }
  TORCH_CHECK(sizes.size() == static_cast<std::size_t>(world_), "ProcessGroupIroh::", op, ": ", sizes.size(),
              " split sizes for ", world_, " ranks");
  TORCH_CHECK(std::all_of(sizes.begin(), sizes.end(), [](std::int64_t size) { return size >= 0; }),
              "ProcessGroupIroh::", op, ": a split size is negative");
  TORCH_CHECK(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}) == length, "ProcessGroupIroh::", op,
              ": the split sizes do not add up to dimension 0 of size ", length);
  const at::Tensor base = whole.dim() == 0 ? whole.unsqueeze(0) : whole;
  Tensors views;
  std::int64_t offset = 0;
  for (const std::int64_t size : sizes) {
    views.push_back(base.narrow(0, offset, size));
    offset += size;
  }
  return views;
}

}  // namespace torch_iroh::c10d_backend
