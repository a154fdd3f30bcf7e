// The simulated accelerator's streams and the host's waits for them: contract and counters. Knows nothing of torch.
//
// A stream is a first-in-first-out queue with one thread, started by its first piece of work. `Pace::slow` work starts
// after a random delay, as if the device were busy; marks, waits and poison take `Pace::instant`, so that a forgotten
// wait or record_stream loses the race. A process forked from one that used a stream cannot use any.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

namespace simulated {

inline constexpr int device_count = 2;

using Clock = std::chrono::steady_clock;

struct StreamKey {
  int device = 0;
  std::int64_t id = 0;  // 0 is the device's default stream
  auto operator<=>(const StreamKey&) const = default;
};

// Happens once. Whoever holds it may wait for it, also after the event that led here was recorded again or destroyed.
class Completion {
 public:
  void finish();
  bool finished() const;
  void wait() const;
  bool wait_until(Clock::time_point limit) const;
  std::optional<Clock::time_point> when() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::optional<Clock::time_point> when_;
};
using CompletionRef = std::shared_ptr<Completion>;

// ---- work ----

enum class Pace { instant, slow };

void enqueue(StreamKey stream, Pace pace, std::function<void()> work);
// Finished once everything enqueued on `stream` until now is done.
CompletionRef mark(StreamKey stream);
void wait_on_stream(StreamKey stream, CompletionRef before);
bool is_idle(StreamKey stream);
bool is_forked();  // then every use of a stream throws

// The bounds and the seed of the delays of all work enqueued from now on.
void set_delay(double low_ms, double high_ms, std::int64_t seed);

// Nothing enqueued after `hold` runs before `release` of the number it returned.
std::int64_t hold(StreamKey stream);
void release(std::int64_t held);

// ---- streams; current device and streams belong to the calling thread ----

StreamKey pool_stream(int device);
StreamKey new_stream(int device);
int exchange_device(int device);
int current_device();
StreamKey exchange_stream(StreamKey stream);
StreamKey current_stream(int device);

// ---- waits of the host: all throw after a minute; those for streams and devices throw the first error of their work
// ----

enum class Wait { event, stream, device, copy, scalar, fallback };
inline constexpr std::size_t wait_kinds = 6;

void wait_on_host(const Completion& completion, Wait kind);
void wait_on_host(StreamKey stream, Wait kind);
void wait_on_host(int device);

// How often the host waited, by kind: first for the thread that loaded this library, then for all others.
std::array<std::int64_t, 2 * wait_kinds> wait_counts();
void reset_wait_counts();

}  // namespace simulated
