// What the simulated accelerator's operators share: views of device memory for the CPU's kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include "streams.hpp"

namespace simulated {

inline bool is_simulated(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// A CPU tensor over the same memory that owns nothing: as a kernel's pointer, it is good only while the stream's order
// and record_stream keep the memory.
at::Tensor host_view(const at::Tensor& tensor);

// Keeps what fits, in the order of the current stream.
void resize_storage(const c10::Storage& storage, std::size_t bytes);

StreamKey current_stream_of(const at::Tensor& tensor);

// Runs `kernel`, which sees CPU tensors only, on the stream; the caller's thread does not wait.
void launch(StreamKey stream, std::function<void()> kernel);

// Below autograd and tracing, as on a device.
void run_kernel(const std::function<void()>& kernel);

}  // namespace simulated
