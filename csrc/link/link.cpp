#include "link/link.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"

namespace torch_iroh::link {
namespace {

constexpr Duration kRedialPause = milliseconds(200);
// Heartbeats must not wait behind bulk data inside QUIC.
constexpr std::int32_t kControlPriority = 10;
constexpr std::uint64_t kStreamRefused = 1;
constexpr std::uint32_t kCloseDuplicate = 2;
constexpr std::uint32_t kCloseDead = 3;
constexpr const char* kDuplicate = "duplicate connection";

}  // namespace

Link::Link(iroh::Endpoint endpoint, iroh::EndpointAddr peer, const LinkOptions& options, Events events)
    : endpoint_(std::move(endpoint)),
      peer_(std::move(peer)),
      options_(options),
      events_(std::move(events)),
      liveness_(options.peer_timeout, Clock::now()) {}

void Link::connect() {
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::idle) return;
    state_ = State::dialing;
    dial_deadline_ = after(Clock::now(), options_.connect_timeout);
  }
  dial();
}

void Link::dial() {
  std::uint64_t attempt = 0;
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::dialing) return;
    attempt = next_attempt();
    redial_at_ = kNever;
  }
  auto on_result = [weak = weak_from_this(), attempt](Result<iroh::Connection> result) {
    if (const auto self = weak.lock()) self->on_dialed(attempt, std::move(result));
  };
  try {
    auto canceller = endpoint_.connect(peer_, kAlpn).then(on_result);
    const std::lock_guard lock(mutex_);
    if (state_ == State::dialing && attempt == attempt_) dialing_ = std::move(canceller);
  } catch (const Error& error) {
    on_result(error);
  }
}

void Link::on_dialed(std::uint64_t attempt, Result<iroh::Connection> result) {
  iroh::Connection connection;
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::dialing || attempt != attempt_) {
      if (!result.ok()) return;
      connection = std::move(result.value());
    } else if (!result.ok()) {
      // A peer that dialled us at the same moment refuses ours and keeps its own, which is about to arrive.
      last_dial_error_ = result.error().what();
      redial_at_ = after(Clock::now(), kRedialPause);
      return;
    } else {
      connection_ = result.value();
    }
  }
  if (connection) return connection.close(kCloseDuplicate, kDuplicate);
  begin(result.value(), attempt);
}

std::uint64_t Link::next_attempt() {
  lanes_.clear();
  lanes_seen_ = 0;
  recv_lanes_ = 0;
  return ++attempt_;
}

bool Link::adopt(iroh::Connection connection) {
  iroh::Connection dropped;
  iroh::Canceller dialing;
  std::uint64_t attempt = 0;
  {
    const std::lock_guard lock(mutex_);
    const bool mine_wins = state_ == State::dialing && endpoint_.id() < peer_.id;
    if (state_ == State::up || state_ == State::dead || mine_wins) {
      dropped = std::move(connection);
    } else {
      dropped = std::exchange(connection_, connection);
      dialing = std::exchange(dialing_, {});
      attempt = next_attempt();
      state_ = State::up;
      greeted_ = true;
      liveness_.on_frame(Clock::now());
    }
  }
  dialing.cancel();
  if (dropped) dropped.close(kCloseDuplicate, kDuplicate);
  if (attempt == 0) return false;
  begin(connection, attempt);
  return true;
}

void Link::begin(const iroh::Connection& connection, std::uint64_t attempt) {
  connection.closed().then([weak = weak_from_this(), attempt](Result<std::string> reason) {
    const auto self = weak.lock();
    if (self) self->on_closed(attempt, reason.ok() ? reason.value() : reason.error().what());
  });
  accept_lanes(connection, attempt);
  open_lanes(connection, attempt, 0);
}

void Link::open_lanes(const iroh::Connection& connection, std::uint64_t attempt, std::uint8_t index) {
  const auto lanes = static_cast<std::uint8_t>(options_.streams + 1);
  if (index == lanes) return release_backlog();
  connection.open_uni().then(
      [weak = weak_from_this(), connection, attempt, index, lanes](Result<iroh::SendStream> result) {
        const auto self = weak.lock();
        if (!self || !result.ok()) return;  // the connection is ending: on_closed reports it
        iroh::SendStream& stream = result.value();
        if (index == 0) stream.set_priority(kControlPriority).then([](Result<Nothing>) {});
        auto lane = std::make_shared<SendLane>(std::move(stream));
        const auto hello = std::make_shared<std::array<std::byte, HelloBody::kBytes>>(encode(HelloBody{index, lanes}));
        FrameHeader header{.type = FrameType::hello};
        header.length = HelloBody::kBytes;
        lane->send({header, *hello, [hello](Result<Nothing>) {}});
        {
          const std::lock_guard lock(self->mutex_);
          if (self->state_ == State::dead || attempt != self->attempt_) return;
          self->lanes_.push_back(std::move(lane));
        }
        self->open_lanes(connection, attempt, static_cast<std::uint8_t>(index + 1));
      });
}

void Link::accept_lanes(const iroh::Connection& connection, std::uint64_t attempt) {
  connection.accept_uni().then([weak = weak_from_this(), connection, attempt](Result<iroh::RecvStream> result) {
    const auto self = weak.lock();
    if (!self || !result.ok()) return;
    if (self->add_lane(std::move(result.value()), attempt)) self->accept_lanes(connection, attempt);
  });
}

bool Link::add_lane(iroh::RecvStream stream, std::uint64_t attempt) {
  {
    const std::lock_guard lock(mutex_);
    if (attempt != attempt_) return false;
    ++recv_lanes_;
  }
  auto greeted = std::make_shared<bool>(false);
  auto on_frame = [weak = weak_from_this(), attempt, greeted](const FrameHeader& header, Payload payload) {
    const auto self = weak.lock();
    if (!self) return false;
    if (!*greeted) return *greeted = self->greet(attempt, header, payload);
    {
      const std::lock_guard lock(self->mutex_);
      self->liveness_.on_frame(Clock::now());
    }
    if (header.type != FrameType::heartbeat) self->events_.on_frame(self->peer_.id, header, std::move(payload));
    return true;
  };
  auto on_end = [weak = weak_from_this(), attempt, greeted](const std::optional<Error>& error) {
    if (const auto self = weak.lock()) self->on_recv_lane_end(attempt, *greeted, error);
  };
  std::make_shared<RecvLane>(std::move(stream), std::move(on_frame), std::move(on_end))->start();
  return true;
}

bool Link::greet(std::uint64_t attempt, const FrameHeader& header, const Payload& payload) {
  try {
    if (header.type != FrameType::hello) throw Error(ErrorKind::protocol, "bad frame: a stream without a hello");
    const HelloBody hello = decode_hello(payload.bytes());
    const std::uint64_t bit = hello.lane < 64 ? std::uint64_t{1} << hello.lane : 0;
    {
      const std::lock_guard lock(mutex_);
      if (attempt != attempt_) return false;
      if ((lanes_seen_ & bit) != 0) throw Error(ErrorKind::protocol, "bad frame: a second hello for one lane");
      lanes_seen_ |= bit;
      liveness_.on_frame(Clock::now());
    }
    on_greeted();
    return true;
  } catch (const Error& error) {
    log_once(LogLevel::warn, "hello " + iroh::to_hex(peer_.id),
             "refused a stream of peer " + iroh::short_name(peer_.id) + ": " + error.what());
    return false;
  }
}

void Link::on_greeted() {
  {
    const std::lock_guard lock(mutex_);
    if (greeted_) return;
    greeted_ = true;
  }
  release_backlog();
}

// Frames wait until the peer has said hello and our own lanes are open.
void Link::release_backlog() {
  for (;;) {
    std::vector<OutFrame> control;
    std::vector<OutFrame> data;
    std::vector<std::shared_ptr<SendLane>> lanes;
    {
      const std::lock_guard lock(mutex_);
      if (!greeted_ || !lanes_are_open() || state_ == State::dead) return;
      control.swap(control_backlog_);
      data.swap(data_backlog_);
      lanes = lanes_;
      if (control.empty() && data.empty()) {
        state_ = State::up;
        released_ = true;
        return;
      }
    }
    for (OutFrame& frame : control) lanes[0]->send(std::move(frame));
    for (std::size_t i = 0; i < data.size(); ++i) lanes[1 + i % (lanes.size() - 1)]->send(std::move(data[i]));
  }
}

void Link::send_control(OutFrame frame) {
  send(std::move(frame), control_backlog_, true);
}

void Link::send_data(OutFrame frame) {
  send(std::move(frame), data_backlog_, false);
}

void Link::send(OutFrame frame, std::vector<OutFrame>& backlog, bool control) {
  std::shared_ptr<SendLane> lane;
  std::optional<Error> dead;
  {
    const std::lock_guard lock(mutex_);
    dead = cause_;
    if (!dead && released_) {
      lane =
          control ? lanes_[0] : *std::min_element(lanes_.begin() + 1, lanes_.end(), [](const auto& a, const auto& b) {
            return a->queued_bytes() < b->queued_bytes();
          });
    } else if (!dead) {
      backlog.push_back(std::move(frame));
    }
  }
  if (lane) {
    lane->send(std::move(frame));
  } else if (dead) {
    if (frame.done) frame.done(*dead);
  } else {
    connect();
  }
}

void Link::send_everywhere(const FrameHeader& header) {
  std::vector<std::shared_ptr<SendLane>> lanes;
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::up) return;
    lanes = lanes_;
  }
  for (const auto& lane : lanes) lane->send({header, {}, nullptr});
}

void Link::on_recv_lane_end(std::uint64_t attempt, bool greeted, const std::optional<Error>& error) {
  bool gone = false;
  {
    const std::lock_guard lock(mutex_);
    if (attempt != attempt_) return;
    --recv_lanes_;
    gone = closed_ && recv_lanes_ == 0;
  }
  if (error && error->kind() == ErrorKind::protocol) {
    if (greeted) return die(*error);
    log_once(LogLevel::warn, "stream " + iroh::to_hex(peer_.id),
             "refused a stream of peer " + iroh::short_name(peer_.id) + ": " + error->what());
  }
  if (gone) on_closed(attempt, closed_reason_);
}

// The connection has ended. What the peer sent before is still being read: it counts.
void Link::on_closed(std::uint64_t attempt, const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::dead || attempt != attempt_) return;
    if (state_ == State::dialing && !greeted_) {
      // Refused as a duplicate, or the peer does not know us yet: try again until the deadline.
      last_dial_error_ = reason;
      connection_ = {};
      next_attempt();
      redial_at_ = after(Clock::now(), kRedialPause);
      return;
    }
    closed_ = true;
    closed_reason_ = reason;
    if (recv_lanes_ > 0) return;
  }
  die(Error(ErrorKind::peer_gone, "its connection ended (" + reason + ")"));
}

void Link::on_tick(TimePoint now, Duration paused) {
  std::optional<Error> verdict;
  std::shared_ptr<SendLane> control;
  bool redial = false;
  {
    const std::lock_guard lock(mutex_);
    liveness_.forgive(paused);
    if (state_ == State::dialing) {
      if (now >= dial_deadline_) {
        verdict = Error(ErrorKind::peer_gone,
                        "it could not be reached within " + to_text(options_.connect_timeout) +
                            (last_dial_error_.empty() ? std::string() : " (last answer: " + last_dial_error_ + ")"));
      } else if (now >= redial_at_) {
        redial = true;
      }
    } else if (state_ == State::up) {
      if (liveness_.on_timer(now) == Verdict::dead) {
        verdict = Error(ErrorKind::peer_gone, "nothing was received from it for " + to_text(liveness_.quiet_for(now)) +
                                                  " (process gone, or its network is down)");
      } else if (now >= heartbeat_at_ && !lanes_.empty()) {
        heartbeat_at_ = now + options_.heartbeat;
        control = lanes_[0];
      }
    }
  }
  if (verdict) {
    die(*verdict);
  } else if (redial) {
    dial();
  } else if (control && control->idle()) {
    control->send({FrameHeader{}, {}, nullptr});
  }
}

void Link::flush(std::function<void()> flushed) {
  std::vector<std::shared_ptr<SendLane>> lanes;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::up) lanes = lanes_;
  }
  if (lanes.empty()) return flushed();
  auto left = std::make_shared<std::atomic<std::size_t>>(lanes.size());
  for (const auto& lane : lanes) {
    lane->finish([left, flushed] {
      if (left->fetch_sub(1) == 1) flushed();
    });
  }
}

void Link::kill(const Error& cause) {
  die(cause);
}

void Link::die(const Error& cause) {
  iroh::Connection connection;
  iroh::Canceller dialing;
  std::vector<std::shared_ptr<SendLane>> lanes;
  std::vector<OutFrame> backlog;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::dead) return;
    state_ = State::dead;
    cause_ = cause;
    connection = std::exchange(connection_, {});
    dialing = std::exchange(dialing_, {});
    lanes.swap(lanes_);
    backlog.swap(control_backlog_);
    std::move(data_backlog_.begin(), data_backlog_.end(), std::back_inserter(backlog));
    data_backlog_.clear();
  }
  dialing.cancel();
  if (connection) connection.close(kCloseDead, cause.kind() == ErrorKind::aborted ? "left" : "given up");
  for (const auto& lane : lanes) lane->fail(cause);
  finish(backlog, cause);
  events_.on_dead(peer_.id, cause);
}

void Link::finish(std::vector<OutFrame>& frames, const Error& error) {
  for (OutFrame& frame : frames) {
    if (frame.done) frame.done(error);
  }
}

bool Link::is_up() const {
  const std::lock_guard lock(mutex_);
  return state_ == State::up;
}

bool Link::is_dead() const {
  const std::lock_guard lock(mutex_);
  return state_ == State::dead;
}

std::string Link::path_text() const {
  iroh::Connection connection;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::up) connection = connection_;
  }
  if (!connection) return "not connected";
  for (const iroh::Path& path : connection.paths()) {
    if (path.selected) return (path.relay ? "relay " : "direct ") + path.remote_addr;
  }
  return "no path selected";
}

std::optional<double> Link::rtt_ms() const {
  iroh::Connection connection;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::up) connection = connection_;
  }
  if (!connection) return std::nullopt;
  for (const iroh::Path& path : connection.paths()) {
    if (path.selected) return static_cast<double>(path.rtt_ms);
  }
  return std::nullopt;
}

}  // namespace torch_iroh::link
