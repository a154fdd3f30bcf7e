// Stands in for NCCL on the simulated accelerator: a backend for device tensors that works behind the caller's stream
// on one of its own, and is done when that stream is. The bytes are gloo's business, which Python hands over.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <optional>
#include <utility>
#include <vector>

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class StreamScope {
 public:
  explicit StreamScope(c10::Stream stream) : guard_(stream.device_type()), before_(guard_.exchangeStream(stream)) {}
  ~StreamScope() { guard_.exchangeStream(before_); }
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream before_;
};

class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(c10::Stream stream, Tensors kept) : stream_(stream), done_(stream.device_type()), kept_(std::move(kept)) {
    done_.record(stream_);
    const StreamScope scope(stream_);
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{stream_.device()});
    future_->markCompleted(c10::IValue(kept_));
  }
  bool wait(std::chrono::milliseconds) override {
    done_.block(c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device()));
    kept_.clear();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::Stream stream_;
  c10::Event done_;
  Tensors kept_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class DeviceInner final : public c10d::Backend {
 public:
  explicit DeviceInner(c10::intrusive_ptr<c10d::Backend> cpu)
      : c10d::Backend(cpu->getRank(), cpu->getSize()), cpu_(std::move(cpu)) {}

  const std::string getBackendName() const override { return "device_inner"; }
  void abort() override { cpu_->abort(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return run(tensors, tensors, [&](Tensors& out, Tensors&) { cpu_->broadcast(out, opts)->wait(); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return run(tensors, tensors, [&](Tensors& out, Tensors&) { cpu_->reduce(out, opts)->wait(); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return run({output}, {input},
               [&](Tensors& out, Tensors& in) { cpu_->_allgather_base(out[0], in[0], opts)->wait(); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return run({output}, {input},
               [&](Tensors& out, Tensors& in) { cpu_->_reduce_scatter_base(out[0], in[0], opts)->wait(); });
  }

 private:
  template <typename Run>
  WorkPtr run(const Tensors& outputs, const Tensors& inputs, const Run& call) {
    const c10::Device device = outputs.front().device();
    TORCH_CHECK(!device.is_cpu(), "device_inner: a tensor on the CPU");
    const c10::impl::VirtualGuardImpl guard(device.type());
    c10::Event issued(device.type());
    issued.record(guard.getStream(device));
    const c10::Stream stream = guard.getStreamFromGlobalPool(device);
    issued.block(stream);
    const StreamScope scope(stream);
    const auto to_host = [](const Tensors& tensors) {
      Tensors host;
      for (const at::Tensor& tensor : tensors) {
        host.push_back(at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true)));
        host.back().copy_(tensor, true);
      }
      return host;
    };
    Tensors in = to_host(inputs);
    Tensors out = to_host(outputs);
    guard.synchronizeStream(stream);
    call(out, in);
    for (std::size_t i = 0; i < outputs.size(); ++i) at::Tensor(outputs[i]).copy_(out[i], true);
    // As NCCL's: alive until somebody's stream waits.
    Tensors kept = outputs;
    kept.insert(kept.end(), inputs.begin(), inputs.end());
    return c10::make_intrusive<DeviceWork>(stream, std::move(kept));
  }

  c10::intrusive_ptr<c10d::Backend> cpu_;
};

}  // namespace

PYBIND11_MODULE(device_inner, module) {
  py::module_::import("torch._C._distributed_c10d");
  py::class_<DeviceInner, c10d::Backend, c10::intrusive_ptr<DeviceInner>>(module, "DeviceInner")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
}
