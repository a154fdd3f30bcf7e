#include "streams.hpp"

#include <unistd.h>

#include <atomic>
#include <deque>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace simulated {
namespace {

constexpr auto patience = std::chrono::minutes(1);
constexpr std::int64_t pool_streams = 8;  // ids 1..8; new_stream counts on from there

struct Work {
  std::chrono::microseconds delay;
  std::function<void()> run;
  bool counts = true;  // a mark does not: a stream is idle when the last mark is finished
};

class Queue {
 public:
  void push(Work work) {
    std::lock_guard lock(mutex_);
    unfinished_ += work.counts;
    work_.push_back(std::move(work));
    if (!started_) {
      started_ = true;
      std::thread([this] { run(); }).detach();  // queues are never destroyed
    }
    changed_.notify_one();
  }

  bool idle() {
    std::lock_guard lock(mutex_);
    return unfinished_ == 0;
  }

  // An error is told once, to the first who asks.
  void throw_error() {
    std::unique_lock lock(mutex_);
    if (auto error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }

 private:
  [[noreturn]] void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !work_.empty(); });
      Work work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      if (work.delay.count() > 0) std::this_thread::sleep_for(work.delay);
      std::exception_ptr error;
      try {
        work.run();
      } catch (...) {
        error = std::current_exception();
      }
      work.run = nullptr;
      lock.lock();
      unfinished_ -= work.counts;
      if (!error_) error_ = error;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;
  std::int64_t unfinished_ = 0;
  bool started_ = false;
  std::exception_ptr error_;
};

struct Runtime {
  const pid_t process = getpid();
  std::mutex mutex;
  std::map<StreamKey, std::unique_ptr<Queue>> queues;  // made by their first use
  std::array<std::int64_t, device_count> next_pool{};
  std::array<std::int64_t, device_count> next_new{};
  std::map<std::int64_t, CompletionRef> held;
  std::int64_t next_held = 1;
  std::mt19937_64 random{0};
  double low_ms = 0.5;
  double high_ms = 3;
  std::array<std::atomic<std::int64_t>, 2 * wait_kinds> waits{};
};

// Never destroyed: streams may still work while the process exits.
Runtime& runtime() {
  static auto* const instance = new Runtime;
  return *instance;
}

Queue& queue_of(StreamKey stream) {
  if (is_forked()) throw std::runtime_error("sim: the streams of a forked process have no threads");
  std::lock_guard lock(runtime().mutex);
  auto& queue = runtime().queues[stream];
  if (!queue) queue = std::make_unique<Queue>();
  return *queue;
}

std::chrono::microseconds next_delay() {
  std::lock_guard lock(runtime().mutex);
  std::uniform_real_distribution<double> ms(runtime().low_ms, runtime().high_ms);
  return std::chrono::microseconds(static_cast<std::int64_t>(1000 * ms(runtime().random)));
}

const std::thread::id loading_thread = std::this_thread::get_id();

thread_local int this_device = 0;
thread_local std::array<std::int64_t, device_count> this_streams{};

void count(Wait kind) {
  const bool other = std::this_thread::get_id() != loading_thread;
  ++runtime().waits[(other ? wait_kinds : 0) + static_cast<std::size_t>(kind)];
}

void wait_patiently(const Completion& completion) {
  if (!completion.wait_until(Clock::now() + patience)) {
    throw std::runtime_error("sim: the host waited 60 s for a stream: is it held, or does it wait for this thread?");
  }
}

}  // namespace

// ---- completions ----

void Completion::finish() {
  std::lock_guard lock(mutex_);
  when_ = Clock::now();
  changed_.notify_all();
}

bool Completion::finished() const {
  return when().has_value();
}

void Completion::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return when_.has_value(); });
}

bool Completion::wait_until(Clock::time_point limit) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, limit, [&] { return when_.has_value(); });
}

std::optional<Clock::time_point> Completion::when() const {
  std::lock_guard lock(mutex_);
  return when_;
}

// ---- work ----

void enqueue(StreamKey stream, Pace pace, std::function<void()> work) {
  const auto delay = pace == Pace::slow ? next_delay() : std::chrono::microseconds(0);
  queue_of(stream).push({delay, std::move(work), true});
}

CompletionRef mark(StreamKey stream) {
  auto done = std::make_shared<Completion>();
  queue_of(stream).push({std::chrono::microseconds(0), [done] { done->finish(); }, false});
  return done;
}

void wait_on_stream(StreamKey stream, CompletionRef before) {
  enqueue(stream, Pace::instant, [before = std::move(before)] { before->wait(); });
}

bool is_forked() {
  return getpid() != runtime().process;
}

bool is_idle(StreamKey stream) {
  return queue_of(stream).idle();
}

void set_delay(double low_ms, double high_ms, std::int64_t seed) {
  if (!(0 <= low_ms && low_ms <= high_ms)) throw std::invalid_argument("sim: a delay needs 0 <= low_ms <= high_ms");
  std::lock_guard lock(runtime().mutex);
  runtime().low_ms = low_ms;
  runtime().high_ms = high_ms;
  runtime().random.seed(static_cast<std::uint64_t>(seed));
}

std::int64_t hold(StreamKey stream) {
  auto released = std::make_shared<Completion>();
  wait_on_stream(stream, released);
  std::lock_guard lock(runtime().mutex);
  runtime().held.emplace(runtime().next_held, released);
  return runtime().next_held++;
}

void release(std::int64_t held) {
  std::unique_lock lock(runtime().mutex);
  const auto found = runtime().held.extract(held);
  lock.unlock();
  if (found) found.mapped()->finish();
}

// ---- streams ----

StreamKey pool_stream(int device) {
  std::lock_guard lock(runtime().mutex);
  return {device, 1 + runtime().next_pool.at(device)++ % pool_streams};
}

StreamKey new_stream(int device) {
  std::lock_guard lock(runtime().mutex);
  return {device, 1 + pool_streams + runtime().next_new.at(device)++};
}

int exchange_device(int device) {
  if (device < 0 || device >= device_count) {
    throw std::out_of_range("sim:" + std::to_string(device) + " does not exist");
  }
  return std::exchange(this_device, device);
}

int current_device() {
  return this_device;
}

StreamKey exchange_stream(StreamKey stream) {
  return {stream.device, std::exchange(this_streams.at(stream.device), stream.id)};
}

StreamKey current_stream(int device) {
  return {device, this_streams.at(device)};
}

// ---- waits of the host ----

void wait_on_host(const Completion& completion, Wait kind) {
  count(kind);
  wait_patiently(completion);
}

void wait_on_host(StreamKey stream, Wait kind) {
  count(kind);
  wait_patiently(*mark(stream));
  queue_of(stream).throw_error();
}

void wait_on_host(int device) {
  count(Wait::device);
  std::vector<StreamKey> streams;
  {
    std::lock_guard lock(runtime().mutex);
    for (const auto& [stream, queue] : runtime().queues) {
      if (stream.device == device) streams.push_back(stream);
    }
  }
  std::vector<CompletionRef> marks;
  for (const auto stream : streams) {
    if (!is_idle(stream)) marks.push_back(mark(stream));  // and start no threads for streams that nobody used
  }
  for (const auto& mark : marks) wait_patiently(*mark);
  for (const auto stream : streams) queue_of(stream).throw_error();
}

std::array<std::int64_t, 2 * wait_kinds> wait_counts() {
  std::array<std::int64_t, 2 * wait_kinds> counts{};
  for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = runtime().waits[i];
  return counts;
}

void reset_wait_counts() {
  for (auto& waits : runtime().waits) waits = 0;
}

}  // namespace simulated
