// What several test files share: sample sizes under sanitizers, and waiting for completions with a limit.
#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>

#include "base/error.hpp"
#include "base/time.hpp"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TORCH_IROH_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TORCH_IROH_SANITIZED 1
#endif
#endif

namespace torch_iroh::testing {

// Sanitizers make every access 5 to 20 times as dear. They look for errors of memory and order, which a sample shows as
// well as the whole; values are proved by the plain build.
#ifdef TORCH_IROH_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// How long a test waits for what must happen: never reached when all is well, so it may be generous.
inline constexpr Duration kPatience = milliseconds(30000);

inline std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) {
    text += "0123456789abcdef"[std::to_integer<unsigned>(byte) >> 4];
    text += "0123456789abcdef"[std::to_integer<unsigned>(byte) & 15];
  }
  return text;
}

// The path of this program, for tests that need a process of their own.
extern std::string g_program;

inline bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// True as soon as `condition` holds; false when it does not within `limit`.
template <typename Condition>
bool eventually(Condition condition, Duration limit = kPatience) {
  for (const TimePoint until = after(Clock::now(), limit); Clock::now() < until;) {
    if (condition()) return true;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return condition();
}

// How one asynchronous call ended. Completions may come on any thread, and must come once.
class Outcome {
 public:
  void set(const Error* error, int source = -1) {
    const std::lock_guard lock(mutex_);
    ++calls_;
    if (error != nullptr) error_ = *error;
    source_ = source;
    changed_.notify_all();
  }
  bool wait(Duration limit = kPatience) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [&] { return calls_ > 0; });
  }
  int calls() const {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  std::optional<Error> error() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }
  int source() const {
    const std::lock_guard lock(mutex_);
    return source_;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  int calls_ = 0;
  std::optional<Error> error_;
  int source_ = -1;
};

}  // namespace torch_iroh::testing
