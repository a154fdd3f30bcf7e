// One stream of a link. A SendLane writes queued frames one after the other; a RecvLane cuts the stream back into
// frames. Neither knows groups or peers.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/payload.hpp"
#include "iroh/endpoint.hpp"
#include "link/frame.hpp"

namespace torch_iroh::link {

using SendDone = std::function<void(Result<Nothing>)>;

struct OutFrame {
  FrameHeader header;
  std::span<const std::byte> bytes;  // lent until `done` is called
  SendDone done;
};

// Thread-safe. Holds at most one write in iroh at a time: memory in flight stays bounded by QUIC's own window.
class SendLane : public std::enable_shared_from_this<SendLane> {
 public:
  explicit SendLane(iroh::SendStream stream) : stream_(std::move(stream)) {}

  void send(OutFrame frame);
  // Fails what is queued, what is being written and whatever comes later; the peer is sent no more of it.
  void fail(const Error& error);
  std::uint64_t queued_bytes() const { return queued_bytes_.load(std::memory_order_relaxed); }
  bool idle();  // nothing queued, nothing being written
  std::size_t queued_frames();

 private:
  struct Batch {
    std::vector<std::byte> head;      // headers and small payloads, ready to write
    std::span<const std::byte> tail;  // a large payload, written from where it lies
    std::vector<OutFrame> frames;
    std::uint64_t bytes = 0;
  };
  void pump();  // called by the one who set `writing_`
  bool next_batch(Batch& batch);
  bool write_here(Batch batch);  // false when the write goes on elsewhere

  iroh::SendStream stream_;
  std::mutex mutex_;
  std::deque<OutFrame> queue_;
  bool writing_ = false;
  iroh::Canceller write_;  // the one in iroh
  std::optional<Error> failed_;
  std::atomic<std::uint64_t> queued_bytes_{0};
};

class RecvLane : public std::enable_shared_from_this<RecvLane> {
 public:
  // Both run on a polling thread, one call at a time, in the order of the stream. A false from on_frame ends the
  // lane, and so does an Error that it throws.
  using OnFrame = std::function<bool(const FrameHeader&, Payload)>;
  using OnEnd = std::function<void(std::optional<Error>)>;  // no error: the peer finished the stream

  RecvLane(iroh::RecvStream stream, OnFrame on_frame, OnEnd on_end)
      : stream_(std::move(stream)), on_frame_(std::move(on_frame)), on_end_(std::move(on_end)) {}

  void start() { read_header(); }

 private:
  void read_header();
  void on_bytes(Result<Payload> result);
  void on_payload(Result<Payload> result);
  bool parse();  // delivers whole frames; false when a payload must be read first, or the lane has ended
  bool deliver(const FrameHeader& header, Payload payload);
  void end(std::optional<Error> error);

  iroh::RecvStream stream_;
  OnFrame on_frame_;
  OnEnd on_end_;
  Payload pending_;       // read, not parsed yet
  FrameHeader header_;    // of the frame whose payload is being read
  Payload payload_head_;  // the part of that payload that came with the header
  bool bulk_ = false;     // the last frame was large: read headers alone, so that payloads stay whole
  bool ended_ = false;
};

}  // namespace torch_iroh::link
