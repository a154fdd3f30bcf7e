// How a link lives: heartbeats, round trips, lanes in use, the verdict on a silent peer, farewells and death.
#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "link/link.hpp"

namespace torch_iroh::link {
namespace {

constexpr std::size_t kRttSamples = 8;
// Most heartbeats ask for no answer: an idle group should cost next to nothing.
constexpr std::uint64_t kFirstEchoes = 4;
constexpr std::uint64_t kEchoEvery = 8;
// A stream carries at most 1.25 MB per round trip (iroh's fixed window), so 1 Gbit/s needs one more every 10 ms; more
// than needed only costs CPU (loopback, 2 cores, 64 MiB all_reduce of 2 ranks: 1 lane 1.8 Gbit/s in all, 4 lanes 1.2).
constexpr double kRttPerLane = 8.0;  // ms
constexpr Duration kChooseLanesEvery = milliseconds(1000);

std::uint64_t clock_ticks(TimePoint time) {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(time.time_since_epoch()).count());
}

FrameHeader heartbeat(TimePoint now, bool echo) {
  FrameHeader header{.type = FrameType::heartbeat};
  header.sequence = echo ? clock_ticks(now) : 0;
  return header;
}

}  // namespace

void Link::choose_lanes() {
  const auto path = selected_path();
  const double rtt = path ? static_cast<double>(path->rtt_ms) : 0.0;
  const std::lock_guard lock(mutex_);
  lanes_in_use_ = std::clamp<std::size_t>(static_cast<std::size_t>(rtt / kRttPerLane) + 1, 1,
                                          static_cast<std::size_t>(options_.streams));
}

std::optional<Error> Link::verdict_locked(TimePoint now) {
  if (state_ == State::idle || state_ == State::dead) return std::nullopt;
  if (now >= give_up_at_) return Error(ErrorKind::peer_gone, "its connection ended (" + closed_reason_ + ")");
  const bool reached = state_ == State::up && heard_;
  if (!reached && now >= first_word_by_) {
    return Error(ErrorKind::peer_gone,
                 "it could not be reached within " + to_text(options_.connect_timeout) +
                     (last_dial_error_.empty() ? std::string() : " (last answer: " + last_dial_error_ + ")"));
  }
  if (heard_ && liveness_.on_timer(now) == Verdict::dead) {
    return Error(ErrorKind::peer_gone, "nothing was received from it for " + to_text(liveness_.quiet_for(now)) +
                                           " (process gone, or its network is down)");
  }
  return std::nullopt;
}

void Link::on_tick(TimePoint now, Duration paused) {
  std::optional<Error> verdict;
  std::shared_ptr<SendLane> control;
  bool redial = false;
  bool choose = false;
  bool echo = false;
  {
    const std::lock_guard lock(mutex_);
    liveness_.forgive(paused);
    verdict = verdict_locked(now);
    if (!verdict && now >= redial_at_) {
      redial = true;
      redial_at_ = kNever;
    }
    if (!verdict && state_ == State::up && now >= heartbeat_at_) {
      heartbeat_at_ = now + options_.heartbeat;
      echo = heartbeats_++ % kEchoEvery == 0 || heartbeats_ < kFirstEchoes;
      control = lanes_[0];
    }
    if (sent_data_ && now >= choose_lanes_at_) {
      choose = true;
      sent_data_ = false;
      choose_lanes_at_ = now + kChooseLanesEvery;
    }
  }
  if (verdict) return die(*verdict);
  if (redial) dial();
  if (choose) choose_lanes();
  // Whatever is still queued is a sign of life as good as a heartbeat.
  if (control && control->idle()) control->send({heartbeat(now, echo), {}, nullptr});
}

// QUIC's own acknowledgement is not enough to hang up on: a stream that this side has not accepted yet would be lost.
void Link::on_closing(const FrameHeader& header) {
  {
    const std::lock_guard lock(mutex_);
    if (++closings_ != header.message) return;
  }
  send_control({FrameHeader{.type = FrameType::farewell}, {}, nullptr});
}

void Link::on_farewell() {
  std::function<void()> flushed;
  {
    const std::lock_guard lock(mutex_);
    flushed = std::exchange(flushed_, nullptr);
  }
  if (flushed) flushed();
}

void Link::on_heartbeat(const FrameHeader& header) {
  if (header.sequence == 0) return;
  if (header.chunk == 0) {
    FrameHeader echo = header;
    echo.chunk = 1;
    std::shared_ptr<SendLane> control;
    {
      const std::lock_guard lock(mutex_);
      if (state_ == State::up) control = lanes_[0];
    }
    if (control) control->send({echo, {}, nullptr});
    return;
  }
  const double sample = static_cast<double>(clock_ticks(Clock::now()) - header.sequence) / 1e6;
  if (sample < 0 || sample > 1e6) return;  // not a time that we sent
  const std::lock_guard lock(mutex_);
  rtts_ms_.push_back(sample);
  if (rtts_ms_.size() > kRttSamples) rtts_ms_.pop_front();
}

void Link::flush(std::function<void()> flushed) {
  {
    const std::lock_guard lock(mutex_);
    const bool pending = !(control_backlog_.empty() && data_backlog_.empty() && everywhere_backlog_.empty());
    if (state_ == State::up || (state_ == State::dialing && pending)) flushed_ = std::exchange(flushed, nullptr);
  }
  if (flushed) return flushed();
  FrameHeader closing{.type = FrameType::closing};
  closing.message = static_cast<std::uint32_t>(options_.streams + 1);
  send_everywhere(closing);
}

void Link::kill(const Error& cause) {
  die(cause);
}

void Link::die(const Error& cause) {
  iroh::Connection outgoing;
  iroh::Connection incoming;
  iroh::Canceller dialing;
  std::vector<std::shared_ptr<SendLane>> lanes;
  std::vector<OutFrame> backlog;
  std::function<void()> flushed;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::dead) return;
    state_ = State::dead;
    cause_ = cause;
    outgoing = std::exchange(outgoing_, {});
    incoming = std::exchange(incoming_, {});
    dialing = std::exchange(dialing_, {});
    lanes.swap(lanes_);
    backlog.swap(control_backlog_);
    std::move(data_backlog_.begin(), data_backlog_.end(), std::back_inserter(backlog));
    data_backlog_.clear();
    flushed = std::exchange(flushed_, nullptr);
  }
  dialing.cancel();
  const std::string reason = cause.kind() == ErrorKind::aborted ? "left" : "given up";
  if (outgoing) outgoing.close(kCloseDead, reason);
  if (incoming) incoming.close(kCloseDead, reason);
  for (const auto& lane : lanes) lane->fail(cause);
  for (OutFrame& frame : backlog) {
    if (frame.done) frame.done(cause);
  }
  if (flushed) flushed();
  events_.on_dead(peer_.id, cause);
}

bool Link::is_up() const {
  const std::lock_guard lock(mutex_);
  return state_ == State::up;
}

bool Link::is_dead() const {
  const std::lock_guard lock(mutex_);
  return state_ == State::dead;
}

std::optional<iroh::Path> Link::selected_path() const {
  iroh::Connection connection;
  {
    const std::lock_guard lock(mutex_);
    connection = outgoing_ ? outgoing_ : incoming_;
  }
  if (!connection) return std::nullopt;
  for (const iroh::Path& path : connection.paths()) {
    if (path.selected) return path;
  }
  return std::nullopt;
}

std::string Link::path_text() const {
  const auto path = selected_path();
  if (!path) return "not connected";
  return (path->relay ? "relay " : "direct ") + path->remote_addr;
}

std::optional<double> Link::rtt_ms() const {
  const auto path = selected_path();
  if (!path) return std::nullopt;
  const std::lock_guard lock(mutex_);
  if (rtts_ms_.empty()) return static_cast<double>(path->rtt_ms);
  return *std::min_element(rtts_ms_.begin(), rtts_ms_.end());
}

}  // namespace torch_iroh::link
