// A fixed set of threads that runs tasks and timers, and strands that keep tasks in order. Idle threads sleep. Knows
// nothing of what the tasks do; a task must not block, since timers (heartbeats) share the threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/time.hpp"

namespace torch_iroh {

using Task = std::function<void()>;

class Workers {
 public:
  explicit Workers(int threads);
  ~Workers();  // runs what is queued, drops timers, joins
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  void post(Task task);

  using TimerId = std::uint64_t;
  TimerId at(TimePoint when, Task task);
  // True when the timer will not run. False: it has run, or runs right now.
  bool cancel(TimerId id);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Task> tasks_;
  std::map<std::pair<TimePoint, TimerId>, Task> timers_;
  std::map<TimerId, TimePoint> timer_times_;
  TimerId next_timer_ = 1;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

// The threads that move every group of this process forward: two, started by the first group.
Workers& workers();

// Tasks of one strand run one after the other, in order, on whichever thread is free.
class Strand : public std::enable_shared_from_this<Strand> {
 public:
  explicit Strand(Workers& workers) : workers_(workers) {}
  void post(Task task);
  // On this thread, unless another is at it already: saves waking one. Never with a lock held that a task might want.
  void run(Task task);

  // `post` and `run` in two steps, for callers that hold a lock during the first. True: one of the others must follow.
  bool enqueue(Task task);
  void schedule();
  void drain();

 private:
  Workers& workers_;
  std::mutex mutex_;
  std::deque<Task> tasks_;
  bool running_ = false;
};

}  // namespace torch_iroh
