// What a forked child must not do: join threads that stayed in the parent, or wake a library whose threads did.
#pragma once

#include <unistd.h>

#include <atomic>
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

// One T for each process that asks: made on first use, never destroyed, since a process may exit while its threads are
// at work. A forked child, which has none of its parent's threads, makes its own.
template <typename T>
class PerProcess {
 public:
  using Make = std::unique_ptr<T> (*)();
  explicit constexpr PerProcess(Make make) : make_(make) {}

  T& get() {
    for (;;) {
      Owned* current = owned_.load(std::memory_order_acquire);
      if (current != nullptr && current->pid == getpid()) return *current->value;
      auto fresh = std::make_unique<Owned>(Owned{make_(), getpid()});
      if (owned_.compare_exchange_strong(current, fresh.get())) return *fresh.release()->value;
    }
  }

 private:
  struct Owned {
    std::unique_ptr<T> value;
    pid_t pid;
  };
  const Make make_;
  std::atomic<Owned*> owned_{nullptr};
};

}  // namespace torch_iroh
