// Bounds what has been received and not looked at yet. A thread that brings more waits, which slows its sender down;
// the strand that empties the inbox never waits for such a thread.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace torch_iroh::collective {

class Inbox {
 public:
  explicit Inbox(bool bounded) : bounded_(bounded) {}

  // False once closed. One item always fits.
  bool enter(std::size_t bytes) {
    std::unique_lock lock(mutex_);
    room_.wait(lock, [&] {
      return closed_ || !bounded_ || items_ == 0 || (held_ + bytes <= kMostBytes && items_ < kMostItems);
    });
    if (closed_) return false;
    held_ += bytes;
    ++items_;
    return true;
  }

  void leave(std::size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      held_ -= bytes;
      --items_;
    }
    room_.notify_one();
  }

  void close() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    room_.notify_all();
  }

 private:
  static constexpr std::size_t kMostBytes = 16 << 20;
  static constexpr std::size_t kMostItems = 4096;

  const bool bounded_;
  std::mutex mutex_;
  std::condition_variable room_;
  std::size_t held_ = 0;
  std::size_t items_ = 0;
  bool closed_ = false;
};

}  // namespace torch_iroh::collective
