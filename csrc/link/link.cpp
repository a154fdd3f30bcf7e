// The two connections of a link: dialling, admitting, sending and receiving. How it lives and dies is in
// link_health.cpp.
#include "link/link.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"

namespace torch_iroh::link {
namespace {

constexpr Duration kRedialPause = milliseconds(200);
constexpr Duration kFarewell = milliseconds(1000);
// Heartbeats must not wait behind bulk data inside QUIC.
constexpr std::int32_t kControlPriority = 10;
constexpr std::uint32_t kCloseDuplicate = 2;

// iroh appends a backtrace where RUST_BACKTRACE is set.
std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

}  // namespace

Link::Link(iroh::Endpoint endpoint, iroh::EndpointAddr peer, const LinkOptions& options, Events events)
    : endpoint_(std::move(endpoint)),
      peer_(std::move(peer)),
      options_(options),
      events_(std::move(events)),
      liveness_(options.peer_timeout, Clock::now()) {}

// ---- sending ----

void Link::connect() {
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::idle) return;
    state_ = State::dialing;
    first_word_by_ = after(Clock::now(), options_.connect_timeout);
  }
  dial();
}

void Link::dial() {
  auto on_result = [weak = weak_from_this()](Result<iroh::Connection> result) {
    if (const auto self = weak.lock()) self->on_dialed(std::move(result));
  };
  try {
    auto canceller = endpoint_.connect(peer_, kAlpn).then(on_result);
    const std::lock_guard lock(mutex_);
    if (state_ == State::dialing && !outgoing_) dialing_ = std::move(canceller);
  } catch (const Error& error) {
    on_result(error);
  }
}

void Link::on_dialed(Result<iroh::Connection> result) {
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::dialing && result.ok()) {
      outgoing_ = result.value();
    } else if (state_ == State::dialing) {
      last_dial_error_ = first_line(result.error().what());
      redial_at_ = after(Clock::now(), kRedialPause);
      return;
    }
  }
  if (!result.ok()) return;
  const iroh::Connection& connection = result.value();
  if (is_dead()) return connection.close(kCloseDead, "given up");
  connection.closed().then([weak = weak_from_this()](Result<std::string> reason) {
    const auto self = weak.lock();
    if (self) self->on_outgoing_closed(reason.ok() ? reason.value() : reason.error().what());
  });
  open_lanes(connection, 0);
}

void Link::open_lanes(const iroh::Connection& connection, std::uint8_t index) {
  const auto lanes = static_cast<std::uint8_t>(options_.streams + 1);
  if (index == lanes) {
    choose_lanes();
    return release_backlog();
  }
  connection.open_uni().then([weak = weak_from_this(), connection, index, lanes](Result<iroh::SendStream> result) {
    const auto self = weak.lock();
    if (!self || !result.ok()) return;  // the connection is ending: its end is reported elsewhere
    iroh::SendStream& stream = result.value();
    if (index == 0) stream.set_priority(kControlPriority).then([](Result<Nothing>) {});
    auto lane = std::make_shared<SendLane>(std::move(stream));
    const auto hello = std::make_shared<std::array<std::byte, HelloBody::kBytes>>(encode(HelloBody{index, lanes}));
    FrameHeader header{.type = FrameType::hello};
    header.length = HelloBody::kBytes;
    lane->send({header, *hello, [hello](Result<Nothing>) {}});
    {
      const std::lock_guard lock(self->mutex_);
      if (self->state_ == State::dead) return;
      self->lanes_.push_back(std::move(lane));
    }
    self->open_lanes(connection, static_cast<std::uint8_t>(index + 1));
  });
}

// What was sent while there were no lanes goes first; only then is the link up, and later frames go straight to a lane.
void Link::release_backlog() {
  for (;;) {
    std::vector<OutFrame> control;
    std::vector<OutFrame> data;
    std::vector<FrameHeader> everywhere;
    std::vector<std::shared_ptr<SendLane>> lanes;
    {
      const std::lock_guard lock(mutex_);
      if (state_ == State::dead) return;
      control.swap(control_backlog_);
      data.swap(data_backlog_);
      everywhere.swap(everywhere_backlog_);
      lanes = lanes_;
      if (control.empty() && data.empty() && everywhere.empty()) {
        state_ = State::up;
        return;
      }
    }
    for (OutFrame& frame : control) lanes[0]->send(std::move(frame));
    for (OutFrame& frame : data) lanes[1]->send(std::move(frame));
    for (const FrameHeader& header : everywhere) {
      for (const auto& lane : lanes) lane->send({header, {}, nullptr});
    }
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
    if (!dead && state_ == State::up) {
      const auto less = [](const auto& a, const auto& b) { return a->queued_bytes() < b->queued_bytes(); };
      const auto first = lanes_.begin() + 1;
      lane = control ? lanes_[0] : *std::min_element(first, first + static_cast<std::ptrdiff_t>(lanes_in_use_), less);
      sent_data_ = sent_data_ || !control;
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
    if (state_ == State::dialing) everywhere_backlog_.push_back(header);
    if (state_ != State::up) return;
    lanes = lanes_;
  }
  for (const auto& lane : lanes) lane->send({header, {}, nullptr});
}

void Link::on_outgoing_closed(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::dead) return;
    // A peer that leaves ends both connections; what it sent before on its own is still being read, and counts.
    if (incoming_) {
      give_up_at_ = after(Clock::now(), kFarewell);
      closed_reason_ = reason;
      return;
    }
  }
  die(Error(ErrorKind::peer_gone, "it refused the connection or ended it (" + reason + ")"));
}

// ---- receiving ----

void Link::adopt(const iroh::Connection& connection) {
  bool dead = false;
  bool refuse = false;
  {
    const std::lock_guard lock(mutex_);
    dead = state_ == State::dead;
    // A second one replaces the first only while nothing has come on that: the peer's first attempt was cut short.
    refuse = !dead && incoming_ && lanes_seen_ != 0;
    if (!dead && !refuse) {
      incoming_ = connection;
      liveness_.on_frame(Clock::now());
    }
  }
  if (dead) return connection.close(kCloseDead, "given up");
  if (refuse) return connection.close(kCloseDuplicate, "a second connection");
  connection.closed().then([weak = weak_from_this(), connection](Result<std::string> reason) {
    const auto self = weak.lock();
    if (self) self->on_incoming_closed(reason.ok() ? reason.value() : reason.error().what());
  });
  accept_lanes(connection);
  connect();
}

void Link::accept_lanes(const iroh::Connection& connection) {
  connection.accept_uni().then([weak = weak_from_this(), connection](Result<iroh::RecvStream> result) {
    const auto self = weak.lock();
    if (!self || !result.ok()) return;
    self->add_lane(std::move(result.value()));
    self->accept_lanes(connection);
  });
}

void Link::add_lane(iroh::RecvStream stream) {
  {
    const std::lock_guard lock(mutex_);
    ++recv_lanes_;
  }
  auto greeted = std::make_shared<bool>(false);
  auto on_frame = [weak = weak_from_this(), greeted](const FrameHeader& header, Payload payload) {
    const auto self = weak.lock();
    if (!self) return false;
    {
      const std::lock_guard lock(self->mutex_);
      self->heard_ = true;
      self->liveness_.on_frame(Clock::now());
    }
    if (!std::exchange(*greeted, true)) {
      self->greet(header, payload);
    } else if (header.type == FrameType::hello) {
      throw Error(ErrorKind::protocol, "bad frame: a second hello on one stream");
    } else if (header.type == FrameType::heartbeat) {
      self->on_heartbeat(header);
    } else if (header.type == FrameType::closing) {
      self->on_closing(header);
    } else if (header.type == FrameType::farewell) {
      self->on_farewell();
    } else {
      self->events_.on_frame(self->peer_.id, header, std::move(payload));
    }
    return true;
  };
  auto on_end = [weak = weak_from_this()](const std::optional<Error>& error) {
    if (const auto self = weak.lock()) self->on_recv_lane_end(error);
  };
  std::make_shared<RecvLane>(std::move(stream), std::move(on_frame), std::move(on_end))->start();
}

// Throws Error(protocol).
void Link::greet(const FrameHeader& header, const Payload& payload) {
  if (header.type != FrameType::hello) throw Error(ErrorKind::protocol, "bad frame: a stream without a hello");
  const HelloBody hello = decode_hello(payload.bytes());
  const std::uint64_t bit = hello.lane < 64 ? std::uint64_t{1} << hello.lane : 0;
  const std::lock_guard lock(mutex_);
  if ((lanes_seen_ & bit) != 0) throw Error(ErrorKind::protocol, "bad frame: a second hello for one lane");
  lanes_seen_ |= bit;
}

void Link::on_recv_lane_end(const std::optional<Error>& error) {
  bool drained = false;
  {
    const std::lock_guard lock(mutex_);
    drained = --recv_lanes_ == 0 && incoming_closed_;
  }
  // The peer has proven who it is, so nobody else can have sent this.
  if (error && error->kind() == ErrorKind::protocol) return die(*error);
  if (drained) on_incoming_closed(closed_reason_);
}

void Link::on_incoming_closed(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::dead) return;
    incoming_closed_ = true;
    closed_reason_ = reason;
    if (recv_lanes_ > 0) return;  // the last lane to end comes back here
  }
  die(Error(ErrorKind::peer_gone, "its connection ended (" + reason + ")"));
}

}  // namespace torch_iroh::link
