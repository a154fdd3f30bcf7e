#include "c10d/inner.hpp"

#include <atomic>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "base/log.hpp"
#include "base/rank_text.hpp"
#include "c10d/held.hpp"
#include "collective/failure_text.hpp"

namespace torch_iroh::c10d_backend {
namespace {

// The part between hosts has this much longer than the agreement in each host: who is missing is known where it is
// missed, and must be heard before ranks of other hosts blame those who wait for it.
constexpr Duration kNewsTravels = milliseconds(500);
// For a failure to come back to who caused it, through the group's strand.
constexpr Duration kEcho = milliseconds(1000);

std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error == nullptr ? error.what() : torch_error->what_without_backtrace();
}

}  // namespace

struct Inner::Signal {
  bool done = false;
  std::optional<Error> error;
};

struct Inner::Job {
  std::function<void()> task;  // this and nothing else
  c10::intrusive_ptr<IrohWork> work;
  std::shared_ptr<Staging> staging;
  Parts parts;
  Duration timeout{};
  TimePoint deadline = kNever;
  std::uint64_t sequence = 0;  // of the part between hosts
  std::shared_ptr<Signal> agreed = std::make_shared<Signal>();
  std::shared_ptr<Signal> moved = std::make_shared<Signal>();

  std::string title() const { return collective::title_of(sequence, parts.title + ")"); }
};

struct Inner::Pulse {
  std::mutex mutex;
  std::condition_variable beat;
  std::optional<Error> failed;  // the group
  std::deque<std::shared_ptr<Job>> jobs;
  bool busy = false;
  bool closing = false;
  std::atomic<std::uint64_t> agreements{0};

  static collective::Done set(const std::shared_ptr<Pulse>& pulse, const std::shared_ptr<Signal>& signal) {
    return [pulse, signal](const Error* error) {
      {
        const std::lock_guard lock(pulse->mutex);
        signal->done = true;
        if (error != nullptr) signal->error = *error;
      }
      pulse->beat.notify_all();
    };
  }
};

std::shared_ptr<Inner> Inner::make(InnerBackend inner, Hosts hosts, const std::shared_ptr<collective::Group>& group,
                                   Duration patience) {
  std::shared_ptr<Inner> made(new Inner(std::move(inner), std::move(hosts), group, patience));
  group->on_failure([pulse = made->pulse_](const Error& cause) {
    {
      const std::lock_guard lock(pulse->mutex);
      pulse->failed = cause;
    }
    pulse->beat.notify_all();
  });
  // The inner backend seldom knows who died; a link of the group to each neighbour does.
  for (const std::int32_t rank : made->hosts_.mine()) {
    if (rank != made->rank_) group->connect(rank);
  }
  return made;
}

Inner::Inner(InnerBackend inner, Hosts hosts, const std::shared_ptr<collective::Group>& group, Duration patience)
    : inner_(std::move(inner)),
      hosts_(std::move(hosts)),
      group_(group),
      rank_(group->rank()),
      patience_(patience),
      pulse_(std::make_shared<Pulse>()),
      neighbours_(std::make_shared<const Hosts::Ranks>(hosts_.mine())) {}

Inner::~Inner() {
  close(false);
}

std::int64_t Inner::world() const {
  std::int64_t ranks = 0;
  for (const Hosts::Ranks& host : hosts_.all()) ranks += static_cast<std::int64_t>(host.size());
  return ranks;
}

std::uint64_t Inner::agreements() const {
  return pulse_->agreements.load();
}

WorkPtr Inner::submit(Operation operation, const Asked& asked) {
  const auto group = group_.lock();
  TORCH_CHECK(group, "ProcessGroupIroh::", operation.op, ": the group was destroyed");
  auto job = std::make_shared<Job>();
  job->parts = parts_of(operation, asked);
  job->staging = operation.description.staging;
  job->timeout = operation.description.timeout;
  job->deadline = after(Clock::now(), job->timeout);
  auto work = c10::make_intrusive<IrohWork>(rank_, std::move(operation.description));
  job->work = work;

  collective::CollectiveCall agreement;
  agreement.request.members = neighbours_;
  agreement.part_of = job->parts.title;
  agreement.timeout = job->timeout;
  agreement.done = [pulse = pulse_, set = Pulse::set(pulse_, job->agreed)](const Error* error) {
    if (error == nullptr) ++pulse->agreements;
    set(error);
  };
  collective::CollectiveCall& between = job->parts.between;
  between.part_of = job->parts.title;
  between.timeout = job->timeout + kNewsTravels;
  between.held = true;
  between.work.keep = released_with_futures(std::move(between.work.keep));
  between.done = Pulse::set(pulse_, job->moved);
  {
    const std::lock_guard order(submit_mutex_);
    group->submit(std::move(agreement));
    job->sequence = group->submit(std::move(between));
    work->set_sequence(job->sequence);
    const std::lock_guard lock(pulse_->mutex);
    if (pulse_->closing) {
      const Error error(ErrorKind::aborted,
                        job->title() + ": the group was destroyed on rank " + std::to_string(rank_));
      IrohWork::finish(std::move(job->work), &error);
      return work;
    }
    pulse_->jobs.push_back(std::move(job));
    if (!conductor_.joinable()) conductor_ = std::thread([this] { conduct(); });
  }
  pulse_->beat.notify_all();
  return work;
}

bool Inner::busy() const {
  const std::lock_guard lock(pulse_->mutex);
  return pulse_->busy || !pulse_->jobs.empty();
}

void Inner::after_what_runs(std::function<void()> then) {
  {
    const std::lock_guard lock(pulse_->mutex);
    if (pulse_->busy || !pulse_->jobs.empty()) {
      pulse_->jobs.push_back(std::make_shared<Job>());
      pulse_->jobs.back()->task = std::move(then);
      return;
    }
  }
  then();
}

void Inner::conduct() {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;  // gradients, leaves and inference tensors are just memory
  for (;;) {
    std::shared_ptr<Job> job;
    {
      std::unique_lock lock(pulse_->mutex);
      pulse_->busy = false;
      pulse_->beat.notify_all();
      // A device may still be at work for operations that have ended here: a rank that died would keep it there.
      const auto must_abort = [&] {
        return pulse_->failed && pulse_->failed->kind() != ErrorKind::aborted && !aborted_.load();
      };
      pulse_->beat.wait(lock, [&] { return pulse_->closing || !pulse_->jobs.empty() || must_abort(); });
      if (pulse_->jobs.empty()) {
        if (pulse_->closing) return;
        lock.unlock();
        abort_backend();
        continue;
      }
      job = std::move(pulse_->jobs.front());
      pulse_->jobs.pop_front();
      pulse_->busy = true;
    }
    if (job->task) {
      job->task();
      continue;
    }
    running_ = job.get();
    const auto error = run(*job);
    running_ = nullptr;
    if (error) abort_backend();
    IrohWork::finish(std::move(job->work), error ? &*error : nullptr);
    released_with_futures(std::move(job));
  }
}

std::optional<Error> Inner::run(Job& job) {
  if (auto error = wait_for(*job.agreed)) return error;
  try {
    std::optional<Staging::StreamScope> scope;
    if (job.staging) scope.emplace(*job.staging);
    job.parts.before(*this);
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return broken(text_of(error));
  }
  if (const auto group = group_.lock()) {
    if (job.staging && job.staging->end_of_loads()) {
      release_when_loaded(group, job.staging, {job.sequence});
    } else {
      group->release(job.sequence);
    }
  }
  if (auto error = wait_for(*job.moved)) return error;
  try {
    if (job.staging) {
      job.staging->write_back([&] { job.parts.afterwards(*this); });
    } else {
      job.parts.afterwards(*this);
    }
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return broken(text_of(error));
  }
  return std::nullopt;
}

// The group ends each of its operations by its deadline; the rest is for a group that is gone.
std::optional<Error> Inner::wait_for(const Signal& signal) {
  std::unique_lock lock(pulse_->mutex);
  const TimePoint latest = after(running_->deadline, patience_);
  if (pulse_->beat.wait_until(lock, latest, [&] { return signal.done; })) return signal.error;
  return Error(ErrorKind::aborted, running_->title() + ": the group ended before it");
}

std::chrono::milliseconds Inner::time_to_give() const {
  const auto left = std::chrono::duration_cast<milliseconds>(running_->deadline + patience_ - Clock::now());
  return std::max(left, milliseconds(1));
}

void Inner::await(const WorkPtr& work) {
  const auto future = work->getFuture();
  future->addCallback(
      [pulse = pulse_](c10::ivalue::Future&) {
        {
          const std::lock_guard lock(pulse->mutex);
        }  // whoever looks has either seen it complete, or waits by now
        pulse->beat.notify_all();
      },
      false);
  std::unique_lock lock(pulse_->mutex);
  const bool ended =
      pulse_->beat.wait_until(lock, running_->deadline, [&] { return future->completed() || pulse_->failed; });
  if (future->completed()) {
    lock.unlock();
    work->wait();  // throws what went wrong; on a device the current stream waits
    return;
  }
  if (!ended) {
    lock.unlock();
    if (const auto group = group_.lock()) {
      group->abort(Error(ErrorKind::timeout, collective::timed_out(running_->timeout, rank_) + " for " + inner_.name +
                                                 " between the ranks of this host (" + numbers_text(hosts_.mine()) +
                                                 ")"));
    }
    lock.lock();
    pulse_->beat.wait_for(lock, kEcho, [&] { return pulse_->failed.has_value(); });
  }
  if (pulse_->failed) throw collective::explain(*pulse_->failed, rank_, running_->title());
  throw Error(ErrorKind::timeout, running_->title() + ": " + collective::timed_out(running_->timeout, rank_));
}

Error Inner::broken(const std::string& why) {
  std::unique_lock lock(pulse_->mutex);
  const auto known = [&] { return pulse_->failed.has_value(); };
  if (!pulse_->beat.wait_for(lock, patience_, known)) {
    lock.unlock();
    if (const auto group = group_.lock()) {
      group->abort(Error(ErrorKind::network, running_->title() + ": " + inner_.name + " between the ranks of rank " +
                                                 std::to_string(rank_) + "'s host (" + numbers_text(hosts_.mine()) +
                                                 ") failed: " + why +
                                                 ". Try: look at the logs of these ranks, or inner='none'"));
    }
    lock.lock();
    pulse_->beat.wait_for(lock, kEcho, known);
  }
  if (pulse_->failed) return collective::explain(*pulse_->failed, rank_, running_->title());
  return {ErrorKind::network, running_->title() + ": " + inner_.name + " failed: " + why};
}

void Inner::abort_backend() {
  if (aborted_.exchange(true) || !inner_.backend) return;
  try {
    inner_.backend->abort();
  } catch (const std::exception& error) {
    log(LogLevel::warn,
        "rank " + std::to_string(rank_) + ": " + inner_.name + " could not be aborted: " + text_of(error));
  }
}

void Inner::finish_for(Duration grace) {
  std::unique_lock lock(pulse_->mutex);
  pulse_->beat.wait_for(lock, grace, [&] { return pulse_->failed || (pulse_->jobs.empty() && !pulse_->busy); });
}

void Inner::close(bool orderly) {
  {
    const std::lock_guard lock(pulse_->mutex);
    if (std::exchange(pulse_->closing, true)) return;
  }
  pulse_->beat.notify_all();
  if (!orderly) abort_backend();  // the conductor may be inside it
  {
    const std::lock_guard order(submit_mutex_);
    if (conductor_.joinable()) conductor_.join();
  }
  if (!inner_.backend) return;
  if (!aborted_) {
    try {
      inner_.backend->shutdown();
    } catch (const std::exception& error) {
      log(LogLevel::warn,
          "rank " + std::to_string(rank_) + ": " + inner_.name + " did not shut down: " + text_of(error));
    }
  }
  // gloo's destructor waits for what a silent neighbour holds up.
  released_with_futures(std::make_shared<c10::intrusive_ptr<::c10d::Backend>>(std::move(inner_.backend)));
}

}  // namespace torch_iroh::c10d_backend
