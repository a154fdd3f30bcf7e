// Backend "iroh" of torch.distributed: every virtual checks, describes, submits and wraps. No algorithm, no thread; the
// work is done by collective::Group.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/fork.hpp"
#include "c10d/compression.hpp"
#include "c10d/inner.hpp"
#include "c10d/operation.hpp"
#include "c10d/options.hpp"
#include "c10d/work.hpp"
#include "collective/group.hpp"

namespace torch_iroh::c10d_backend {

// Of this process, at its end: what is in flight fails, and the others hear that this rank has left.
void leave_all_process_groups();

class ProcessGroupIroh final : public ::c10d::Backend {
 public:
  // Blocks until all ranks have met in `store`, at most options->timeout.
  ProcessGroupIroh(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size,
                   c10::intrusive_ptr<IrohOptions> options);
  ~ProcessGroupIroh() override;

  const std::string getBackendName() const override { return "iroh"; }
  // A copy: to split or merge, torch writes the new group's name and timeout into what it gets here.
  c10::intrusive_ptr<::c10d::Backend::Options> getBackendOptions() override {
    return c10::make_intrusive<IrohOptions>(*options_);
  }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  std::uint64_t getSequenceNumberForGroup() override;
  void setSequenceNumberForGroup() override {}  // every group counts from zero
  void shutdown() override;
  void abort() override;
  ::c10d::ErrorType getError() override;
  bool supportsSplitting() const override { return true; }
  // The new group's ranks are those of `ranks`, in that order; nullptr where this rank is not among them.
  c10::intrusive_ptr<::c10d::Backend> split(const c10::intrusive_ptr<::c10d::Store>& store,
                                            const std::vector<int>& ranks,
                                            const c10::intrusive_ptr<::c10d::Backend::Options>& opts) override;
  c10::intrusive_ptr<::c10d::Backend> merge(const c10::intrusive_ptr<::c10d::Store>& store,
                                            const c10::intrusive_ptr<::c10d::Backend::Options>& opts, const int& rank,
                                            const int& size) override;
  void eagerConnectSingleDevice(at::Device device) override;

  WorkPtr broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
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
  void monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // SUM or AVG of floats in place, by `codec` between sites whatever the group's option is. `residual` (torch.Tensor or
  // undefined): error feedback.
  WorkPtr compressed_all_reduce(const at::Tensor& tensor, const ::c10d::ReduceOp& reduce, const std::string& codec,
                                const std::optional<at::Tensor>& residual,
                                std::optional<std::chrono::milliseconds> timeout);
  // Whether that compresses, or is exact: equal on all ranks.
  bool compresses(const at::Tensor& tensor, const std::string& codec) const;

  collective::GroupStats stats() const;

 private:
  collective::Group& group() const;
  std::chrono::milliseconds timeout_or_default(std::chrono::milliseconds timeout) const;
  std::function<void(const std::string&)> breaks_group() const;
  Operation operation(const char* op, ::c10d::OpType type, const char* title, Tensors inputs, Tensors outputs) const;
  // `waited_for`: the caller waits before it does anything else.
  WorkPtr submit(Operation operation, std::chrono::milliseconds timeout, bool waited_for);
  WorkPtr submit_as_is(Operation operation, std::chrono::milliseconds timeout, bool waited_for);
  void complete(IrohWork::Description& description, std::chrono::milliseconds timeout, bool waited_for) const;
  void make_inner_parts(const c10::intrusive_ptr<::c10d::Store>& store, Hosts hosts, std::string prefix);
  // In parts inside and between hosts; null: `asked` goes over the group alone, and `operation` was left as it is.
  WorkPtr by_hosts(Operation& operation, const Asked& asked, std::chrono::milliseconds timeout, bool waited_for);
  WorkPtr point_to_point(const char* op, Tensors& tensors, int peer, int tag, ::c10d::OpType type);

  c10::intrusive_ptr<IrohOptions> options_;
  ParentOwned<collective::Group> group_;
  std::unique_ptr<Compressor> compressor_;
  ParentOwned<Inner> inner_;  // none: the ranks of a host use the group too
  std::atomic<std::uint64_t> sends_{0};
};

}  // namespace torch_iroh::c10d_backend
