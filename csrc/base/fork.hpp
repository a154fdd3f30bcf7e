// What a forked child must not do: join threads that stayed in the parent, or wake a library whose threads did.
#pragma once

#include <unistd.h>

#include <memory>
#include <utility>

namespace torch_iroh {

// Shared ownership that a forked child gives up without running any destructor.
template <typename T>
class ParentOwned {
 public:
  ParentOwned() = default;
  void assign(std::shared_ptr<T> held) {
    reset();
    held_ = std::move(held);
    owner_ = getpid();
  }
  ~ParentOwned() { reset(); }
  ParentOwned(const ParentOwned&) = delete;
  ParentOwned& operator=(const ParentOwned&) = delete;

  bool in_child() const { return getpid() != owner_; }
  void reset() {
    if (in_child()) {
      static_cast<void>(new std::shared_ptr<T>(std::move(held_)));  // leaked on purpose
    }
    held_.reset();
  }
  T* operator->() const { return held_.get(); }
  T& operator*() const { return *held_; }
  explicit operator bool() const { return held_ != nullptr; }
  const std::shared_ptr<T>& shared() const { return held_; }

 private:
  std::shared_ptr<T> held_;
  pid_t owner_ = getpid();
};

}  // namespace torch_iroh
