#include "link/send_flow.hpp"

#include <utility>

namespace torch_iroh::link {
namespace {

// What may wait for its acknowledgement: far more than one stream has in flight (1.25 MB per round trip), so that it
// bounds memory and never speed.
constexpr std::uint64_t kWindow = 8 << 20;

}  // namespace

void SendFlow::send(OutFrame frame) {
  std::optional<Error> failed;
  {
    const std::lock_guard lock(mutex_);
    failed = failed_;
    if (!failed) {
      auto kept = std::make_shared<Kept>();
      kept->header = frame.header;
      kept->header.number = last_number_ = next_number(last_number_);
      kept->bytes = frame.bytes;
      kept->done = std::move(frame.done);
      queued_bytes_ += kept->bytes.size();
      kept_.push_back(std::move(kept));
      if (std::exchange(forwarding_, true)) return;
    }
  }
  if (failed) {
    if (frame.done) frame.done(*failed);
  } else {
    forward();
  }
}

void SendFlow::use(std::shared_ptr<SendLane> stream) {
  std::shared_ptr<SendLane> old;
  bool mine = false;
  {
    const std::lock_guard lock(mutex_);
    if (failed_) {
      old = std::move(stream);
    } else {
      old = std::exchange(stream_, std::move(stream));
      next_ = 0;
      forwarded_ = 0;
      mine = !std::exchange(forwarding_, true);
    }
  }
  if (old) old->fail(Error(ErrorKind::aborted, "the lane goes on over another stream"));
  if (mine) forward();
}

void SendFlow::forward() {
  for (;;) {
    KeptPtr kept;
    std::shared_ptr<SendLane> stream;
    {
      const std::lock_guard lock(mutex_);
      if (!stream_ || next_ == kept_.size() || forwarded_ >= kWindow) {
        forwarding_ = false;
        return;
      }
      kept = kept_[next_++];
      forwarded_ += kept->bytes.size();
      ++kept->holds;
      stream = stream_;
    }
    stream->send({kept->header, kept->bytes, [self = shared_from_this(), kept](const Result<Nothing>& result) {
                    self->on_written(kept, result);
                  }});
  }
}

void SendFlow::on_written(const KeptPtr& kept, const Result<Nothing>& result) {
  bool copy = false;
  {
    const std::lock_guard lock(mutex_);
    if (result.ok() && !failed_ && !std::exchange(kept->written, true)) queued_bytes_ -= kept->bytes.size();
    // Only now, and only if the peer has not got it meanwhile, so that a fast link pays for few copies.
    copy = kept->written && !kept->acked && !failed_ && kept->holds == 1 && kept->own.empty() && !kept->bytes.empty();
  }
  if (copy) {
    std::vector<std::byte> own(kept->bytes.begin(), kept->bytes.end());
    const std::lock_guard lock(mutex_);
    if (kept->own.empty()) {
      kept->own = std::move(own);
      kept->bytes = kept->own;
    }
  }
  release(kept);
}

void SendFlow::release(const KeptPtr& kept) {
  SendDone done;
  std::optional<Error> failed;
  bool again = false;
  {
    const std::lock_guard lock(mutex_);
    --kept->holds;
    if (kept->holds > 0) return;
    const bool ours = !kept->own.empty() || kept->bytes.empty();
    if (kept->acked || (kept->written && ours)) {
      done = std::exchange(kept->done, nullptr);
    } else if (failed_) {
      done = std::exchange(kept->done, nullptr);
      failed = failed_;
    } else if (kept->written) {  // another stream held it when the copy was due
      ++kept->holds;
      again = true;
    }
  }
  if (again) return on_written(kept, Nothing{});
  if (!done) return;
  if (failed) return done(*failed);
  done(Nothing{});
}

void SendFlow::on_ack(std::uint32_t next) {
  std::vector<SendDone> done;
  bool mine = false;
  {
    const std::lock_guard lock(mutex_);
    if (number_before(next_number(last_number_), next)) {
      throw Error(ErrorKind::protocol, "bad frame: an acknowledgement of what was never sent");
    }
    while (!kept_.empty() && number_before(kept_.front()->header.number, next)) {
      Kept& kept = *kept_.front();
      kept.acked = true;
      acked_bytes_ += kept.bytes.size();
      if (!std::exchange(kept.written, true)) queued_bytes_ -= kept.bytes.size();
      if (kept.holds == 0 && kept.done) done.push_back(std::exchange(kept.done, nullptr));
      if (next_ > 0) {
        --next_;
        forwarded_ -= kept.bytes.size();
      }
      kept_.pop_front();
    }
    mine = !std::exchange(forwarding_, true);
  }
  for (const SendDone& one : done) one(Nothing{});
  if (mine) forward();
}

void SendFlow::fail(const Error& error) {
  std::shared_ptr<SendLane> stream;
  std::vector<SendDone> done;
  {
    const std::lock_guard lock(mutex_);
    if (failed_) return;
    failed_ = error;
    stream = std::exchange(stream_, nullptr);
    for (const KeptPtr& kept : kept_) {
      if (kept->holds == 0 && kept->done) done.push_back(std::exchange(kept->done, nullptr));
    }
    kept_.clear();
    next_ = 0;
    queued_bytes_ = 0;
  }
  if (stream) stream->fail(error);
  for (const SendDone& one : done) one(error);
}

bool SendFlow::all_acked() const {
  const std::lock_guard lock(mutex_);
  return kept_.empty();
}

}  // namespace torch_iroh::link
