// Backend "iroh" of torch.distributed: every virtual checks, describes, submits and wraps. No algorithm, no thread; the
// work is done by collective::Group.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/fork.hpp"
#include "c10d/options.hpp"
#include "c10d/work.hpp"
#include "collective/group.hpp"

namespace torch_iroh::c10d_backend {

using WorkPtr = c10::intrusive_ptr<::c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;

class ProcessGroupIroh final : public ::c10d::Backend {
 public:
  // Blocks until all ranks have met in `store`, at most options->timeout.
  ProcessGroupIroh(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size,
                   c10::intrusive_ptr<IrohOptions> options);
  ~ProcessGroupIroh() override;

  const std::string getBackendName() const override { return "iroh"; }
  c10::intrusive_ptr<::c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  std::uint64_t getSequenceNumberForGroup() override;
  void setSequenceNumberForGroup() override {}  // every group counts from zero
  void shutdown() override;
  void abort() override;
  ::c10d::ErrorType getError() override;

  WorkPtr broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits, const ::c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) override;
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const ::c10d::BarrierOptions& opts) override;

  collective::GroupStats stats() const;

 private:
  struct Part {  // one collective of the core
    collective::CollectiveCall call;
    std::function<void()> after;
  };

  collective::Group& group() const;
  std::chrono::milliseconds timeout_or_default(std::chrono::milliseconds timeout) const;
  WorkPtr submit(IrohWork::Description description, std::vector<Part> parts, std::chrono::milliseconds timeout);
  WorkPtr point_to_point(const char* op, Tensors& tensors, int peer, int tag, ::c10d::OpType type);

  // The collectives, each on one tensor or list of tensors.
  Part reduce_part(const char* op, collective::Op kind, const at::Tensor& tensor, const ::c10d::ReduceOp& reduce,
                   int root) const;
  Part gather_part(const char* op, collective::Op kind, const Tensors& outputs, const Tensors& inputs, int root) const;
  Part reduce_scatter_part(const char* op, const at::Tensor& output, const Tensors& inputs,
                           const ::c10d::ReduceOp& reduce) const;
  Tensors split_evenly(const char* op, const char* what, const at::Tensor& whole, const at::Tensor& block) const;

  c10::intrusive_ptr<IrohOptions> options_;
  ParentOwned<collective::Group> group_;
};

}  // namespace torch_iroh::c10d_backend
