#include "base/workers.hpp"

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "base/fork.hpp"
#include "base/log.hpp"

namespace torch_iroh {
namespace {

// Nobody waits for a task's result; whoever depends on its effect has a deadline.
void run_logged(const Task& task) {
  try {
    task();
  } catch (const std::exception& error) {
    log(LogLevel::error, std::string("a background task failed: ") + error.what());
  }
}

}  // namespace

Workers::Workers(int threads) {
  threads_.reserve(static_cast<std::size_t>(threads));
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
}

Workers::~Workers() {
  decltype(timers_) dropped;  // destroyed without the lock: their captures may post
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    dropped.swap(timers_);
    timer_times_.clear();
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Workers::post(Task task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
}

Workers::TimerId Workers::at(TimePoint when, Task task) {
  TimerId id = 0;
  {
    const std::lock_guard lock(mutex_);
    id = next_timer_++;
    timers_.emplace(std::pair(when, id), std::move(task));
    timer_times_.emplace(id, when);
  }
  wake_.notify_one();
  return id;
}

bool Workers::cancel(TimerId id) {
  Task dropped;  // destroyed after the lock: its captures may post
  const std::lock_guard lock(mutex_);
  const auto time = timer_times_.find(id);
  if (time == timer_times_.end()) return false;
  const auto timer = timers_.find(std::pair(time->second, id));
  dropped = std::move(timer->second);
  timers_.erase(timer);
  timer_times_.erase(time);
  return true;
}

void Workers::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    Task task;
    if (!timers_.empty() && timers_.begin()->first.first <= Clock::now()) {
      task = std::move(timers_.begin()->second);
      timer_times_.erase(timers_.begin()->first.second);
      timers_.erase(timers_.begin());
    } else if (!tasks_.empty()) {
      task = std::move(tasks_.front());
      tasks_.pop_front();
    } else if (stopping_) {
      return;
    } else if (timers_.empty()) {
      wake_.wait(lock);
      continue;
    } else {
      const TimePoint next = timers_.begin()->first.first;  // a copy: the wait reads it again when the timer is gone
      wake_.wait_until(lock, next);
      continue;
    }
    lock.unlock();
    run_logged(task);
    task = nullptr;  // without the lock: its captures may post
    lock.lock();
  }
}

Workers& workers() {
  static PerProcess<Workers> shared([] { return std::make_unique<Workers>(2); });
  return shared.get();
}

void Strand::post(Task task) {
  if (enqueue(std::move(task))) schedule();
}

void Strand::run(Task task) {
  if (enqueue(std::move(task))) drain();
}

bool Strand::enqueue(Task task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  return !std::exchange(running_, true);
}

void Strand::schedule() {
  workers_.post([self = shared_from_this()] { self->drain(); });
}

void Strand::drain() {
  // A bounded batch, so that one busy strand does not starve the others.
  constexpr int kBatch = 16;
  for (int i = 0; i < kBatch; ++i) {
    Task task;
    {
      const std::lock_guard lock(mutex_);
      if (tasks_.empty()) {
        running_ = false;
        return;
      }
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    run_logged(task);
  }
  schedule();
}

}  // namespace torch_iroh
