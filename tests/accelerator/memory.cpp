#include "memory.hpp"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "streams.hpp"

namespace simulated {
namespace {

constexpr std::size_t granule = 512;  // as CUDA's: blocks of nearly the same size replace each other

std::size_t rounded(std::size_t bytes) {
  return (bytes + granule - 1) / granule * granule;
}

void* fresh(std::size_t bytes) {
  void* const data = std::aligned_alloc(granule, bytes);
  if (data == nullptr) throw std::bad_alloc();
  return std::memset(data, poison, bytes);
}

template <class Blocks>
auto find_block(Blocks& blocks, const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return blocks.end();
  const auto candidate = std::prev(after);
  return address - candidate->first < candidate->second.bytes ? candidate : blocks.end();
}

// ---- device memory ----

struct DeviceBlock {
  std::size_t bytes = 0;
  StreamKey owner;
  std::set<StreamKey> users;  // other streams named by recordStream
  bool live = false;
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const int device = current_device();
    const c10::Device where(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0) return {nullptr, where};
    void* const data = take(current_stream(device), rounded(bytes));
    return {data, data, &free_block, where};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    const auto stream = current_stream(current_device());
    enqueue(stream, Pace::slow, [=] { std::memcpy(target, source, bytes); });
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < device_count; ++device) wait_on_host(device);  // a freed block may be in use still
    std::lock_guard lock(mutex_);
    for (auto& [place, cached] : cache_) {
      for (void* const data : cached) {
        blocks_.erase(reinterpret_cast<std::uintptr_t>(data));
        std::free(data);
      }
    }
    cache_.clear();
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_deleter() != &free_block) return;  // empty, or somebody else's
    const StreamKey user{stream.device_index(), stream.id()};
    std::lock_guard lock(mutex_);
    auto& block = block_at(data.get_context());
    if (user != block.owner) block.users.insert(user);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    std::lock_guard lock(mutex_);
    for (const auto& [address, block] : blocks_) {
      if (block.owner.device != device) continue;
      stats.reserved_bytes[0].increase(block.bytes);
      if (!block.live) continue;
      stats.allocation[0].increase(1);
      stats.allocated_bytes[0].increase(block.bytes);
    }
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}

  std::int64_t live(int device) {
    std::lock_guard lock(mutex_);
    std::int64_t count = 0;
    for (const auto& [address, block] : blocks_) count += block.live && block.owner.device == device;
    return count;
  }

  int device_of(const void* data) {
    std::lock_guard lock(mutex_);
    const auto found = find_block(blocks_, data);
    return found == blocks_.end() ? -1 : found->second.owner.device;
  }

 private:
  static void free_block(void* data) { static_cast<DeviceMemory&>(device_memory()).give_back(data); }

  DeviceBlock& block_at(void* data) { return blocks_.at(reinterpret_cast<std::uintptr_t>(data)); }

  void* take(StreamKey stream, std::size_t bytes) {
    std::lock_guard lock(mutex_);
    auto& cached = cache_[{stream, bytes}];
    if (!cached.empty()) {
      void* const data = cached.back();
      cached.pop_back();
      block_at(data).live = true;
      return data;
    }
    void* const data = fresh(bytes);
    blocks_[reinterpret_cast<std::uintptr_t>(data)] = {bytes, stream, {}, true};
    return data;
  }

  void give_back(void* data) {
    if (is_forked()) return;
    std::unique_lock lock(mutex_);
    auto& block = block_at(data);
    block.live = false;
    const auto users = std::exchange(block.users, {});
    const auto owner = block.owner;
    const auto bytes = block.bytes;
    lock.unlock();
    if (users.empty()) return retire(data, owner, bytes);
    auto remaining = std::make_shared<std::atomic<std::size_t>>(users.size());
    for (const auto user : users) {
      enqueue(user, Pace::instant, [this, remaining, data, owner, bytes] {
        if (--*remaining == 0) retire(data, owner, bytes);
      });
    }
  }

  // First the poison is in the owner's queue, then the block is offered: its next holder's work comes after.
  void retire(void* data, StreamKey owner, std::size_t bytes) {
    enqueue(owner, Pace::instant, [=] { std::memset(data, poison, bytes); });
    std::lock_guard lock(mutex_);
    cache_[{owner, bytes}].push_back(data);
  }

  std::mutex mutex_;
  std::map<std::uintptr_t, DeviceBlock> blocks_;  // live and cached
  std::map<std::pair<StreamKey, std::size_t>, std::vector<void*>> cache_;
};

// ---- pinned host memory ----

struct PinnedBlock {
  std::size_t bytes = 0;
  int copies = 0;  // enqueued and not yet done
  bool live = false;
};

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    void* const data = take(rounded(bytes));
    return {data, data, &free_block, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

  bool holds(const void* data) {
    std::lock_guard lock(mutex_);
    const auto found = find_block(blocks_, data);
    return found != blocks_.end() && found->second.live;
  }

  void add_copies(const void* data, int change) {
    std::lock_guard lock(mutex_);
    const auto found = find_block(blocks_, data);
    if (found == blocks_.end()) return;
    found->second.copies += change;
    cache_if_unused(found);
  }

 private:
  using Blocks = std::map<std::uintptr_t, PinnedBlock>;

  static void free_block(void* data) { static_cast<PinnedMemory&>(pinned_memory()).give_back(data); }

  void* take(std::size_t bytes) {
    std::lock_guard lock(mutex_);
    auto& cached = cache_[bytes];
    if (!cached.empty()) {
      const auto block = cached.back();
      cached.pop_back();
      block->second.live = true;
      return reinterpret_cast<void*>(block->first);
    }
    void* const data = fresh(bytes);
    blocks_[reinterpret_cast<std::uintptr_t>(data)] = {bytes, 0, true};
    return data;
  }

  void give_back(void* data) {
    std::lock_guard lock(mutex_);
    const auto found = blocks_.find(reinterpret_cast<std::uintptr_t>(data));
    found->second.live = false;
    cache_if_unused(found);
  }

  void cache_if_unused(Blocks::iterator block) {
    if (block->second.live || block->second.copies > 0) return;
    std::memset(reinterpret_cast<void*>(block->first), poison, block->second.bytes);
    cache_[block->second.bytes].push_back(block);
  }

  std::mutex mutex_;
  Blocks blocks_;
  std::map<std::size_t, std::vector<Blocks::iterator>> cache_;
};

}  // namespace

// Never destroyed: a tensor may outlive the library's statics.
c10::DeviceAllocator& device_memory() {
  static auto* const instance = new DeviceMemory;
  return *instance;
}

c10::Allocator& pinned_memory() {
  static auto* const instance = new PinnedMemory;
  return *instance;
}

std::int64_t live_allocations(int device) {
  return static_cast<DeviceMemory&>(device_memory()).live(device);
}
int device_of_pointer(const void* data) {
  return static_cast<DeviceMemory&>(device_memory()).device_of(data);
}
bool is_pinned(const void* data) {
  return static_cast<PinnedMemory&>(pinned_memory()).holds(data);
}
void begin_pinned_use(const void* data) {
  static_cast<PinnedMemory&>(pinned_memory()).add_copies(data, 1);
}
void end_pinned_use(const void* data) {
  static_cast<PinnedMemory&>(pinned_memory()).add_copies(data, -1);
}

namespace {
const bool allocator_registered = (c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_memory()), true);
}

}  // namespace simulated
