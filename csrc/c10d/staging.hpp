// One operation's road between an accelerator and host memory: a stream of its own, pinned copies, and the events that
// keep both in order. Uses torch's generic device classes only, so one build serves every accelerator torch knows.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace torch_iroh::c10d_backend {

// dst = src, shape by shape, where one side is a list of tensors and the other the flat memory of all of them. Below
// autograd: gradients, leaves and inference tensors are all just memory here.
void copy_to_flat(const std::vector<at::Tensor>& tensors, const at::Tensor& flat, bool non_blocking);
void copy_from_flat(const at::Tensor& flat, const std::vector<at::Tensor>& tensors, bool non_blocking);

class Staging {
 public:
  // Nothing when all tensors are on the CPU. Throws RuntimeError, as gloo does, when they are on several devices, or on
  // one without data
  // ("meta").
  static std::shared_ptr<Staging> of(const char* op, const std::vector<at::Tensor>& tensors);

  explicit Staging(c10::Device device);  // its stream runs after everything the caller has issued so far

  // The allocator gives their memory to no other stream before this one is through with it.
  void use(const std::vector<at::Tensor>& tensors) const;
  // Pinned host memory for `tensors`, which stay alive until the stream is through with them.
  at::Tensor host_memory(const std::vector<at::Tensor>& tensors) const;
  void load(const std::vector<at::Tensor>& tensors, const at::Tensor& flat);

  // After the last load(): is there anything to wait for? Then wait_until_loaded() blocks the calling thread for it.
  bool end_of_loads();
  void wait_until_loaded() const { loaded_.synchronize(); }

  // The way back: what `store` enqueues, and what it completes, is on this operation's stream.
  template <typename Store>
  void write_back(Store&& store) {
    const StreamScope scope(*this);
    store();
    written_.record(stream_);
  }
  // The calling thread's current stream goes on after what was written back.
  void block_current_stream() const;

  // Memory that was allocated inside write_back() and is the caller's from now on.
  void hand_over(const at::Tensor& tensor) const;

  c10::Device device() const { return stream_.device(); }

  // Makes the operation's stream the calling thread's current one.
  class StreamScope {
   public:
    explicit StreamScope(const Staging& staging);
    ~StreamScope();
    StreamScope(const StreamScope&) = delete;
    StreamScope& operator=(const StreamScope&) = delete;

   private:
    const c10::impl::VirtualGuardImpl guard_;
    const c10::Device device_before_;
    const c10::Stream stream_before_;
  };

 private:
  const c10::impl::VirtualGuardImpl guard_;
  const c10::Stream caller_;
  const c10::Stream stream_;
  bool loads_ = false;
  c10::Event loaded_;
  c10::Event written_;
};

}  // namespace torch_iroh::c10d_backend
