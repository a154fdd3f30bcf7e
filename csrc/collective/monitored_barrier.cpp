#include "collective/monitored_barrier.hpp"

#include <algorithm>
#include <utility>

#include "base/rank_text.hpp"

namespace torch_iroh::collective {
namespace {

std::string prefix(int rank) {
  return "[Rank " + std::to_string(rank) + "]: ";
}

// The words of gloo, which programs and tests look for.
Error reached_but(int rank, const std::string& why) {
  return {ErrorKind::timeout, prefix(rank) + "Rank " + std::to_string(rank) +
                                  " successfully reached monitoredBarrier, but received errors while waiting for " +
                                  "send/recv from rank 0: " + why};
}

}  // namespace

MonitoredBarrier::MonitoredBarrier(int rank, int world, Tell tell)
    : rank_(rank), tell_(std::move(tell)), arrived_(static_cast<std::size_t>(world)) {}

void MonitoredBarrier::begin(MonitoredBarrierCall call) {
  const std::uint64_t number = next_++;
  if (rank_ == 0 && call.timeout <= Duration{} && arrived_.size() > 1) {
    const Error error(ErrorKind::timeout, prefix(0) + "Rank 0 timed out in monitoredBarrier after " +
                                              whole_milliseconds(call.timeout) + " ms");
    return call.done(&error);
  }
  const TimePoint deadline = after(Clock::now(), call.timeout);
  waiting_.emplace(number, Waiting{std::move(call), deadline});
  if (rank_ == 0) return release();
  Message arrive{.kind = MessageKind::arrive};
  arrive.sequence = number;
  tell_(0, arrive);
}

void MonitoredBarrier::on_arrive(int from, const Message& arrive) {
  if (rank_ != 0) throw Error(ErrorKind::protocol, "an arrival at a barrier belongs to rank 0");
  auto& arrived = arrived_[static_cast<std::size_t>(from)];
  if (arrive.sequence < next_ && !waiting_.contains(arrive.sequence)) {
    Message late{.kind = MessageKind::verdict};
    late.sequence = arrive.sequence;
    late.text = "rank 0 no longer waits at this barrier";
    return tell_(from, late);
  }
  if (arrive.sequence < arrived) throw Error(ErrorKind::protocol, "a second arrival at the same barrier");
  arrived = arrive.sequence + 1;
  release();
}

void MonitoredBarrier::release() {
  while (!waiting_.empty()) {
    const std::uint64_t number = waiting_.begin()->first;
    if (!missing(number).empty()) return;
    const auto done = std::move(waiting_.begin()->second.call.done);
    waiting_.erase(waiting_.begin());
    Message verdict{.kind = MessageKind::verdict};
    verdict.sequence = number;
    for (int peer = 1; peer < static_cast<int>(arrived_.size()); ++peer) tell_(peer, verdict);
    done(nullptr);
  }
}

std::vector<int> MonitoredBarrier::missing(std::uint64_t number) const {
  std::vector<int> ranks;
  for (std::size_t peer = 1; peer < arrived_.size(); ++peer) {
    if (arrived_[peer] <= number) ranks.push_back(static_cast<int>(peer));
  }
  return ranks;
}

void MonitoredBarrier::on_verdict(int from, const Message& verdict) {
  if (from != 0) throw Error(ErrorKind::protocol, "a verdict on a barrier must come from rank 0");
  const auto found = waiting_.find(verdict.sequence);
  if (found == waiting_.end()) return;  // timed out here meanwhile
  const auto done = std::move(found->second.call.done);
  waiting_.erase(found);
  if (verdict.text.empty()) return done(nullptr);
  const Error error = reached_but(rank_, verdict.text);
  done(&error);
}

TimePoint MonitoredBarrier::next_deadline() const {
  TimePoint next = kNever;
  for (const auto& [number, waiting] : waiting_) next = std::min(next, waiting.deadline);
  return next;
}

void MonitoredBarrier::expire(TimePoint now) {
  for (auto one = waiting_.begin(); one != waiting_.end();) {
    if (one->second.deadline > now) {
      ++one;
      continue;
    }
    const std::uint64_t number = one->first;
    const Waiting waiting = std::move(one->second);
    one = waiting_.erase(one);
    give_up(number, waiting, "");
  }
}

void MonitoredBarrier::on_lost(int rank, const Error& gone) {
  for (auto one = waiting_.begin(); one != waiting_.end();) {
    const std::uint64_t number = one->first;
    const bool missed = rank_ == 0 ? arrived_[static_cast<std::size_t>(rank)] <= number : rank == 0;
    if (!missed) {
      ++one;
      continue;
    }
    const Waiting waiting = std::move(one->second);
    one = waiting_.erase(one);
    give_up(number, waiting, gone.what());
  }
}

void MonitoredBarrier::give_up(std::uint64_t number, const Waiting& waiting, const std::string& why) {
  const std::string limit = whole_milliseconds(waiting.call.timeout) + " ms";
  if (rank_ != 0) {
    const Error error = reached_but(rank_, why.empty() ? "nothing heard within " + limit : why);
    return waiting.call.done(&error);
  }
  const std::vector<int> absent = missing(number);
  const std::string who =
      waiting.call.name_all ? "Ranks " + numbers_text(absent) : "Rank " + std::to_string(absent.front());
  const Error error(ErrorKind::timeout,
                    prefix(0) + who + " failed to pass monitoredBarrier in " + limit + (why.empty() ? "" : ": " + why));
  Message verdict{.kind = MessageKind::verdict};
  verdict.sequence = number;
  verdict.text = error.what();
  for (int peer = 1; peer < static_cast<int>(arrived_.size()); ++peer) {
    if (arrived_[static_cast<std::size_t>(peer)] > number) tell_(peer, verdict);
  }
  waiting.call.done(&error);
}

void MonitoredBarrier::fail(const Error& cause) {
  const auto ended = std::exchange(waiting_, {});
  for (const auto& [number, waiting] : ended) waiting.call.done(&cause);
}

}  // namespace torch_iroh::collective
