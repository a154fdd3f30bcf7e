// The virtuals of ProcessGroupIroh, and what each asks of the core. A comment names who in torch calls it.
#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/ATen.h>

#include "c10d/process_group.hpp"
#include "c10d/tensors.hpp"

namespace torch_iroh::c10d_backend {
namespace {

using collective::Op;
using Flats = std::pair<FlatOutput, FlatInput>;

const Tensors& only_list(const char* op, const TensorLists& lists) {
  TORCH_CHECK_VALUE(lists.size() == 1, "ProcessGroupIroh::", op, ": requires a single-element list of tensor lists, ",
                    "got ", lists.size());
  return lists.front();
}

void check_list_length(const char* op, const char* what, std::size_t length, int world) {
  TORCH_CHECK_VALUE(length == static_cast<std::size_t>(world), "ProcessGroupIroh::", op, ": incorrect ", what,
                    " list size ", length, ", must be the world size ", world);
}

void check_not_root(const char* op, const char* what, bool empty) {
  TORCH_CHECK_VALUE(empty, "ProcessGroupIroh::", op, ": requires an empty ", what, " on ranks other than the root");
}

c10::TypePtr list_of_lists() {
  return c10::ListType::create(c10::ListType::create(c10::TensorType::get()));
}

bool all_equal(const std::vector<std::uint64_t>& counts) {
  return std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) == counts.end();
}

Tensors flatten(const TensorLists& lists) {
  Tensors all;
  for (const Tensors& tensors : lists) all.insert(all.end(), tensors.begin(), tensors.end());
  return all;
}

IrohWork::Description describe(::c10d::OpType type, const char* title, Tensors inputs, Tensors outputs) {
  IrohWork::Description description;
  description.type = type;
  description.title = title;
  description.inputs = std::move(inputs);
  description.outputs = std::move(outputs);
  return description;
}

// Views of `whole` along dimension 0 by `splits`; an empty list means even.
Tensors split_by(const char* op, const at::Tensor& whole, const std::vector<std::int64_t>& splits, int world) {
  std::vector<std::int64_t> sizes = splits;
  const std::int64_t length = whole.dim() == 0 ? whole.numel() : whole.size(0);
  if (sizes.empty()) {
    TORCH_CHECK_VALUE(length % world == 0, "ProcessGroupIroh::", op, ": dimension 0 of size ", length,
                      " does not divide equally across ", world, " ranks");
    sizes.assign(static_cast<std::size_t>(world), length / world);
  }
  TORCH_CHECK_VALUE(sizes.size() == static_cast<std::size_t>(world), "ProcessGroupIroh::", op, ": ", sizes.size(),
                    " split sizes for ", world, " ranks");
  TORCH_CHECK_VALUE(std::all_of(sizes.begin(), sizes.end(), [](std::int64_t size) { return size >= 0; }),
                    "ProcessGroupIroh::", op, ": a split size is negative");
  TORCH_CHECK_VALUE(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}) == length, "ProcessGroupIroh::", op,
                    ": the split sizes do not add up to dimension 0 of size ", length);
  const at::Tensor base = whole.dim() == 0 ? whole.unsqueeze(0) : whole;
  Tensors parts;
  std::int64_t offset = 0;
  for (const std::int64_t size : sizes) {
    parts.push_back(base.narrow(0, offset, size));
    offset += size;
  }
  return parts;
}

}  // namespace

ProcessGroupIroh::Part ProcessGroupIroh::reduce_part(const char* op, Op kind, const at::Tensor& tensor,
                                                     const ::c10d::ReduceOp& reduce, int root) const {
  Part part;
  part.call.request.op = kind;
  part.call.request.root = root;
  part.call.request.count = static_cast<std::uint64_t>(tensor.numel());
  part.call.shape = shape_text(tensor);
  part.call.work.dtype = dtype_of(tensor, op);
  if (kind != Op::broadcast) {
    part.call.work.reduce = reduce_op_of(reduce, part.call.work.dtype, op);
    if (part.call.work.reduce == ReduceOp::premul_sum) part.call.work.premul = premul_factor_of(reduce);
  }
  // On ranks other than the root, reduce reads the tensor and writes nothing.
  auto flat = std::make_shared<FlatOutput>(Tensors{tensor}, true);
  part.call.work.input = flat->data();
  part.call.work.output = flat->data();
  part.call.work.keep = flat;
  const bool written = kind != Op::reduce || root == rank_;
  if (flat->needs_copy_back() && written) part.after = [flat] { flat->copy_back(); };
  return part;
}

ProcessGroupIroh::Part ProcessGroupIroh::gather_part(const char* op, Op kind, const Tensors& outputs,
                                                     const Tensors& inputs, int root) const {
  const at::Tensor& like = inputs.empty() ? outputs.front() : inputs.front();
  check_same_dtype(op, outputs, like);
  check_same_dtype(op, inputs, like);
  Part part;
  part.call.request.op = kind;
  part.call.request.root = root;
  part.call.work.dtype = dtype_of(like, op);
  auto flats = std::make_shared<Flats>(FlatOutput(outputs), FlatInput(inputs));
  part.call.work.output = flats->first.data();
  part.call.work.input = flats->second.data();
  part.call.work.keep = flats;
  if (flats->first.needs_copy_back()) part.after = [flats] { flats->first.copy_back(); };
  // The blocks in rank order are on the side that has one per rank; elsewhere all are as large as this rank's.
  const auto whole = kind == Op::scatter ? flats->second.blocks() : flats->first.blocks();
  const auto own = kind == Op::scatter ? flats->first.blocks() : flats->second.blocks();
  auto& blocks = part.call.request.blocks;
  if (kind == Op::all_to_all) {
    blocks = flats->first.blocks();
    part.call.request.send_blocks = flats->second.blocks();
    const auto rank = static_cast<std::size_t>(rank_);
    TORCH_CHECK_VALUE(blocks[rank] == part.call.request.send_blocks[rank], "ProcessGroupIroh::", op, ": rank ", rank_,
                      " sends itself ", part.call.request.send_blocks[rank], " elements but receives ", blocks[rank]);
    return part;
  }
  blocks = whole.size() == static_cast<std::size_t>(size_)
               ? whole
               : std::vector<std::uint64_t>(static_cast<std::size_t>(size_), own.front());
  TORCH_CHECK_VALUE(blocks[static_cast<std::size_t>(rank_)] == own.front(), "ProcessGroupIroh::", op, ": rank ", rank_,
                    " has a block of ", own.front(), " elements where the list has ",
                    blocks[static_cast<std::size_t>(rank_)]);
  TORCH_CHECK_VALUE(kind == Op::all_gather || all_equal(blocks), "ProcessGroupIroh::", op,
                    ": all blocks must have the same number of elements");
  if (all_equal(blocks)) part.call.shape = "[" + std::to_string(own.front()) + "]";
  return part;
}

ProcessGroupIroh::Part ProcessGroupIroh::reduce_scatter_part(const char* op, const at::Tensor& output,
                                                             const Tensors& inputs,
                                                             const ::c10d::ReduceOp& reduce) const {
  check_same_dtype(op, inputs, output);
  Part part;
  part.call.request.op = Op::reduce_scatter;
  part.call.work.dtype = dtype_of(output, op);
  part.call.work.reduce = reduce_op_of(reduce, part.call.work.dtype, op);
  if (part.call.work.reduce == ReduceOp::premul_sum) part.call.work.premul = premul_factor_of(reduce);
  auto flats = std::make_shared<Flats>(FlatOutput({output}), FlatInput(inputs));
  part.call.request.blocks = flats->second.blocks();
  part.call.work.output = flats->first.data();
  part.call.work.input = flats->second.data();
  part.call.work.keep = flats;
  if (flats->first.needs_copy_back()) part.after = [flats] { flats->first.copy_back(); };
  auto& blocks = part.call.request.blocks;
  const auto own = static_cast<std::uint64_t>(output.numel());
  if (blocks.size() != static_cast<std::size_t>(size_)) blocks.assign(static_cast<std::size_t>(size_), own);
  TORCH_CHECK_VALUE(blocks[static_cast<std::size_t>(rank_)] == own, "ProcessGroupIroh::", op, ": the output has ", own,
                    " elements where rank ", rank_, "'s input block has ", blocks[static_cast<std::size_t>(rank_)]);
  if (all_equal(blocks)) part.call.shape = "[" + std::to_string(own) + "]";
  return part;
}

Tensors ProcessGroupIroh::split_evenly(const char* op, const char* what, const at::Tensor& whole,
                                       const at::Tensor& block) const {
  check_tensor(op, whole);
  check_tensor(op, block);
  TORCH_CHECK_VALUE(whole.numel() == block.numel() * size_, "ProcessGroupIroh::", op, ": ", what, " has ",
                    whole.numel(), " elements, must be the world size ", size_, " times ", block.numel());
  // One flat tensor counts as one block of each rank; a strided one is copied anyway.
  const at::Tensor flat = whole.is_contiguous() ? whole.view({-1}) : whole;
  if (!whole.is_contiguous()) return {flat};
  return flat.numel() == 0 ? Tensors(static_cast<std::size_t>(size_), flat) : Tensors(flat.chunk(size_));
}

// DDP (start, buffers), ZeRO, functional collectives, object lists, checkpoints
WorkPtr ProcessGroupIroh::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = only_tensor("broadcast", tensors);
  check_rank("broadcast", "root", opts.rootRank, size_);
  std::vector<Part> parts;
  parts.push_back(reduce_part("broadcast", Op::broadcast, tensor, {}, static_cast<int>(opts.rootRank)));
  return submit(describe(::c10d::OpType::BROADCAST, "iroh:broadcast", tensors, tensors), std::move(parts),
                opts.timeout);
}

// DDP buckets and comm hooks, FSDP, DTensor, functional collectives
WorkPtr ProcessGroupIroh::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  const at::Tensor& tensor = only_tensor("allreduce", tensors);
  std::vector<Part> parts;
  parts.push_back(reduce_part("allreduce", Op::all_reduce, tensor, opts.reduceOp, 0));
  return submit(describe(::c10d::OpType::ALLREDUCE, "iroh:all_reduce", tensors, tensors), std::move(parts),
                opts.timeout);
}

// all_reduce_coalesced, the coalescing manager, functional collectives
WorkPtr ProcessGroupIroh::allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) {
  std::vector<Part> parts;
  for (const at::Tensor& tensor : tensors) {
    check_tensor("allreduce_coalesced", tensor);
    parts.push_back(reduce_part("allreduce_coalesced", Op::all_reduce, tensor, opts.reduceOp, 0));
  }
  return submit(describe(::c10d::OpType::ALLREDUCE_COALESCED, "iroh:all_reduce", tensors, tensors), std::move(parts),
                opts.timeout);
}

WorkPtr ProcessGroupIroh::reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = only_tensor("reduce", tensors);
  check_rank("reduce", "root", opts.rootRank, size_);
  std::vector<Part> parts;
  parts.push_back(reduce_part("reduce", Op::reduce, tensor, opts.reduceOp, static_cast<int>(opts.rootRank)));
  return submit(describe(::c10d::OpType::REDUCE, "iroh:reduce", tensors, tensors), std::move(parts), opts.timeout);
}

// object collectives, DDP verify, FSDP1 on CPU, ZeRO, checkpoints
WorkPtr ProcessGroupIroh::allgather(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) {
  only_tensor("allgather", inputs);
  const Tensors& list = only_list("allgather", outputs);
  check_list_length("allgather", "output", list.size(), size_);
  std::vector<Part> parts;
  parts.push_back(gather_part("allgather", Op::all_gather, list, inputs, 0));
  auto description = describe(::c10d::OpType::ALLGATHER, "iroh:all_gather", inputs, list);
  description.value_type = list_of_lists();
  description.value = c10::IValue(outputs);
  return submit(std::move(description), std::move(parts), opts.timeout);
}

// all_gather_into_tensor, FSDP2 forward
WorkPtr ProcessGroupIroh::_allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

WorkPtr ProcessGroupIroh::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                              const ::c10d::AllgatherOptions& opts) {
  check_list_length("allgather_coalesced", "output", outputs.size(), size_);
  std::vector<Part> parts;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors list;  // outputs[rank][i]
    for (const Tensors& of_rank : outputs) {
      TORCH_CHECK_VALUE(of_rank.size() == inputs.size(), "ProcessGroupIroh::allgather_coalesced: a rank's list has ",
                        of_rank.size(), " tensors where the input has ", inputs.size());
      list.push_back(of_rank[i]);
    }
    parts.push_back(gather_part("allgather_coalesced", Op::all_gather, list, {inputs[i]}, 0));
  }
  auto description = describe(::c10d::OpType::COALESCED, "iroh:all_gather", inputs, flatten(outputs));
  description.value_type = list_of_lists();
  description.value = c10::IValue(outputs);
  return submit(std::move(description), std::move(parts), opts.timeout);
}

// every functional all-gather (DTensor, compile), the coalescing manager
WorkPtr ProcessGroupIroh::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const ::c10d::AllgatherOptions& opts) {
  constexpr const char* op = "allgather_into_tensor";
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "ProcessGroupIroh::", op, ": ", outputs.size(), " outputs for ",
                    inputs.size(), " inputs");
  std::vector<Part> parts;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    parts.push_back(
        gather_part(op, Op::all_gather, split_evenly(op, "the output", outputs[i], inputs[i]), {inputs[i]}, 0));
  }
  return submit(describe(::c10d::OpType::_ALLGATHER_BASE, "iroh:all_gather", inputs, outputs), std::move(parts),
                opts.timeout);
}

// gather_object, checkpoint planner
WorkPtr ProcessGroupIroh::gather(TensorLists& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) {
  only_tensor("gather", inputs);
  check_rank("gather", "root", opts.rootRank, size_);
  const bool root = opts.rootRank == rank_;
  Tensors list;
  if (root) {
    list = only_list("gather", outputs);
    check_list_length("gather", "output", list.size(), size_);
  } else {
    check_not_root("gather", "output", outputs.empty() || (outputs.size() == 1 && outputs[0].empty()));
  }
  std::vector<Part> parts;
  parts.push_back(gather_part("gather", Op::gather, list, inputs, static_cast<int>(opts.rootRank)));
  return submit(describe(::c10d::OpType::GATHER, "iroh:gather", inputs, list), std::move(parts), opts.timeout);
}

// scatter_object_list, distribute_tensor
WorkPtr ProcessGroupIroh::scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ScatterOptions& opts) {
  only_tensor("scatter", outputs);
  check_rank("scatter", "root", opts.rootRank, size_);
  const bool root = opts.rootRank == rank_;
  Tensors list;
  if (root) {
    list = only_list("scatter", inputs);
    check_list_length("scatter", "input", list.size(), size_);
  } else {
    check_not_root("scatter", "input", inputs.empty() || (inputs.size() == 1 && inputs[0].empty()));
  }
  std::vector<Part> parts;
  parts.push_back(gather_part("scatter", Op::scatter, outputs, list, static_cast<int>(opts.rootRank)));
  return submit(describe(::c10d::OpType::SCATTER, "iroh:scatter", list, outputs), std::move(parts), opts.timeout);
}

WorkPtr ProcessGroupIroh::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                         const ::c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = only_tensor("reduce_scatter", outputs);
  const Tensors& list = only_list("reduce_scatter", inputs);
  check_list_length("reduce_scatter", "input", list.size(), size_);
  std::vector<Part> parts;
  parts.push_back(reduce_scatter_part("reduce_scatter", output, list, opts.reduceOp));
  return submit(describe(::c10d::OpType::REDUCE_SCATTER, "iroh:reduce_scatter", list, outputs), std::move(parts),
                opts.timeout);
}

// reduce_scatter_tensor, FSDP1 and FSDP2 backward
WorkPtr ProcessGroupIroh::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const ::c10d::ReduceScatterOptions& opts) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

// every functional reduce-scatter, the coalescing manager
WorkPtr ProcessGroupIroh::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const ::c10d::ReduceScatterOptions& opts) {
  constexpr const char* op = "reduce_scatter_tensor";
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "ProcessGroupIroh::", op, ": ", outputs.size(), " outputs for ",
                    inputs.size(), " inputs");
  std::vector<Part> parts;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    parts.push_back(
        reduce_scatter_part(op, outputs[i], split_evenly(op, "the input", inputs[i], outputs[i]), opts.reduceOp));
  }
  return submit(describe(::c10d::OpType::_REDUCE_SCATTER_BASE, "iroh:reduce_scatter", inputs, outputs),
                std::move(parts), opts.timeout);
}

// all_to_all_single, functional collectives, expert parallelism
WorkPtr ProcessGroupIroh::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                                        std::vector<std::int64_t>& input_splits, const ::c10d::AllToAllOptions& opts) {
  check_tensor("alltoall_base", output);
  check_tensor("alltoall_base", input);
  const Tensors outputs = split_by("alltoall_base", output, output_splits, size_);
  const Tensors inputs = split_by("alltoall_base", input, input_splits, size_);
  std::vector<Part> parts;
  parts.push_back(gather_part("alltoall_base", Op::all_to_all, outputs, inputs, 0));
  return submit(describe(::c10d::OpType::ALLTOALL_BASE, "iroh:all_to_all", {input}, {output}), std::move(parts),
                opts.timeout);
}

// all_to_all (which gloo lacks), the backward pass of all_gather
WorkPtr ProcessGroupIroh::alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) {
  check_list_length("alltoall", "output", outputs.size(), size_);
  check_list_length("alltoall", "input", inputs.size(), size_);
  std::vector<Part> parts;
  parts.push_back(gather_part("alltoall", Op::all_to_all, outputs, inputs, 0));
  return submit(describe(::c10d::OpType::ALLTOALL, "iroh:all_to_all", inputs, outputs), std::move(parts), opts.timeout);
}

// send, isend, batch_isend_irecv, pipelining
WorkPtr ProcessGroupIroh::send(Tensors& tensors, int peer, int tag) {
  return point_to_point("send", tensors, peer, tag, ::c10d::OpType::SEND);
}

WorkPtr ProcessGroupIroh::recv(Tensors& tensors, int peer, int tag) {
  return point_to_point("recv", tensors, peer, tag, ::c10d::OpType::RECV);
}

// recv without a source
WorkPtr ProcessGroupIroh::recvAnysource(Tensors& tensors, int tag) {
  return point_to_point("recvAnysource", tensors, -1, tag, ::c10d::OpType::RECVANYSOURCE);
}

WorkPtr ProcessGroupIroh::barrier(const ::c10d::BarrierOptions& opts) {
  std::vector<Part> parts(1);
  parts.front().call.request.op = Op::barrier;
  return submit(describe(::c10d::OpType::BARRIER, "iroh:barrier", {}, {}), std::move(parts), opts.timeout);
}

}  // namespace torch_iroh::c10d_backend
