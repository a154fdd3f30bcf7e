// The one clock of the core. Deadlines are points on it; nothing here sleeps.
#pragma once

#include <chrono>
#include <string>

namespace torch_iroh {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Duration = Clock::duration;
using std::chrono::milliseconds;

inline constexpr TimePoint kNever = TimePoint::max();

// now + wait without overflow: a huge wait means never.
inline TimePoint after(TimePoint now, Duration wait) {
  return wait > kNever - now ? kNever : now + wait;
}

inline std::string whole_milliseconds(Duration duration) {
  return std::to_string(std::chrono::duration_cast<milliseconds>(duration).count());
}

// "3.0 s" or "250 ms", for error texts.
std::string to_text(Duration duration);

}  // namespace torch_iroh
