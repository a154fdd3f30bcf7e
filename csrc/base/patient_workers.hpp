// Runs tasks that may wait for one another, such as callbacks of users that issue operations and wait for them: one
// thread as a rule, one more whenever a task is queued and all threads have been stuck for a while.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "base/workers.hpp"

namespace torch_iroh {

class PatientWorkers {
 public:
  explicit PatientWorkers(std::size_t most_threads) : most_(most_threads) {}
  ~PatientWorkers();  // runs what is queued, joins
  PatientWorkers(const PatientWorkers&) = delete;
  PatientWorkers& operator=(const PatientWorkers&) = delete;

  void post(Task task);
  std::size_t threads() const;
  // True when nothing is queued or at work any more; false when there is something after `limit`.
  bool wait_until_idle(Duration limit);

 private:
  void run();
  void watch(std::uint64_t begun_before);
  void look(std::uint64_t begun_before);

  const std::size_t most_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idling_;
  std::deque<Task> tasks_;
  std::size_t idle_ = 0;
  std::uint64_t begun_ = 0;  // tasks that a thread has taken up
  bool watching_ = false;
  bool stopping_ = false;
  Workers::TimerId timer_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace torch_iroh
