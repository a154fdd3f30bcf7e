// Memory that processes of one host share without a name: a sealed memfd, which others open through /proc. Nothing of
// it is in /dev/shm, and it ends with the last process that maps it, however that one ends. Linux only.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace torch_iroh::transport {

class SharedMemory {
 public:
  SharedMemory() = default;
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;

  // Zeroed. Throw Error(network) with the system's reason.
  static SharedMemory make(const char* name, std::size_t bytes);
  enum class Access { read, read_and_write };
  static SharedMemory open_of(pid_t pid, int descriptor, std::size_t bytes, Access access);

  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  int descriptor() const { return descriptor_; }
  // Afterwards no further process can open it; mappings stay.
  void close_descriptor();

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  int descriptor_ = -1;
};

// A process of this host, found by its number once: another process that gets the same number later is not taken for
// it.
class ProcessHandle {
 public:
  ProcessHandle() = default;
  explicit ProcessHandle(pid_t pid);  // throws Error(network)
  ~ProcessHandle();
  ProcessHandle(ProcessHandle&& other) noexcept;
  ProcessHandle& operator=(ProcessHandle&& other) noexcept;

  pid_t pid() const { return pid_; }
  bool ended() const;
  bool stopped() const;
  // Copies `bytes` from `address` of that process; its owner keeps that memory still. Throws Error(peer_gone).
  void read(std::uint64_t address, std::byte* to, std::size_t bytes) const;

 private:
  pid_t pid_ = -1;
  int descriptor_ = -1;
};

// Whether other processes can read these bytes of this one: not so for what a driver has mapped (a device's pinned
// memory), or for secret memory.
bool is_readable_by_others(const std::byte* bytes, std::size_t count);

// Equal for two processes exactly when they run under one kernel and see the same processes, files and network. Empty
// where that cannot be told (not Linux, no /proc).
std::string host_identity();

}  // namespace torch_iroh::transport
