// The simulated accelerator as torch's generic device classes see it: the guard's interface, events, hooks for pinned
// memory, and torch.ops.sim, the switches of the tests.
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <mutex>
#include <utility>
#include <vector>

#include "kernels.hpp"
#include "memory.hpp"

namespace simulated {
namespace {

constexpr auto type_here = c10::DeviceType::PrivateUse1;

StreamKey key_of(const c10::Stream& stream) {
  return {stream.device_index(), stream.id()};
}

c10::Stream stream_of(StreamKey key) {
  return c10::Stream(c10::Stream::UNSAFE, {type_here, static_cast<c10::DeviceIndex>(key.device)}, key.id);
}

int index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

// ---- events ----

class Event {
 public:
  void record(StreamKey stream) {
    auto recorded = mark(stream);
    std::lock_guard lock(mutex_);
    latest_ = std::move(recorded);
  }
  CompletionRef latest() const {
    std::lock_guard lock(mutex_);
    return latest_;
  }

 private:
  mutable std::mutex mutex_;
  CompletionRef latest_;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return type_here; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Device getDevice() const override { return {type_here, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device device) const override { exchange_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange_device(index_of(device)); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {type_here, static_cast<c10::DeviceIndex>(exchange_device(index_of(device)))};
  }

  c10::Stream getStream(c10::Device device) const override { return stream_of(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of({index_of(device), 0}); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_of(pool_stream(index_of(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_of(new_stream(index_of(device))); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream_of(exchange_stream(key_of(stream))); }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(key_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { wait_on_host(key_of(stream), Wait::stream); }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    wait_on_host(device < 0 ? current_device() : device);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device, c10::EventFlag) const override {
    TORCH_CHECK(device < 0 || device == stream.device_index(), "sim: an event of device ", static_cast<int>(device),
                " cannot be recorded on a stream of ", stream.device());
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->record(key_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait_on_stream(key_of(stream), static_cast<Event*>(event)->latest());
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->latest()->finished();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait_on_host(*static_cast<Event*>(event)->latest(), Wait::event);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    const auto start = static_cast<Event*>(from)->latest()->when();
    const auto end = static_cast<Event*>(to)->latest()->when();
    TORCH_CHECK(start && end, "sim: both events must be completed before their times are compared");
    return std::chrono::duration<double, std::milli>(*end - *start).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory().recordStream(data, stream);
  }
};

// ---- hooks ----

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }

  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  at::Device getDeviceFromPtr(void* data) const override {
    const int device = device_of_pointer(data);
    TORCH_CHECK(device >= 0, "sim: ", data, " is no device memory");
    return {type_here, static_cast<c10::DeviceIndex>(device)};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    resize_storage(storage, bytes);
  }

  // Random numbers are the CPU's.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU);
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU).clone();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

const bool hooks_registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// ---- what Python calls: tests/python/simulated.py ----

std::vector<std::int64_t> wait_counts_list() {
  const auto counts = wait_counts();
  return {counts.begin(), counts.end()};
}

TORCH_LIBRARY(sim, m) {
  m.def("set_delay(float low_ms, float high_ms, int seed) -> ()", &set_delay);
  m.def(
      "hold(int device, int stream) -> int",
      +[](std::int64_t device, std::int64_t stream) { return hold({static_cast<int>(device), stream}); });
  m.def("release(int held) -> ()", &release);
  m.def("wait_counts() -> int[]", &wait_counts_list);
  m.def("reset_wait_counts() -> ()", &reset_wait_counts);
  m.def(
      "live_allocations(int device) -> int",
      +[](std::int64_t device) { return live_allocations(static_cast<int>(device)); });
  m.def(
      "pool_stream(int device) -> int", +[](std::int64_t device) { return pool_stream(static_cast<int>(device)).id; });
}

}  // namespace
}  // namespace simulated
