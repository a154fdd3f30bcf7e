// File descriptors that close themselves, and the TUN device of a site. Linux only.
#pragma once

#include <unistd.h>

#include <string>
#include <utility>

namespace torch_iroh::lab {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~Descriptor() { reset(); }
  int get() const { return fd_; }
  void reset(int fd = -1) {
    if (fd_ >= 0) close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

// Throws std::system_error naming the call `what` if `result` is negative.
int checked(int result, const std::string& what);

// A non-blocking TUN device `wan0` that gives and takes super-frames, in the named network namespace. It is gone when
// the descriptor is closed.
Descriptor open_device(const std::string& space);

}  // namespace torch_iroh::lab
