#include "transport/host_driver.hpp"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/fork.hpp"
#include "base/log.hpp"

namespace torch_iroh::transport {

HostDriver& HostDriver::own() {
  static PerProcess<HostDriver> shared([] { return std::make_unique<HostDriver>(); });
  return shared.get();
}

void HostDriver::attend(std::shared_ptr<Attended> one) {
  {
    const std::lock_guard lock(mutex_);
    if (std::find(attended_.begin(), attended_.end(), one) == attended_.end()) attended_.push_back(std::move(one));
    // Not in the constructor: of two that are made at once, one is dropped.
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  asked_.notify_one();
  Doorbell::own().ring(News::messages);
}

// Whoever asks from here on is put in anew, and rings. With nobody to attend to, the doorbell is none of this thread's
// business: callers that do their own work would pay for waking it.
HostDriver::Taken HostDriver::take() {
  std::unique_lock lock(mutex_);
  asked_.wait(lock, [this] { return !attended_.empty(); });
  const auto heard = Doorbell::own().heard();
  return {std::exchange(attended_, {}), heard};
}

void HostDriver::run() {
  for (;;) {
    Taken taken = take();
    TimePoint until = kNever;
    auto news = static_cast<std::uint32_t>(News::messages);  // attend() rings for these
    bool waits = false;
    for (auto& one : taken.attended) {
      std::optional<TimePoint> again;
      try {
        again = one->advance_if_free();
      } catch (const std::exception& error) {
        log(LogLevel::error, std::string("shared memory: ") + error.what());
      }
      if (!again) continue;
      waits = true;
      until = std::min(until, *again);
      news |= static_cast<std::uint32_t>(one->waits_for());
      const std::lock_guard lock(mutex_);
      if (std::find(attended_.begin(), attended_.end(), one) == attended_.end()) attended_.push_back(one);
    }
    taken.attended.clear();  // not while asleep: this may be the last reference
    if (waits) Doorbell::own().wait(taken.heard, until, static_cast<News>(news));
  }
}

}  // namespace torch_iroh::transport
