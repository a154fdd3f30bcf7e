// Is the peer alive? A state machine fed with the time, without a clock or a socket of its own.
//
//   alive --quiet for half the timeout--> suspect --any frame--> alive
//   suspect --quiet for the timeout--> dead (final)
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/time.hpp"

namespace torch_iroh::link {

enum class Verdict : std::uint8_t { alive, suspect, dead };

class Liveness {
 public:
  Liveness(Duration timeout, TimePoint now) : timeout_(timeout), heard_(now) {}

  void on_frame(TimePoint now) {
    if (verdict_ == Verdict::dead) return;
    heard_ = now;
    verdict_ = Verdict::alive;
  }

  // This process itself stood still (suspended, stopped, starved): the silence of that time says nothing of the peer.
  void forgive(Duration pause) { heard_ += pause; }

  Verdict on_timer(TimePoint now) {
    if (verdict_ == Verdict::dead) return verdict_;
    heard_ = std::min(heard_, now);  // a frame that came right after a pause was forgiven it too
    if (now - heard_ >= timeout_) {
      verdict_ = Verdict::dead;
    } else if (now - heard_ >= timeout_ / 2) {
      verdict_ = Verdict::suspect;
    }
    return verdict_;
  }

  Duration quiet_for(TimePoint now) const { return now - heard_; }

 private:
  Duration timeout_;
  TimePoint heard_;
  Verdict verdict_ = Verdict::alive;
};

}  // namespace torch_iroh::link
