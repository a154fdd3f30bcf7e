#include "link/road.hpp"

#include <utility>

#include "base/log.hpp"

namespace torch_iroh::link {
namespace {

constexpr Duration kRedialPause = milliseconds(200);
// QUIC's own attempt lasts 30 s and asks ever more rarely; after a long cut a fresh one is through at once.
constexpr Duration kDialAttempt = milliseconds(4000);
// Heartbeats must not wait behind bulk data inside QUIC.
constexpr std::int32_t kUrgent = 10;
// Most heartbeats ask for no answer: an idle group should cost next to nothing.
constexpr std::uint64_t kFirstEchoes = 4;
constexpr std::uint64_t kEchoEvery = 8;
constexpr std::size_t kMostAsked = 256;
constexpr double kLongestTrip = 1e6;  // ms

std::uint64_t clock_ticks(TimePoint time) {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(time.time_since_epoch()).count());
}

// iroh appends a backtrace where RUST_BACKTRACE is set.
std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

void say_hello(SendLane& lane, std::uint8_t index, std::uint8_t road, std::uint64_t session) {
  const auto hello =
      std::make_shared<std::array<std::byte, HelloBody::kBytes>>(encode(HelloBody{index, road, session}));
  FrameHeader header{.type = FrameType::hello};
  header.length = HelloBody::kBytes;
  lane.send({header, *hello, [hello](const Result<Nothing>&) {}});
}

}  // namespace

bool closed_by_peer(const std::string& reason) {
  return reason.starts_with("closed by peer") &&
         reason.find("(code " + std::to_string(kCloseOldLink) + ")") == std::string::npos;
}

void Road::start(Events events) {
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::idle) return;
    events_ = std::move(events);
    state_ = State::dialing;
  }
  dial();
}

void Road::dial() {
  std::uint64_t attempt = 0;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::closed) return;
    state_ = State::dialing;
    attempt = ++attempt_;
    until_ = after(Clock::now(), kDialAttempt);
  }
  auto on_result = [weak = weak_from_this(), attempt](Result<iroh::Connection> result) {
    if (const auto self = weak.lock()) self->on_dialed(attempt, std::move(result));
  };
  try {
    auto canceller = endpoint_.connect(peer_, kAlpn).then(on_result);
    const std::lock_guard lock(mutex_);
    if (attempt == attempt_ && state_ == State::dialing) dialing_ = std::move(canceller);
  } catch (const Error& error) {
    on_result(error);
  }
}

void Road::on_dialed(std::uint64_t attempt, Result<iroh::Connection> result) {
  {
    const std::lock_guard lock(mutex_);
    const bool current = attempt == attempt_ && state_ == State::dialing;
    if (!result.ok()) {
      if (!current) return;
      last_error_ = first_line(result.error().what());
      state_ = State::waiting;
      until_ = after(Clock::now(), kRedialPause);
      return;
    }
    if (!current) {
      result.value().close(kCloseOldLink, "another attempt was faster");
      return;
    }
  }
  const iroh::Connection connection = result.value();
  connection.closed().then([weak = weak_from_this(), attempt](Result<std::string> reason) {
    const auto self = weak.lock();
    if (self) self->on_closed(attempt, reason.ok() ? reason.value() : reason.error().what());
  });
  connection.open_uni().then([weak = weak_from_this(), attempt, connection](Result<iroh::SendStream> opened) {
    const auto self = weak.lock();
    if (!self || !opened.ok()) return;  // the connection's end is reported elsewhere
    opened.value().set_priority(kUrgent).then([](const Result<Nothing>&) {});
    auto pulse = std::make_shared<SendLane>(std::move(opened.value()));
    say_hello(*pulse, HelloBody::kPulse, self->number_, self->session_);
    {
      const std::lock_guard lock(self->mutex_);
      if (attempt != self->attempt_ || self->state_ != State::dialing) return;
      self->state_ = State::up;
      self->connection_ = connection;
      self->pulse_ = std::move(pulse);
      self->heartbeat_at_ = {};
      self->asked_.clear();
      self->answers_ = 0;
    }
    self->events_.on_up();
  });
}

void Road::on_closed(std::uint64_t attempt, const std::string& reason) {
  std::shared_ptr<SendLane> pulse;
  {
    const std::lock_guard lock(mutex_);
    if (attempt != attempt_ || state_ == State::closed) return;
    last_error_ = first_line(reason);
    connection_ = {};
    pulse = std::exchange(pulse_, nullptr);
    state_ = State::waiting;
    until_ = closed_by_peer(reason) ? kNever : after(Clock::now(), kRedialPause);
    asked_.clear();
    answers_ = 0;
  }
  if (pulse) pulse->fail(Error(ErrorKind::network, reason));
  if (closed_by_peer(reason)) {
    events_.on_refused(reason);
  } else {
    log(LogLevel::info, "the connection to endpoint " + iroh::short_name(peer_.id) + " ended (" + first_line(reason) +
                            "); dialling again");
    events_.on_down();
  }
}

void Road::close(std::uint32_t code, const std::string& reason) {
  iroh::Connection connection;
  iroh::Canceller dialing;
  std::shared_ptr<SendLane> pulse;
  {
    const std::lock_guard lock(mutex_);
    state_ = State::closed;
    connection = std::exchange(connection_, {});
    dialing = std::exchange(dialing_, {});
    pulse = std::exchange(pulse_, nullptr);
  }
  dialing.cancel();
  if (connection) connection.close(code, reason);
  if (pulse) pulse->fail(Error(ErrorKind::aborted, reason));
}

bool Road::is_up() const {
  const std::lock_guard lock(mutex_);
  return state_ == State::up;
}

iroh::Connection Road::connection() const {
  const std::lock_guard lock(mutex_);
  return connection_;
}

std::uint64_t Road::connection_count() const {
  const std::lock_guard lock(mutex_);
  return attempt_;
}

std::string Road::last_error() const {
  const std::lock_guard lock(mutex_);
  return last_error_;
}

void Road::open_lane(std::uint8_t lane, std::function<void(std::shared_ptr<SendLane>)> opened) {
  const iroh::Connection current = connection();
  if (!current) return opened(nullptr);
  current.open_uni().then(
      [self = shared_from_this(), lane, opened = std::move(opened)](Result<iroh::SendStream> result) {
        if (!result.ok()) return opened(nullptr);
        if (lane == 0) result.value().set_priority(kUrgent).then([](const Result<Nothing>&) {});
        auto stream = std::make_shared<SendLane>(std::move(result.value()));
        say_hello(*stream, lane, self->number_, self->session_);
        opened(std::move(stream));
      });
}

void Road::pulse(const FrameHeader& header, std::span<const std::byte> bytes) {
  std::shared_ptr<SendLane> lane;
  {
    const std::lock_guard lock(mutex_);
    lane = pulse_;
  }
  // A pulse that has to wait is of no use to anybody, and a stuck connection must not gather them.
  if (!lane || lane->queued_frames() > 64) return;
  const auto kept = std::make_shared<std::vector<std::byte>>(bytes.begin(), bytes.end());
  lane->send({header, *kept, [kept](const Result<Nothing>&) {}});
}

void Road::on_tick(TimePoint now, Duration interval, bool wants_answer) {
  bool redial = false;
  bool beat = false;
  iroh::Canceller stale;
  FrameHeader header{.type = FrameType::heartbeat};
  {
    const std::lock_guard lock(mutex_);
    redial = (state_ == State::waiting || state_ == State::dialing) && now >= until_;
    if (redial) stale = std::exchange(dialing_, {});
    if (state_ == State::up && now >= heartbeat_at_) {
      beat = true;
      heartbeat_at_ = now + interval;
      if (wants_answer || heartbeats_ < kFirstEchoes || heartbeats_ % kEchoEvery == 0) {
        header.sequence = clock_ticks(now);
        header.message = number_;
        if (asked_.size() < kMostAsked) asked_.push_back(now);
      }
      ++heartbeats_;
    }
  }
  if (redial) {
    dial();  // first: what the old attempt still says then counts no more
    stale.cancel();
  }
  if (beat) pulse(header, {});
}

std::optional<double> Road::on_echo(std::uint64_t asked, TimePoint now) {
  const std::uint64_t ticks = clock_ticks(now);
  if (asked > ticks) return std::nullopt;
  {
    const std::lock_guard lock(mutex_);
    if (!asked_.empty() && clock_ticks(asked_.front()) <= asked) {
      while (!asked_.empty() && clock_ticks(asked_.front()) <= asked) asked_.pop_front();
      ++answers_;
    }
  }
  const double milliseconds = static_cast<double>(ticks - asked) / 1e6;
  return milliseconds > kLongestTrip ? std::nullopt : std::optional(milliseconds);
}

void Road::forgive() {
  const std::lock_guard lock(mutex_);
  asked_.clear();
}

Duration Road::unanswered_for(TimePoint now) const {
  const std::lock_guard lock(mutex_);
  return state_ != State::up || asked_.empty() ? Duration::zero() : now - asked_.front();
}

int Road::answers() const {
  const std::lock_guard lock(mutex_);
  return answers_;
}

void Road::forget_answers() {
  const std::lock_guard lock(mutex_);
  answers_ = 0;
}

}  // namespace torch_iroh::link
