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
#include <vector>

#include "collective/call.hpp"
#include "collective/host_run.hpp"
#include "transport/host_driver.hpp"
#include "transport/host_team.hpp"
#include "transport/host_watch.hpp"

namespace torch_iroh::collective {

class HostQueue final : public transport::Attended, public std::enable_shared_from_this<HostQueue> {
 public:
  // Called on the thread that does the work, with no lock of the group held.
  struct Hooks {
    std::function<void(const Error& cause, const std::string& news)> fail;  // leads to fail() below
    std::function<void()> ended;                                            // one operation less in flight
  };

  // `peer_timeout`: how long a rank may stand still (its process stopped) before it is given up.
  HostQueue(std::shared_ptr<transport::HostTeam> team, Duration peer_timeout, Hooks hooks);

  // Thread-safe, all of them. After `push` somebody must drive it or attend to it.
  void push(std::uint64_t sequence, CollectiveCall call, TimePoint deadline);
  void attend();
  void drive(std::uint64_t sequence);  // returns when that operation is over
  void release(std::uint64_t sequence);
  // Everything in flight ends with `cause`, and so does what comes later. `news`: for the other ranks, unless empty.
  void fail(const Error& cause, const std::string& news);
  void leave();
  // After fail() or leave(): gives the memory back. What is still in flight ends first.
  void close();
  std::string waiting_text();  // "; still waiting for rank 2", unless it moves right now

  std::optional<TimePoint> advance_if_free() override;
  transport::News waits_for() const override { return transport::News::steps; }

 private:
  struct Queued {
    std::uint64_t sequence;
    CollectiveCall call;
    TimePoint deadline;
  };
  struct Current {
    Queued queued;
    std::unique_ptr<HostRun> run;
    TimePoint look_at{};  // at the processes of those who keep us waiting; unset: it has not waited yet
  };

  std::optional<TimePoint> advance();
  bool begin_next(std::optional<TimePoint>& again);
  void end_current(const Error* error);
  void end_all(const Error& cause);
  void report(const Error& cause);
  std::optional<Error> failed() const;
  // When to look again. Throws what keeps this operation from ever ending.
  TimePoint look_after(Current& current, TimePoint now);
  Error late() const;
  std::string still_waiting() const;
  std::string title() const;

  std::shared_ptr<transport::HostTeam> team() const;

  // Changed by close() only, under both mutexes; whoever works holds drive_mutex_ and reads it freely.
  std::shared_ptr<transport::HostTeam> team_;
  const int rank_;
  const int world_;
  const Hooks hooks_;
  const bool cores_suffice_;

  mutable std::mutex queue_mutex_;  // short: what other threads hand in
  std::deque<Queued> queue_;
  std::uint64_t pushed_ = 0;  // operations so far
  std::optional<Error> failed_;

  std::timed_mutex drive_mutex_;  // held while working
  std::optional<Current> current_;
  HostRun::Place place_;
  transport::HostWatch watch_;
  bool reported_ = false;
  std::atomic<std::uint64_t> ended_{0};  // operations below this number are over
};

}  // namespace torch_iroh::collective
