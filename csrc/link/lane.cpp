#include "link/lane.hpp"

#include <algorithm>
#include <utility>

namespace torch_iroh::link {
namespace {

// Up to this size frames are gathered into one write, made by the thread that has them: copying costs less than waking
// a polling thread.
constexpr std::size_t kSmallFrame = 16 << 10;
// One read brings a small frame whole; a large one is then read exactly, into a buffer of its own size.
constexpr std::uint32_t kSmallRead = 4096;
constexpr std::size_t kBulk = 32 << 10;
constexpr std::uint64_t kGivenUp = 1;

}  // namespace

void SendLane::send(OutFrame frame) {
  std::optional<Error> failed;
  {
    const std::lock_guard lock(mutex_);
    failed = failed_;
    if (!failed) {
      queued_bytes_ += frame.bytes.size();
      queue_.push_back(std::move(frame));
      if (std::exchange(writing_, true)) return;
    }
  }
  if (failed) {
    if (frame.done) frame.done(*failed);
  } else {
    pump();
  }
}

void SendLane::fail(const Error& error) {
  std::deque<OutFrame> dropped;
  iroh::Canceller write;
  {
    const std::lock_guard lock(mutex_);
    if (failed_) return;
    failed_ = error;
    dropped.swap(queue_);
    write = std::exchange(write_, {});
  }
  write.cancel();
  try {
    stream_.reset(kGivenUp).then([](const Result<Nothing>&) {});
  } catch (const Error&) {
    // The library is closed, and the stream with it.
  }
  for (OutFrame& frame : dropped) {
    if (frame.done) frame.done(error);
  }
}

bool SendLane::idle() {
  const std::lock_guard lock(mutex_);
  return !writing_ && queue_.empty();
}

std::size_t SendLane::queued_frames() {
  const std::lock_guard lock(mutex_);
  return queue_.size();
}

bool SendLane::next_batch(Batch& batch) {
  const std::lock_guard lock(mutex_);
  while (!queue_.empty()) {
    OutFrame& frame = queue_.front();
    const bool small = frame.bytes.size() <= kSmallFrame;
    if (!batch.frames.empty() && (!small || batch.bytes + frame.bytes.size() > kSmallFrame)) break;
    const auto header = encode(frame.header);
    batch.head.insert(batch.head.end(), header.begin(), header.end());
    if (small) {
      batch.head.insert(batch.head.end(), frame.bytes.begin(), frame.bytes.end());
    } else {
      batch.tail = frame.bytes;
    }
    batch.bytes += frame.bytes.size();
    batch.frames.push_back(std::move(frame));
    queue_.pop_front();
    if (!small) break;
  }
  if (!batch.frames.empty()) return true;
  writing_ = false;
  return false;
}

void SendLane::pump() {
  for (;;) {
    Batch batch;
    if (!next_batch(batch)) return;
    if (!batch.tail.empty()) {
      iroh::pollers().post([self = shared_from_this(), batch = std::move(batch)]() mutable {
        if (self->write_here(std::move(batch))) self->pump();
      });
      return;
    }
    if (!write_here(std::move(batch))) return;
  }
}

bool SendLane::write_here(Batch batch) {
  // Whoever comes second, this thread or the completion, goes on with the queue: no recursion, no lost turn.
  auto first = std::make_shared<std::atomic<bool>>(true);
  auto frames = std::make_shared<std::vector<OutFrame>>(std::move(batch.frames));
  auto done = [self = shared_from_this(), first, frames, bytes = batch.bytes](Result<Nothing> result) {
    self->queued_bytes_ -= bytes;
    for (OutFrame& frame : *frames) {
      if (frame.done) frame.done(result);
    }
    if (!result.ok()) self->fail(result.error());
    if (!first->exchange(false)) self->pump();
  };
  try {
    auto write = stream_.write_all(batch.head, batch.tail).then_here(done);
    bool late = false;
    {
      const std::lock_guard lock(mutex_);
      late = failed_.has_value();
      if (!late) write_ = write;
    }
    if (late) write.cancel();
  } catch (const Error& error) {
    done(error);
  }
  return !first->exchange(false);
}

void RecvLane::read_header() {
  // In a row of large frames the header is read alone, so that the next payload arrives whole in one buffer.
  const bool alone = bulk_ && pending_.size() == 0;
  auto future = alone ? stream_.read(kHeaderBytes) : stream_.read(kSmallRead);
  std::move(future).then([self = shared_from_this()](Result<Payload> result) { self->on_bytes(std::move(result)); });
}

void RecvLane::on_bytes(Result<Payload> result) {
  if (!result.ok()) return end(result.error());
  if (result.value().size() == 0) {
    if (pending_.size() == 0) return end(std::nullopt);
    return end(Error(ErrorKind::network, "the stream ended inside a frame"));
  }
  if (pending_.size() == 0) {
    pending_ = std::move(result.value());
  } else {
    pending_ = join(pending_, result.value());
  }
  if (parse()) read_header();
}

bool RecvLane::parse() {
  try {
    while (pending_.size() >= kHeaderBytes) {
      header_ = decode(pending_.bytes().first<kHeaderBytes>());
      const std::size_t have = std::min<std::size_t>(pending_.size() - kHeaderBytes, header_.length);
      payload_head_ = pending_.slice(kHeaderBytes, have);
      pending_ = pending_.slice(kHeaderBytes + have, pending_.size() - kHeaderBytes - have);
      bulk_ = header_.length >= kBulk;
      if (have < header_.length) {
        stream_.read_exact(header_.length - static_cast<std::uint32_t>(have))
            .then([self = shared_from_this()](Result<Payload> rest) { self->on_payload(std::move(rest)); });
        return false;
      }
      if (!deliver(header_, std::move(payload_head_))) return false;
    }
  } catch (const Error& error) {
    end(error);
    return false;
  }
  return true;
}

void RecvLane::on_payload(Result<Payload> result) {
  if (!result.ok()) return end(result.error());
  Payload payload = std::move(result.value());
  if (payload_head_.size() != 0) payload = join(payload_head_, payload);
  payload_head_ = {};
  if (deliver(header_, std::move(payload)) && parse()) read_header();
}

bool RecvLane::deliver(const FrameHeader& header, Payload payload) {
  try {
    if (on_frame_(header, std::move(payload))) return true;
    end(std::nullopt);
  } catch (const Error& error) {
    end(error);
  }
  return false;
}

void RecvLane::end(std::optional<Error> error) {
  if (std::exchange(ended_, true)) return;
  on_frame_ = nullptr;
  const OnEnd on_end = std::exchange(on_end_, nullptr);
  on_end(std::move(error));
}

}  // namespace torch_iroh::link
