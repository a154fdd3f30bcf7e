// The one thread of a process that works for what shares memory with other processes, when no caller does.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/time.hpp"
#include "transport/doorbell.hpp"

namespace torch_iroh::transport {

class Attended {
 public:
  virtual ~Attended() = default;
  // Goes on as far as it can, unless another thread is at it. Until when it can wait for this process's doorbell;
  // nullopt: nothing is left to do, until somebody asks to be attended to again.
  virtual std::optional<TimePoint> advance_if_free() = 0;
  virtual News waits_for() const = 0;
};

class HostDriver {
 public:
  static HostDriver& own();

  void attend(std::shared_ptr<Attended> one);  // the first starts the thread

 private:
  struct Taken {
    std::vector<std::shared_ptr<Attended>> attended;
    std::uint32_t heard = 0;
  };

  void run();
  Taken take();

  std::mutex mutex_;
  std::condition_variable asked_;
  std::vector<std::shared_ptr<Attended>> attended_;
  std::thread thread_;  // never joined: it lives as long as its process, like all that PerProcess keeps
};

}  // namespace torch_iroh::transport
