// Lets calls through to a receiver until it is closed; closing waits for the calls that are inside.
#pragma once

#include <condition_variable>
#include <mutex>

#include "transport/transport.hpp"

namespace torch_iroh::transport {

class ReceiverGate {
 public:
  void open(Receiver& receiver) {
    const std::lock_guard lock(mutex_);
    receiver_ = &receiver;
  }

  void close() {
    std::unique_lock lock(mutex_);
    receiver_ = nullptr;
    quiet_.wait(lock, [&] { return inside_ == 0; });
  }

  template <typename Call>
  void with(Call call) {
    Receiver* receiver = nullptr;
    {
      const std::lock_guard lock(mutex_);
      receiver = receiver_;
      if (receiver == nullptr) return;
      ++inside_;
    }
    call(*receiver);
    {
      const std::lock_guard lock(mutex_);
      --inside_;
    }
    quiet_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable quiet_;
  Receiver* receiver_ = nullptr;
  int inside_ = 0;
};

}  // namespace torch_iroh::transport
