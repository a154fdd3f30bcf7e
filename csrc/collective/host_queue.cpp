#include "collective/host_queue.hpp"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/rank_text.hpp"
#include "collective/failure_text.hpp"
#include "collective/planner.hpp"

namespace torch_iroh::collective {
namespace {

using transport::Doorbell;
using transport::HostDriver;
using transport::HostTeam;
using transport::HostWatch;
using transport::News;

// Less than it takes to go to sleep and be woken.
constexpr Duration kSpin = std::chrono::microseconds(5);
// When to look first whether the processes of the ranks that keep us waiting still run.
constexpr Duration kFirstLook = milliseconds(20);
// How long to wait for the group to end what has been reported to it, before looking again.
constexpr Duration kReported = milliseconds(1000);
// How long to wait for whoever works, to say whom the operation waits for.
constexpr auto kExplanation = std::chrono::milliseconds(200);

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

HostQueue::HostQueue(std::shared_ptr<HostTeam> team, Duration peer_timeout, Hooks hooks)
    : team_(std::move(team)),
      rank_(team_->rank()),
      world_(team_->world()),
      hooks_(std::move(hooks)),
      cores_suffice_(static_cast<unsigned>(world_) <= std::thread::hardware_concurrency()),
      watch_(peer_timeout) {}

void HostQueue::push(std::uint64_t sequence, CollectiveCall call, TimePoint deadline) {
  const std::lock_guard lock(queue_mutex_);
  queue_.push_back({sequence, std::move(call), deadline});
  pushed_ = sequence + 1;
}

void HostQueue::attend() {
  HostDriver::own().attend(shared_from_this());
}

void HostQueue::release(std::uint64_t sequence) {
  {
    const std::lock_guard lock(queue_mutex_);
    for (Queued& queued : queue_) {
      if (queued.sequence == sequence) queued.call.held = false;
    }
  }
  attend();
}

void HostQueue::fail(const Error& cause, const std::string& news) {
  // Before any operation ends and its memory is given back: readers look at this after they have read.
  const auto members = team();
  if (members && !news.empty()) members->fail(news);
  {
    const std::lock_guard lock(queue_mutex_);
    if (!failed_) failed_ = cause;
  }
  attend();
}

void HostQueue::leave() {
  if (const auto members = team()) members->leave();
}

void HostQueue::close() {
  const std::lock_guard working(drive_mutex_);
  Error cause(ErrorKind::aborted, "the group was destroyed on rank " + std::to_string(rank_));
  {
    const std::lock_guard lock(queue_mutex_);
    if (!failed_) failed_ = cause;
    cause = *failed_;
  }
  end_all(cause);
  const std::lock_guard lock(queue_mutex_);
  team_.reset();
}

std::shared_ptr<HostTeam> HostQueue::team() const {
  const std::lock_guard lock(queue_mutex_);
  return team_;
}

std::optional<Error> HostQueue::failed() const {
  const std::lock_guard lock(queue_mutex_);
  return failed_;
}

void HostQueue::drive(std::uint64_t sequence) {
  auto& bell = Doorbell::own();
  while (ended_.load() <= sequence) {
    const auto heard = bell.heard();
    std::optional<TimePoint> again;
    {
      const std::lock_guard lock(drive_mutex_);
      if (ended_.load() > sequence) break;
      again = advance();
    }
    if (ended_.load() > sequence) break;
    for (const TimePoint end = after(Clock::now(), kSpin); bell.heard() == heard && Clock::now() < end;) {
      cores_suffice_ ? relax() : std::this_thread::yield();
    }
    bell.wait(heard, again.value_or(kNever), News::steps);
  }
  bool more = false;
  {
    const std::lock_guard lock(queue_mutex_);
    more = ended_.load() < pushed_;  // the next may have begun on this thread
  }
  if (more) attend();
}

std::optional<TimePoint> HostQueue::advance_if_free() {
  // Whoever is at it looks for more when it leaves.
  const std::unique_lock lock(drive_mutex_, std::try_to_lock);
  return lock ? advance() : std::nullopt;
}

std::optional<TimePoint> HostQueue::advance() {
  for (;;) {
    if (const auto cause = failed()) {
      end_all(*cause);
      return std::nullopt;
    }
    if (reported_) return after(Clock::now(), kReported);
    try {
      std::optional<TimePoint> again;
      if (!current_ && !begin_next(again)) return again;
      const auto blocked = current_->run->step();
      if (!blocked) {
        place_ = current_->run->next_place();
        end_current(nullptr);
        continue;
      }
      team_->await(blocked->rank, blocked->phase);
      if (team_->has_come(blocked->rank, blocked->phase)) continue;
      return look_after(*current_, Clock::now());
    } catch (const Error& error) {
      report(error);
    } catch (const std::exception& error) {
      report(Error(ErrorKind::invalid, error.what()));
    }
  }
}

// False: there is nothing to begin, now or before `again`.
bool HostQueue::begin_next(std::optional<TimePoint>& again) {
  std::optional<Queued> next;
  {
    const std::lock_guard lock(queue_mutex_);
    if (queue_.empty()) return false;
    const Queued& front = queue_.front();
    if (front.call.held) {
      if (front.deadline <= Clock::now()) {
        throw Error(ErrorKind::timeout,
                    timed_out(front.call.timeout, rank_) + ", whose device has not handed over its data");
      }
      again = front.deadline;
      return false;
    }
    next = std::move(queue_.front());
    queue_.pop_front();
  }
  current_.emplace(Current{std::move(*next), nullptr});
  CollectiveCall& call = current_->queued.call;
  if (call.prepare) std::exchange(call.prepare, nullptr)(call);
  const Request& request = call.request;
  current_->run = std::make_unique<HostRun>(*team_, moves_nothing(request) ? barrier_for(request) : request, call.work,
                                            describe(call, "shared memory"), place_);
  return true;
}

TimePoint HostQueue::look_after(Current& current, TimePoint now) {
  if (current.queued.deadline <= now) throw late();
  const auto waiting = current.run->waiting_for();
  // After its last step a rank may go: its step is looked for once more after its going was seen.
  const auto is_missed = [&](int rank) {
    const auto missed = current.run->waiting_for();
    return std::find(missed.begin(), missed.end(), rank) != missed.end();
  };
  const auto listen = [&] {
    current.run->check_sources();
    for (const int rank : waiting) {
      if (team_->standing(rank) == HostTeam::Standing::left && is_missed(rank)) {
        throw Error(ErrorKind::peer_gone, "rank " + std::to_string(rank) + " is gone: it left the group");
      }
    }
  };
  listen();
  if (current.look_at == TimePoint{}) current.look_at = after(now, kFirstLook);
  if (now >= current.look_at) {
    current.look_at = after(now, HostWatch::kInterval);
    if (const auto gone = watch_.look(*team_, waiting, now); gone && is_missed(gone->rank)) {
      listen();  // what it has said since, before it ended, tells more
      throw Error(ErrorKind::peer_gone, "rank " + std::to_string(gone->rank) + " is gone: " + gone->why);
    }
  }
  return std::min(current.queued.deadline, current.look_at);
}

std::string HostQueue::waiting_text() {
  std::string text;
  {
    const std::unique_lock lock(drive_mutex_, kExplanation);
    if (lock && current_ && current_->run) text = still_waiting();
  }
  attend();  // whoever came meanwhile was turned away
  return text;
}

std::string HostQueue::still_waiting() const {
  const auto waiting = current_->run->waiting_for();
  std::vector<int> silent;
  std::copy_if(waiting.begin(), waiting.end(), std::back_inserter(silent),
               [&](int rank) { return !current_->run->has_begun(rank); });
  return still_waiting_for(waiting, silent);
}

Error HostQueue::late() const {
  return {ErrorKind::timeout, timed_out(current_->queued.call.timeout, rank_) + still_waiting()};
}

std::string HostQueue::title() const {
  return title_of(current_->queued.sequence, describe(current_->queued.call, "shared memory"));
}

void HostQueue::report(const Error& given) {
  reported_ = true;
  const bool late = current_ && given.kind() == ErrorKind::timeout;
  hooks_.fail(given, (late ? title() + ": " : "") + given.what());
}

void HostQueue::end_current(const Error* error) {
  if (team_) team_->await(HostTeam::kNobody);
  Current ended = std::move(*current_);
  current_.reset();
  // While the caller still waits and holds its tensors: freeing one here might wait for the GIL.
  ended.run.reset();
  ended.queued.call.work.keep.reset();
  ended_.store(ended.queued.sequence + 1);
  ended.queued.call.done(error);
  hooks_.ended();
  Doorbell::own().ring(News::steps);  // a caller may sleep for it while this thread has done its work
}

void HostQueue::end_all(const Error& cause) {
  if (current_) {
    const Error error = explain(cause, rank_, title());
    end_current(&error);
  }
  for (;;) {
    std::optional<Queued> next;
    {
      const std::lock_guard lock(queue_mutex_);
      if (queue_.empty()) return;
      next = std::move(queue_.front());
      queue_.pop_front();
    }
    const std::string what = title_of(next->sequence, describe(next->call, "shared memory"));
    current_.emplace(Current{std::move(*next), nullptr});
    const Error error = explain(cause, rank_, what);
    end_current(&error);
  }
}

}  // namespace torch_iroh::collective
