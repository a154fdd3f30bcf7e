#include "collective/host_driver.hpp"

#include <algorithm>
#include <utility>

#include "base/fork.hpp"
#include "transport/doorbell.hpp"

namespace torch_iroh::collective {

HostDriver& HostDriver::own() {
  static PerProcess<HostDriver> shared([] { return std::make_unique<HostDriver>(); });
  return shared.get();
}

// Never joined: like all that PerProcess makes, it lives as long as its process.
HostDriver::HostDriver() : thread_([this] { run(); }) {}

void HostDriver::attend(std::shared_ptr<HostQueue> queue) {
  {
    const std::lock_guard lock(mutex_);
    if (std::find(attended_.begin(), attended_.end(), queue) == attended_.end()) attended_.push_back(std::move(queue));
  }
  transport::Doorbell::own().ring();
}

void HostDriver::run() {
  auto& bell = transport::Doorbell::own();
  for (;;) {
    const auto heard = bell.heard();
    std::vector<std::shared_ptr<HostQueue>> queues;
    {
      const std::lock_guard lock(mutex_);
      queues.swap(attended_);  // whoever asks from here on is put in anew
    }
    TimePoint until = kNever;
    for (auto& queue : queues) {
      const auto again = queue->advance_if_free();
      if (!again) continue;
      until = std::min(until, *again);
      const std::lock_guard lock(mutex_);
      if (std::find(attended_.begin(), attended_.end(), queue) == attended_.end()) attended_.push_back(queue);
    }
    queues.clear();  // not while asleep: this may be the last reference
    bell.wait(heard, until);
  }
}

}  // namespace torch_iroh::collective
