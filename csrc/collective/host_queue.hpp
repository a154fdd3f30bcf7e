// The collectives of a group whose ranks share memory: one after the other, in the order they were issued. Whoever
// waits for an operation may do its work (`drive`); else one thread of the process does, for all groups. Both sleep on
// the process's doorbell when they can only wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "collective/call.hpp"
#include "collective/host_run.hpp"
#include "transport/host_team.hpp"

namespace torch_iroh::collective {

class HostQueue : public std::enable_shared_from_this<HostQueue> {
 public:
  // Called on the thread that does the work, with no lock of the group held.
  struct Hooks {
    std::function<void(const Error& cause, const std::string& news)> fail;  // leads to fail() below
    std::function<void(int rank)> connect;  // that rank keeps us waiting: find out whether it lives
    std::function<void()> ended;            // one operation less in flight
  };

  HostQueue(std::unique_ptr<transport::HostTeam> team, Hooks hooks);

  // Thread-safe, all of them. After `push` somebody must drive it or attend to it.
  void push(std::uint64_t sequence, CollectiveCall call, TimePoint deadline);
  void attend();
  void drive(std::uint64_t sequence);  // returns when that operation is over
  void release(std::uint64_t sequence);
  // Everything in flight ends with `cause`, and so does what comes later. `news`: for the other ranks, unless empty.
  void fail(const Error& cause, const std::string& news);
  void leave();

  // Goes on as far as it can, unless another thread is at it. Until when it can wait; nullopt: nothing is left to do.
  std::optional<TimePoint> advance_if_free();

 private:
  struct Queued {
    std::uint64_t sequence;
    CollectiveCall call;
    TimePoint deadline;
  };
  struct Current {
    Queued queued;
    std::unique_ptr<HostRun> run;
    std::optional<TimePoint> blocked_since{};
    TimePoint look_at = kNever;
    bool connected = false;
  };

  std::optional<TimePoint> advance();
  bool begin_next(std::optional<TimePoint>& again);
  void end_current(const Error* error);
  void end_all(const Error& cause);
  void report(const Error& cause);
  std::optional<Error> failed() const;
  TimePoint look_after(Current& current, TimePoint now);  // throws what keeps this operation from ever ending
  Error late() const;
  std::string title() const;

  const std::unique_ptr<transport::HostTeam> team_;
  const Hooks hooks_;
  const bool may_spin_;

  mutable std::mutex queue_mutex_;  // short: what other threads hand in
  std::deque<Queued> queue_;
  std::optional<Error> failed_;

  std::mutex drive_mutex_;  // held while working
  std::optional<Current> current_;
  std::uint64_t turn_ = 0;
  bool reported_ = false;
  std::atomic<std::uint64_t> ended_{0};  // operations below this number are over
};

}  // namespace torch_iroh::collective
