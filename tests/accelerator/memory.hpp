// The simulated accelerator's memory: two allocators over malloc that behave as CUDA's caching allocators do.
//
// Device blocks belong to the stream that was current when they were made. A freed block is poisoned and offered to
// the next allocation of the same size on that stream, in the order of that stream, without asking any other stream;
// recordStream delays both until the streams it named have done what they then had. Pinned blocks wait for the
// copies that were told of them. Cached blocks stay until emptyCache.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>
#include <cstdint>

namespace simulated {

inline constexpr int poison = 0xA5;

c10::DeviceAllocator& device_memory();
c10::Allocator& pinned_memory();

std::int64_t live_allocations(int device);  // blocks that somebody holds, not cached ones
int device_of_pointer(const void* data);    // -1: not device memory
bool is_pinned(const void* data);

// A copy that has yet to read or write pinned memory; without effect for other memory. begin in the caller's thread,
// end on the stream.
void begin_pinned_use(const void* data);
void end_pinned_use(const void* data);

}  // namespace simulated
