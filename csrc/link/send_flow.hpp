// One lane as its sender sees it, whatever connection carries it: numbers the frames, keeps each until the peer has
// acknowledged it, and begins again with the first that is not when it is given another stream.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "link/lane.hpp"

namespace torch_iroh::link {

class SendFlow : public std::enable_shared_from_this<SendFlow> {
 public:
  // Frames wait while there is no stream. A frame is done when a stream has taken it: from then on its bytes are ours.
  void send(OutFrame frame);
  void use(std::shared_ptr<SendLane> stream);  // null: wait for another
  // The peer has all before `next`. Throws Error(protocol) when that was never sent.
  void on_ack(std::uint32_t next);
  void fail(const Error& error);

  std::uint64_t queued_bytes() const { return queued_bytes_.load(std::memory_order_relaxed); }
  std::uint64_t acked_bytes() const { return acked_bytes_.load(std::memory_order_relaxed); }
  bool all_acked() const;

 private:
  struct Kept {
    FrameHeader header;
    std::span<const std::byte> bytes;  // lent at first, later `own`
    std::vector<std::byte> own;
    SendDone done;
    int holds = 0;  // streams, and copies, that may still read `bytes`
    bool written = false;
    bool acked = false;
  };
  using KeptPtr = std::shared_ptr<Kept>;

  void forward();  // called by the one who set `forwarding_`
  void on_written(const KeptPtr& kept, const Result<Nothing>& result);
  void release(const KeptPtr& kept);  // one hold less; tells the owner of the bytes when it may have them back

  mutable std::mutex mutex_;
  std::shared_ptr<SendLane> stream_;
  std::deque<KeptPtr> kept_;     // not acknowledged, in order
  std::size_t next_ = 0;         // of kept_: the first that this stream has not got
  std::uint64_t forwarded_ = 0;  // bytes of those before it
  std::uint32_t last_number_ = 0;
  bool forwarding_ = false;
  std::optional<Error> failed_;
  std::atomic<std::uint64_t> queued_bytes_{0};  // that no stream has taken yet
  std::atomic<std::uint64_t> acked_bytes_{0};
};

}  // namespace torch_iroh::link
