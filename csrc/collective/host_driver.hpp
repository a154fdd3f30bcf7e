// The one thread of a process that works for groups of shared memory when no caller does.
#pragma once

#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "collective/host_queue.hpp"

namespace torch_iroh::collective {

class HostDriver {
 public:
  static HostDriver& own();  // started by the first operation that nobody waits for
  HostDriver();

  void attend(std::shared_ptr<HostQueue> queue);

 private:
  void run();

  std::mutex mutex_;
  std::vector<std::shared_ptr<HostQueue>> attended_;
  std::thread thread_;
};

}  // namespace torch_iroh::collective
