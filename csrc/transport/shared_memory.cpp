#include "transport/shared_memory.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.hpp"

#ifdef __linux__
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <fstream>
#endif

namespace torch_iroh::transport {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorKind::network, what + ": " + std::strerror(errno));
}

}  // namespace

SharedMemory::SharedMemory(SharedMemory&& other) noexcept {
  *this = std::move(other);
}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

ProcessHandle::ProcessHandle(ProcessHandle&& other) noexcept {
  *this = std::move(other);
}

ProcessHandle& ProcessHandle::operator=(ProcessHandle&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

#ifdef __linux__

namespace {

// A mapping that could shrink under its reader would end it with SIGBUS.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::byte* map(int descriptor, std::size_t bytes, int protection) {
  void* const data = mmap(nullptr, bytes, protection, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) refuse("cannot map shared memory of " + std::to_string(bytes) + " bytes");
  return static_cast<std::byte*>(data);
}

}  // namespace

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
  close_descriptor();
}

SharedMemory SharedMemory::make(const char* name, std::size_t bytes) {
  SharedMemory made;
  made.descriptor_ = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (made.descriptor_ < 0) refuse("cannot make shared memory");
  if (ftruncate(made.descriptor_, static_cast<off_t>(bytes)) != 0) refuse("cannot size shared memory");
  if (fcntl(made.descriptor_, F_ADD_SEALS, kSeals) != 0) refuse("cannot seal shared memory");
  made.data_ = map(made.descriptor_, bytes, PROT_READ | PROT_WRITE);
  made.bytes_ = bytes;
  return made;
}

SharedMemory SharedMemory::open_of(pid_t pid, int descriptor, std::size_t bytes, Access access) {
  const bool writes = access == Access::read_and_write;
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  SharedMemory opened;
  opened.descriptor_ = open(path.c_str(), (writes ? O_RDWR : O_RDONLY) | O_CLOEXEC);
  if (opened.descriptor_ < 0) refuse("cannot open " + path);
  struct stat status{};
  if (fstat(opened.descriptor_, &status) != 0) refuse("cannot look at " + path);
  if (status.st_size != static_cast<off_t>(bytes) || (fcntl(opened.descriptor_, F_GET_SEALS) & kSeals) != kSeals) {
    throw Error(ErrorKind::protocol, path + " is not memory that torch-iroh shares");
  }
  opened.data_ = map(opened.descriptor_, bytes, writes ? PROT_READ | PROT_WRITE : PROT_READ);
  opened.bytes_ = bytes;
  opened.close_descriptor();
  return opened;
}

void SharedMemory::close_descriptor() {
  if (descriptor_ >= 0) close(std::exchange(descriptor_, -1));
}

ProcessHandle::ProcessHandle(pid_t pid) : pid_(pid), descriptor_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {
  if (descriptor_ < 0) refuse("cannot watch process " + std::to_string(pid));
}

ProcessHandle::~ProcessHandle() {
  if (descriptor_ >= 0) close(descriptor_);
}

bool ProcessHandle::ended() const {
  pollfd watched{descriptor_, POLLIN, 0};
  return poll(&watched, 1, 0) > 0;
}

bool ProcessHandle::stopped() const {
  std::ifstream file("/proc/" + std::to_string(pid_) + "/stat");
  std::string line;
  std::getline(file, line);
  // "pid (name) state ...", and a name may hold anything.
  const auto name_end = line.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= line.size()) return false;
  const char state = line[name_end + 2];
  return state == 'T' || state == 't';
}

void ProcessHandle::read(std::uint64_t address, std::byte* to, std::size_t bytes) const {
  while (bytes > 0) {
    // One call takes less than 2 GiB.
    const std::size_t most = std::min(bytes, std::size_t{1} << 30);
    const iovec local{to, most};
    const iovec remote{reinterpret_cast<void*>(address), most};
    const ssize_t got = process_vm_readv(pid_, &local, 1, &remote, 1, 0);
    if (got <= 0) {
      throw Error(ErrorKind::peer_gone, "cannot read the memory of process " + std::to_string(pid_) + ": " +
                                            (got == 0 ? "nothing came" : std::strerror(errno)));
    }
    to += got;
    address += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
  // Then another process may have had its number, and these bytes.
  if (ended()) throw Error(ErrorKind::peer_gone, "process " + std::to_string(pid_) + " ended");
}

bool is_readable_by_others(const std::byte* bytes, std::size_t count) {
  if (count == 0) return true;
  std::byte ends[2] = {};
  const iovec local{ends, sizeof ends};
  const iovec remote[2] = {{const_cast<std::byte*>(bytes), 1}, {const_cast<std::byte*>(bytes + count - 1), 1}};
  return process_vm_readv(getpid(), &local, 1, remote, 2, 0) == sizeof ends;
}

std::string host_identity() {
  std::string identity;
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  if (!std::getline(boot, identity) || identity.empty()) return "";
  for (const char* space : {"pid", "ipc", "mnt", "net", "user"}) {
    struct stat status{};
    if (stat((std::string("/proc/self/ns/") + space).c_str(), &status) != 0) return "";
    identity += "/" + std::to_string(status.st_ino);
  }
  return identity + "/" + std::to_string(geteuid());
}

#else

SharedMemory::~SharedMemory() = default;
SharedMemory SharedMemory::make(const char*, std::size_t) {
  throw Error(ErrorKind::network, "shared memory between processes needs Linux");
}
SharedMemory SharedMemory::open_of(pid_t, int, std::size_t, Access) {
  throw Error(ErrorKind::network, "shared memory between processes needs Linux");
}
void SharedMemory::close_descriptor() {}
ProcessHandle::ProcessHandle(pid_t) {
  throw Error(ErrorKind::network, "watching another process needs Linux");
}
ProcessHandle::~ProcessHandle() = default;
bool ProcessHandle::ended() const {
  return false;
}
bool ProcessHandle::stopped() const {
  return false;
}
void ProcessHandle::read(std::uint64_t, std::byte*, std::size_t) const {
  throw Error(ErrorKind::network, "reading another process needs Linux");
}
bool is_readable_by_others(const std::byte*, std::size_t) {
  return false;
}
std::string host_identity() {
  return "";
}

#endif

}  // namespace torch_iroh::transport
