#include "base/patient_workers.hpp"

#include <exception>
#include <string>
#include <utility>

#include "base/log.hpp"

namespace torch_iroh {
namespace {

constexpr Duration kStuck = milliseconds(10);

}  // namespace

PatientWorkers::~PatientWorkers() {
  for (;;) {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    if (!watching_) break;
    const auto timer = timer_;
    lock.unlock();
    // Either it will not run, or it runs now and sees that it must not go on.
    if (workers().cancel(timer)) break;
    std::this_thread::sleep_for(milliseconds(1));
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

std::size_t PatientWorkers::threads() const {
  const std::lock_guard lock(mutex_);
  return threads_.size();
}

bool PatientWorkers::wait_until_idle(Duration limit) {
  std::unique_lock lock(mutex_);
  return idling_.wait_for(lock, limit, [this] { return tasks_.empty() && idle_ == threads_.size(); });
}

void PatientWorkers::post(Task task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (threads_.empty()) threads_.emplace_back([this] { run(); });
    if (tasks_.size() > idle_ && !watching_ && !stopping_) watch(begun_);
  }
  wake_.notify_one();
}

void PatientWorkers::watch(std::uint64_t begun_before) {
  watching_ = true;
  timer_ = workers().at(after(Clock::now(), kStuck), [this, begun_before] { look(begun_before); });
}

void PatientWorkers::look(std::uint64_t begun_before) {
  const std::lock_guard lock(mutex_);
  watching_ = false;
  if (tasks_.empty() || stopping_) return;
  const bool stuck = begun_ == begun_before && idle_ == 0;
  if (stuck && threads_.size() < most_) threads_.emplace_back([this] { run(); });
  watch(begun_);
}

void PatientWorkers::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (tasks_.empty()) {
      if (stopping_) return;
      ++idle_;
      idling_.notify_all();
      wake_.wait(lock);
      --idle_;
      continue;
    }
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    ++begun_;
    lock.unlock();
    try {
      task();
    } catch (const std::exception& error) {
      log(LogLevel::error, std::string("a callback failed: ") + error.what());
    }
    task = nullptr;  // without the lock: its captures may post
    lock.lock();
  }
}

}  // namespace torch_iroh
