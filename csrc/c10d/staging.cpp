#include "c10d/staging.hpp"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace torch_iroh::c10d_backend {
namespace {

template <typename Copy>
void for_each_part(const std::vector<at::Tensor>& tensors, const at::Tensor& flat, const Copy& copy) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  std::int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor part = flat.narrow(0, offset, tensor.numel()).view(tensor.sizes());
    copy(tensor, part);
    offset += tensor.numel();
  }
}

}  // namespace

void copy_to_flat(const std::vector<at::Tensor>& tensors, const at::Tensor& flat, bool non_blocking) {
  for_each_part(tensors, flat,
                [&](const at::Tensor& tensor, const at::Tensor& part) { part.copy_(tensor, non_blocking); });
}

void copy_from_flat(const at::Tensor& flat, const std::vector<at::Tensor>& tensors, bool non_blocking) {
  for_each_part(tensors, flat,
                [&](const at::Tensor& tensor, const at::Tensor& part) { tensor.copy_(part, non_blocking); });
}

std::shared_ptr<Staging> Staging::of(const char* op, const std::vector<at::Tensor>& tensors) {
  if (tensors.empty() || !tensors.front().defined()) return nullptr;
  const c10::Device device = tensors.front().device();
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.defined() && tensor.device() == device, "ProcessGroupIroh::", op,
                ": tensors should be on the same device, got ", device, " and ",
                tensor.defined() ? tensor.device().str() : "an undefined tensor");
  }
  if (device.is_cpu()) return nullptr;
  TORCH_CHECK(c10::impl::hasDeviceGuardImpl(device.type()) && device.type() != c10::DeviceType::Meta,
              "ProcessGroupIroh::", op, ": tensors on device ", device, " hold no data that can be moved");
  return std::make_shared<Staging>(device);
}

Staging::Staging(c10::Device device)
    : guard_(device.type()),
      caller_(guard_.getStream(device)),
      stream_(guard_.getStreamFromGlobalPool(device)),
      loaded_(device.type()),
      written_(device.type()) {
  c10::Event issued(device.type());
  issued.record(caller_);
  issued.block(stream_);
}

void Staging::use(const std::vector<at::Tensor>& tensors) const {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) guard_.recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
  }
}

at::Tensor Staging::host_memory(const std::vector<at::Tensor>& tensors) const {
  use(tensors);
  std::int64_t total = 0;
  for (const at::Tensor& tensor : tensors) total += tensor.numel();
  return at::empty({total}, at::TensorOptions().dtype(tensors.front().dtype()).device(at::kCPU).pinned_memory(true));
}

void Staging::load(const std::vector<at::Tensor>& tensors, const at::Tensor& flat) {
  const StreamScope scope(*this);
  copy_to_flat(tensors, flat, true);
  loads_ = true;
}

bool Staging::end_of_loads() {
  if (loads_) loaded_.record(stream_);
  return loads_;
}

void Staging::hand_over(const at::Tensor& tensor) const {
  guard_.recordDataPtrOnStream(tensor.storage().data_ptr(), caller_);
}

void Staging::block_current_stream() const {
  written_.block(guard_.getStream(device()));
}

Staging::StreamScope::StreamScope(const Staging& staging)
    : guard_(staging.guard_),
      device_before_(guard_.exchangeDevice(staging.device())),
      stream_before_(guard_.exchangeStream(staging.stream_)) {}

Staging::StreamScope::~StreamScope() {
  guard_.exchangeStream(stream_before_);
  guard_.uncheckedSetDevice(device_before_);
}

}  // namespace torch_iroh::c10d_backend
