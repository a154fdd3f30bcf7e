// The simulated accelerator's own operators: factories, views, copies, storage. Computing is fallback.cpp's business.
#include "kernels.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <utility>

#include "memory.hpp"

namespace simulated {

at::Tensor host_view(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::DeviceType::CPU);
  // data_ptr() would ask for a mutable pointer; a kernel's arguments do not say here who writes.
  auto view = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

StreamKey current_stream_of(const at::Tensor& tensor) {
  return current_stream(tensor.device().index());
}

void run_kernel(const std::function<void()>& kernel) {
  const at::AutoDispatchBelowADInplaceOrView below;
  kernel();
}

void launch(StreamKey stream, std::function<void()> kernel) {
  enqueue(stream, Pace::slow, [kernel = std::move(kernel)] { run_kernel(kernel); });
}

namespace {

// ---- factories ----

void check_options(std::optional<at::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "sim: only dense tensors");
  TORCH_CHECK(!pin_memory.value_or(false), "sim: only CPU tensors can be pinned");
}

// Without an index: the current device's.
c10::Device chosen(std::optional<c10::Device> device) {
  const auto current = static_cast<c10::DeviceIndex>(current_device());
  return {c10::DeviceType::PrivateUse1, device && device->has_index() ? device->index() : current};
}

constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<c10::Device> device, std::optional<bool> pin_memory,
                 std::optional<at::MemoryFormat> format) {
  check_options(layout, pin_memory);
  const c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_generic(sizes, &device_memory(), keys, at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> layout, std::optional<c10::Device> device,
                         std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  const c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_strided_generic(sizes, strides, &device_memory(), keys, at::dtype_or_default(dtype));
}

// ---- copies ----

// Between devices the source's stream copies, ordered after and before what the target's device does.
void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  const auto source = current_stream_of(from);
  const auto target = current_stream_of(to);
  if (source != target) wait_on_stream(source, mark(target));
  launch(source, [from = host_view(from), to = host_view(to)] { to.copy_(from); });
  if (source != target) wait_on_stream(target, mark(source));
}

void copy_with_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto stream = current_stream_of(is_simulated(from) ? from : to);
  const void* const host = (is_simulated(from) ? to : from).const_data_ptr();
  begin_pinned_use(host);
  launch(stream, [from = host_view(from), to = host_view(to), host] {
    to.copy_(from);
    end_pinned_use(host);
  });
  if (!non_blocking || !is_pinned(host)) wait_on_host(stream, Wait::copy);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const auto expanded = from.expand(to.sizes());
  if (is_simulated(from) && is_simulated(to)) {
    copy_between_devices(expanded, to);
  } else {
    copy_with_host(expanded, to, non_blocking);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  wait_on_host(current_stream_of(tensor), Wait::scalar);
  return host_view(tensor).item();
}

// ---- storage ----

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format.value_or(at::MemoryFormat::Contiguous) != at::MemoryFormat::Preserve && format) {
    impl->empty_tensor_restride(*format);
  }
  const auto bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(),
                                                      static_cast<std::size_t>(self.storage_offset()));
  if (self.numel() > 0 && bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, std::int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  at::native::checkSetStorage(self, source, offset, sizes, strides);
  auto* const impl = self.unsafeGetTensorImpl();
  if (strides.data() == nullptr) {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset);
  }
  return self;
}

at::Tensor& set_to_nothing(at::Tensor& self) {
  const auto nothing = empty({0}, self.scalar_type(), std::nullopt, self.device(), std::nullopt, std::nullopt);
  return set_storage(self, nothing.storage(), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_memory().recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &set_to_nothing);
  m.impl("record_stream", &record_stream);
  // Views change no memory: the CPU's serve.
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
}

// The lazy conjugate and negative are copied as such: resolving them first is done by a copy, which would come here.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace

void resize_storage(const c10::Storage& storage, std::size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  auto grown = device_memory().allocate(bytes);
  const std::size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) device_memory().copy_data(grown.get(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(grown));  // the old block is freed in stream order
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

}  // namespace simulated
