// A result of iroh that is still on its way. It is polled on a few shared threads (`Pollers`), because polling is where
// iroh copies bytes; callbacks run there too, so they must be short.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "base/time.hpp"
#include "base/workers.hpp"

namespace torch_iroh::iroh {

// The polling threads of this process, started by the first future. TORCH_IROH_POLL_THREADS (default 2).
Workers& pollers();

template <typename T>
class Pending {
 public:
  using Done = std::function<void(Result<T>)>;
  virtual ~Pending() = default;
  virtual void start(Done done, bool poll_here) = 0;
  virtual void cancel() = 0;
};

// Gives up on a started future: its callback then gets Error(aborted), unless it was ready first.
class Canceller {
 public:
  Canceller() = default;
  explicit Canceller(std::function<void()> cancel) : cancel_(std::move(cancel)) {}
  void cancel() {
    if (cancel_) std::exchange(cancel_, nullptr)();
  }

 private:
  std::function<void()> cancel_;
};

template <typename T>
class Future {  // move-only; one of then(), then_here() and get() consumes it
 public:
  using Done = typename Pending<T>::Done;

  explicit Future(std::shared_ptr<Pending<T>> pending) : pending_(std::move(pending)) {}
  Future(Future&&) noexcept = default;
  Future& operator=(Future&&) noexcept = default;

  // `done` runs once, on a polling thread.
  Canceller then(Done done) && { return begin(std::move(done), false); }

  // As then(), but the first poll is made by the caller, and `done` may run before this returns.
  Canceller then_here(Done done) && { return begin(std::move(done), true); }

  // Blocks. Throws iroh's error, or Error(timeout) after cancelling.
  T get(TimePoint by) && {
    struct Slot {
      std::mutex mutex;
      std::condition_variable ready;
      std::optional<Result<T>> result;
    };
    auto slot = std::make_shared<Slot>();
    Canceller canceller = begin(
        [slot](Result<T> result) {
          {
            const std::lock_guard lock(slot->mutex);
            slot->result.emplace(std::move(result));
          }
          slot->ready.notify_all();
        },
        false);
    std::unique_lock lock(slot->mutex);
    const auto is_ready = [&] { return slot->result.has_value(); };
    if (by == kNever) {
      slot->ready.wait(lock, is_ready);
    } else if (!slot->ready.wait_until(lock, by, is_ready)) {
      lock.unlock();
      canceller.cancel();
      throw Error(ErrorKind::timeout, "iroh: no answer before the deadline");
    }
    return std::move(slot->result->value());
  }

 private:
  Canceller begin(Done done, bool poll_here) {
    auto pending = std::exchange(pending_, nullptr);
    pending->start(std::move(done), poll_here);
    return Canceller([weak = std::weak_ptr(pending)] {
      if (const auto alive = weak.lock()) alive->cancel();
    });
  }

  std::shared_ptr<Pending<T>> pending_;
};

}  // namespace torch_iroh::iroh
