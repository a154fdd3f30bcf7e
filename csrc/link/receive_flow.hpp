// One lane as its receiver sees it: whatever streams bring its frames, each is delivered once and in order.
//
// Every stream of a lane begins with a frame that the receiver has, or the one it waits for, and leaves none out; so a
// number from further on is a fault of the sender, and nothing is ever kept back for want of an earlier frame.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "base/payload.hpp"
#include "link/frame.hpp"

namespace torch_iroh::link {

class ReceiveFlow {
 public:
  using Frame = std::pair<FrameHeader, Payload>;

  enum class Offer : std::uint8_t {
    deliver,    // the caller delivers `frame`, then all that take() returns
    waits,      // another thread, which is delivering, will take it
    duplicate,  // it has come before
  };
  // Throws Error(protocol) when an earlier frame is missing.
  Offer offer(const FrameHeader& header, Payload& payload) {
    const std::lock_guard lock(mutex_);
    if (number_before(header.number, next_)) return Offer::duplicate;
    if (header.number != next_) throw Error(ErrorKind::protocol, "bad frame: one before it on its lane is missing");
    next_ = next_number(next_);
    if (std::exchange(delivering_, true)) {
      waiting_.emplace_back(header, std::move(payload));
      return Offer::waits;
    }
    return Offer::deliver;
  }
  // After a delivery: the next to deliver. None: this thread's turn is over.
  std::optional<Frame> take() {
    const std::lock_guard lock(mutex_);
    if (waiting_.empty()) {
      delivering_ = false;
      return std::nullopt;
    }
    Frame frame = std::move(waiting_.front());
    waiting_.pop_front();
    return frame;
  }

  std::uint32_t next() const {
    const std::lock_guard lock(mutex_);
    return next_;
  }

 private:
  mutable std::mutex mutex_;
  std::uint32_t next_ = 1;
  bool delivering_ = false;
  std::deque<Frame> waiting_;
};

}  // namespace torch_iroh::link
