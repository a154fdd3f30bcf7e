// The collectives among the virtuals of ProcessGroupIroh, and what each asks of the core. A comment names who in torch
// calls it.
#include <utility>

#include <ATen/ATen.h>

#include "c10d/operation.hpp"
#include "c10d/process_group.hpp"
#include "c10d/tensors.hpp"

namespace torch_iroh::c10d_backend {
namespace {

using collective::Op;

const Tensors& only_list(const char* op, const TensorLists& lists) {
  TORCH_CHECK(lists.size() == 1, "ProcessGroupIroh::", op, ": requires a single-element list of tensor lists, ", "got ",
              lists.size());
  return lists.front();
}

void check_list_length(const char* op, const char* what, std::size_t length, int world) {
  TORCH_CHECK(length == static_cast<std::size_t>(world), "ProcessGroupIroh::", op, ": incorrect ", what, " list size ",
              length, ", must be the world size ", world);
}

void check_not_root(const char* op, const char* what, bool empty) {
  TORCH_CHECK(empty, "ProcessGroupIroh::", op, ": requires an empty ", what, " on ranks other than the root");
}

void check_pairs(const char* op, const Tensors& outputs, const Tensors& inputs) {
  TORCH_CHECK(outputs.size() == inputs.size(), "ProcessGroupIroh::", op, ": ", outputs.size(), " outputs for ",
              inputs.size(), " inputs");
}

Tensors flatten(const TensorLists& lists) {
  Tensors all;
  for (const Tensors& tensors : lists) all.insert(all.end(), tensors.begin(), tensors.end());
  return all;
}

}  // namespace

Operation ProcessGroupIroh::operation(const char* op, ::c10d::OpType type, const char* title, Tensors inputs,
                                      Tensors outputs) const {
  return {op, rank_, size_, type, title, std::move(inputs), std::move(outputs)};
}

// DDP (start, buffers), ZeRO, functional collectives, object lists, checkpoints
WorkPtr ProcessGroupIroh::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = only_tensor("broadcast", tensors);
  check_rank("broadcast", "root", opts.rootRank, size_);
  Operation all = operation("broadcast", ::c10d::OpType::BROADCAST, "iroh:broadcast", tensors, tensors);
  const Asked asked{Op::broadcast, tensors, tensors, {}, static_cast<int>(opts.rootRank)};
  if (auto work = by_hosts(all, asked, opts.timeout, !opts.asyncOp)) return work;
  all.add_reduce(Op::broadcast, tensor, {}, static_cast<int>(opts.rootRank));
  return submit(std::move(all), opts.timeout, !opts.asyncOp);
}

// DDP buckets and comm hooks, FSDP, DTensor, functional collectives; sparse embeddings' gradients too
WorkPtr ProcessGroupIroh::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors.front().defined() && tensors.front().layout() != at::kStrided) {
    return allreduce_sparse(tensors, opts);
  }
  const at::Tensor& tensor = only_tensor("allreduce", tensors);
  Operation all = operation("allreduce", ::c10d::OpType::ALLREDUCE, "iroh:all_reduce", tensors, tensors);
  const Asked asked{Op::all_reduce, tensors, tensors, opts.reduceOp};
  if (auto work = by_hosts(all, asked, opts.timeout, !opts.asyncOp)) return work;
  all.add_reduce(Op::all_reduce, tensor, opts.reduceOp, 0);
  return submit(std::move(all), opts.timeout, !opts.asyncOp);
}

WorkPtr ProcessGroupIroh::allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  TORCH_CHECK(tensors.size() == 1, "ProcessGroupIroh::allreduce: requires a single-element tensor list, got ",
              tensors.size());
  Operation all = operation("allreduce", ::c10d::OpType::_ALLREDUCE_SPARSE, "iroh:all_reduce", tensors, tensors);
  all.add_sparse_all_reduce(tensors.front(), opts.reduceOp);
  return submit(std::move(all), opts.timeout, !opts.asyncOp);
}

// all_reduce_coalesced, the coalescing manager, functional collectives
WorkPtr ProcessGroupIroh::allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) {
  constexpr const char* op = "allreduce_coalesced";
  Operation all = operation(op, ::c10d::OpType::ALLREDUCE_COALESCED, "iroh:all_reduce", tensors, tensors);
  if (tensors.size() == 1) {
    const Asked asked{Op::all_reduce, tensors, tensors, opts.reduceOp};
    if (auto work = by_hosts(all, asked, opts.timeout, !opts.asyncOp)) return work;
  }
  for (const at::Tensor& tensor : tensors) {
    check_tensor(op, tensor);
    all.add_reduce(Op::all_reduce, tensor, opts.reduceOp, 0);
  }
  return submit(std::move(all), opts.timeout, !opts.asyncOp);
}

WorkPtr ProcessGroupIroh::reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = only_tensor("reduce", tensors);
  check_rank("reduce", "root", opts.rootRank, size_);
  Operation all = operation("reduce", ::c10d::OpType::REDUCE, "iroh:reduce", tensors, tensors);
  const Asked asked{Op::reduce, tensors, tensors, opts.reduceOp, static_cast<int>(opts.rootRank)};
  if (auto work = by_hosts(all, asked, opts.timeout, !opts.asyncOp)) return work;
  all.add_reduce(Op::reduce, tensor, opts.reduceOp, static_cast<int>(opts.rootRank));
  return submit(std::move(all), opts.timeout, !opts.asyncOp);
}

// object collectives, DDP verify, FSDP1 on CPU, ZeRO, checkpoints
WorkPtr ProcessGroupIroh::allgather(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) {
  only_tensor("allgather", inputs);
  const Tensors& list = only_list("allgather", outputs);
  check_list_length("allgather", "output", list.size(), size_);
  Operation all = operation("allgather", ::c10d::OpType::ALLGATHER, "iroh:all_gather", inputs, list);
  all.give_lists(outputs);
  if (auto work = by_hosts(all, {Op::all_gather, list, inputs}, opts.timeout, !opts.asyncOp)) return work;
  all.add_gather(Op::all_gather, list, inputs, 0);
  return submit(std::move(all), opts.timeout, !opts.asyncOp);
}

// all_gather_into_tensor, FSDP2 forward
WorkPtr ProcessGroupIroh::_allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

WorkPtr ProcessGroupIroh::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                              const ::c10d::AllgatherOptions& opts) {
  constexpr const char* op = "allgather_coalesced";
  check_list_length(op, "output", outputs.size(), size_);
  Operation all = operation(op, ::c10d::OpType::COALESCED, "iroh:all_gather", inputs, flatten(outputs));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors list;  // outputs[rank][i]
    for (const Tensors& of_rank : outputs) {
      TORCH_CHECK(of_rank.size() == inputs.size(), "ProcessGroupIroh::allgather_coalesced: a rank's list has ",
                  of_rank.size(), " tensors where the input has ", inputs.size());
      list.push_back(of_rank[i]);
    }
    all.add_gather(Op::all_gather, list, {inputs[i]}, 0);
  }
  all.give_lists(outputs);
  return submit(std::move(all), opts.timeout, !opts.asyncOp);
}

// every functional all-gather (DTensor, compile), the coalescing manager
WorkPtr ProcessGroupIroh::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const ::c10d::AllgatherOptions& opts) {
  constexpr const char* op = "allgather_into_tensor";
  check_pairs(op, outputs, inputs);
  Operation all = operation(op, ::c10d::OpType::_ALLGATHER_BASE, "iroh:all_gather", inputs, outputs);
  if (inputs.size() == 1) {
    if (auto work = by_hosts(all, {Op::all_gather, outputs, inputs}, opts.timeout, !opts.asyncOp)) return work;
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    all.add_gather(Op::all_gather, all.split_evenly("the output", outputs[i], inputs[i]), {inputs[i]}, 0);
  }
  return submit(std::move(all), opts.timeout, !opts.asyncOp);
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
  Operation all = operation("gather", ::c10d::OpType::GATHER, "iroh:gather", inputs, list);
  all.add_gather(Op::gather, list, inputs, static_cast<int>(opts.rootRank));
  return submit(std::move(all), opts.timeout, !opts.asyncOp);
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
  Operation all = operation("scatter", ::c10d::OpType::SCATTER, "iroh:scatter", list, outputs);
  all.add_gather(Op::scatter, outputs, list, static_cast<int>(opts.rootRank));
  return submit(std::move(all), opts.timeout, !opts.asyncOp);
}

WorkPtr ProcessGroupIroh::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                         const ::c10d::ReduceScatterOptions& opts) {
  constexpr const char* op = "reduce_scatter";
  const at::Tensor& output = only_tensor(op, outputs);
  const Tensors& list = only_list(op, inputs);
  check_list_length(op, "input", list.size(), size_);
  Operation all = operation(op, ::c10d::OpType::REDUCE_SCATTER, "iroh:reduce_scatter", list, outputs);
  const Asked asked{Op::reduce_scatter, outputs, list, opts.reduceOp};
  if (auto work = by_hosts(all, asked, opts.timeout, !opts.asyncOp)) return work;
  all.add_reduce_scatter(output, list, opts.reduceOp);
  return submit(std::move(all), opts.timeout, !opts.asyncOp);
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
  check_pairs(op, outputs, inputs);
  Operation all = operation(op, ::c10d::OpType::_REDUCE_SCATTER_BASE, "iroh:reduce_scatter", inputs, outputs);
  if (inputs.size() == 1) {
    const Asked asked{Op::reduce_scatter, outputs, inputs, opts.reduceOp};
    if (auto work = by_hosts(all, asked, opts.timeout, !opts.asyncOp)) return work;
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    all.add_reduce_scatter(outputs[i], all.split_evenly("the input", inputs[i], outputs[i]), opts.reduceOp);
  }
  return submit(std::move(all), opts.timeout, !opts.asyncOp);
}

// all_to_all_single, functional collectives, expert parallelism
WorkPtr ProcessGroupIroh::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                                        std::vector<std::int64_t>& input_splits, const ::c10d::AllToAllOptions& opts) {
  constexpr const char* op = "alltoall_base";
  check_tensor(op, output);
  check_tensor(op, input);
  Operation all = operation(op, ::c10d::OpType::ALLTOALL_BASE, "iroh:all_to_all", {input}, {output});
  all.add_gather(Op::all_to_all, all.split_by(output, output_splits), all.split_by(input, input_splits), 0);
  return submit(std::move(all), opts.timeout, !opts.asyncOp);
}

// all_to_all (which gloo lacks), the backward pass of all_gather
WorkPtr ProcessGroupIroh::alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) {
  check_list_length("alltoall", "output", outputs.size(), size_);
  check_list_length("alltoall", "input", inputs.size(), size_);
  Operation all = operation("alltoall", ::c10d::OpType::ALLTOALL, "iroh:all_to_all", inputs, outputs);
  all.add_gather(Op::all_to_all, outputs, inputs, 0);
  return submit(std::move(all), opts.timeout, !opts.asyncOp);
}

WorkPtr ProcessGroupIroh::barrier(const ::c10d::BarrierOptions& opts) {
  Operation all = operation("barrier", ::c10d::OpType::BARRIER, "iroh:barrier", {}, {});
  all.add_barrier();
  return submit(std::move(all), opts.timeout, !opts.asyncOp);
}

}  // namespace torch_iroh::c10d_backend
