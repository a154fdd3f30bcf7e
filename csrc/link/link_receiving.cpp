// What a link receives: connections that the peer dialled, their streams, the frames in order, and acknowledgements.
#include <algorithm>
#include <utility>

#include "base/workers.hpp"
#include "link/link.hpp"

namespace torch_iroh::link {
namespace {

constexpr std::size_t kMostIncoming = 4 * HelloBody::kMaxRoads;
// How much may arrive before it is acknowledged, and how long that may take: the sender keeps a copy until then.
constexpr std::uint64_t kAckBytes = 512 << 10;
constexpr Duration kAckDelay = milliseconds(20);

}  // namespace

void Link::adopt(const iroh::Connection& connection) {
  bool dead = false;
  bool refuse = false;
  {
    const std::lock_guard lock(mutex_);
    dead = state_ == State::dead;
    refuse = !dead && incoming_.size() >= kMostIncoming;
    if (!dead && !refuse) {
      incoming_.push_back(connection);
      liveness_.on_frame(Clock::now());
    }
  }
  if (dead) return connection.close(kCloseDead, "given up");
  if (refuse) return connection.close(kCloseOldLink, "too many connections");
  connection.closed().then([weak = weak_from_this(), connection](Result<std::string> reason) {
    const auto self = weak.lock();
    if (!self) return;
    {
      const std::lock_guard lock(self->mutex_);
      std::erase_if(self->incoming_, [&](const iroh::Connection& one) { return one == connection; });
    }
    const std::string why = reason.ok() ? reason.value() : reason.error().what();
    if (closed_by_peer(why)) self->on_incoming_closed(why);
  });
  connect();
  accept_lanes(connection);
}

void Link::accept_lanes(const iroh::Connection& connection) {
  connection.accept_uni().then([weak = weak_from_this(), connection](Result<iroh::RecvStream> result) {
    const auto self = weak.lock();
    if (!self || !result.ok()) return;
    self->add_lane(connection, std::move(result.value()));
    self->accept_lanes(connection);
  });
}

void Link::add_lane(const iroh::Connection& connection, iroh::RecvStream stream) {
  {
    const std::lock_guard lock(mutex_);
    ++recv_lanes_;
  }
  auto hello = std::make_shared<std::optional<HelloBody>>();
  auto on_frame = [weak = weak_from_this(), hello, connection](const FrameHeader& header, Payload payload) {
    const auto self = weak.lock();
    if (!self) return false;
    {
      const std::lock_guard lock(self->mutex_);
      self->heard_ = true;
      self->liveness_.on_frame(Clock::now());
    }
    if (!*hello) {
      *hello = self->greet(connection, header, payload);
      return true;
    }
    const bool pulse = (*hello)->lane == HelloBody::kPulse;
    if (header.type == FrameType::hello) {
      throw Error(ErrorKind::protocol, "bad frame: a second hello on one stream");
    } else if (pulse == is_numbered(header.type)) {
      throw Error(ErrorKind::protocol, "bad frame: type " + std::to_string(static_cast<int>(header.type)) +
                                           " on a lane where it does not belong");
    } else if (header.type == FrameType::heartbeat) {
      self->on_heartbeat(header, (*hello)->road);
    } else if (header.type == FrameType::ack) {
      self->on_acks(payload);
    } else {
      self->on_numbered((*hello)->lane, header, std::move(payload));
    }
    return true;
  };
  auto on_end = [weak = weak_from_this()](const std::optional<Error>& error) {
    if (const auto self = weak.lock()) self->on_recv_lane_end(error);
  };
  std::make_shared<RecvLane>(std::move(stream), std::move(on_frame), std::move(on_end))->start();
}

// Throws Error(protocol).
HelloBody Link::greet(const iroh::Connection& connection, const FrameHeader& header, const Payload& payload) {
  if (header.type != FrameType::hello) throw Error(ErrorKind::protocol, "bad frame: a stream without a hello");
  const HelloBody hello = decode_hello(payload.bytes());
  {
    const std::lock_guard lock(mutex_);
    if (!session_of_peer_) session_of_peer_ = hello.session;
    if (*session_of_peer_ == hello.session) return hello;
  }
  connection.close(kCloseOldLink, "this end still had the old link");
  const Error gone(ErrorKind::peer_gone, "it had given up the link, and began another");
  die(gone);
  throw gone;
}

void Link::on_numbered(std::uint8_t lane, const FrameHeader& header, Payload payload) {
  ReceiveFlow& flow = receive_.at(lane);
  const std::size_t size = payload.size();
  auto offer = flow.offer(header, payload);
  bool now = false;
  bool timer = false;
  {
    const std::lock_guard lock(mutex_);
    ack_again_ = 3;
    unacked_bytes_ += size;
    now = unacked_bytes_ >= kAckBytes;
    timer = !now && !std::exchange(ack_timer_, true);
  }
  if (offer == ReceiveFlow::Offer::deliver) {
    deliver(header, std::move(payload));
    while (auto more = flow.take()) deliver(more->first, std::move(more->second));
  }
  if (now) send_acks();
  if (timer) {
    workers().at(after(Clock::now(), kAckDelay), [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->send_acks();
    });
  }
}

void Link::deliver(const FrameHeader& header, Payload payload) {
  if (header.type == FrameType::closing) return on_closing(header);
  if (header.type == FrameType::farewell) return on_farewell();
  events_.on_frame(peer_.main.id, header, std::move(payload));
}

void Link::send_acks() {
  std::vector<Ack> acks;
  std::vector<RoadPtr> roads;
  {
    const std::lock_guard lock(mutex_);
    unacked_bytes_ = 0;
    ack_timer_ = false;
    if (roads_.empty()) return;
    const bool standby_only = on_standby_ || !roads_.front()->is_up();
    for (const RoadPtr& road : roads_) {
      if (road && road->number() <= 1 && road->is_up() && (road->number() == 0 || standby_only)) roads.push_back(road);
    }
  }
  for (std::size_t lane = 0; lane < receive_.size(); ++lane) {
    const std::uint32_t next = receive_[lane].next();
    if (next != 1) acks.push_back({static_cast<std::uint8_t>(lane), next});
  }
  if (acks.empty()) return;
  const auto bytes = encode(acks);
  FrameHeader header{.type = FrameType::ack};
  header.length = static_cast<std::uint32_t>(bytes.size());
  for (const RoadPtr& road : roads) road->pulse(header, bytes);
}

void Link::on_acks(const Payload& payload) {
  const auto all = flows();
  for (const Ack& ack : decode_acks(payload.bytes())) {
    if (ack.lane >= all.size()) {
      throw Error(ErrorKind::protocol, "bad frame: an acknowledgement of what was never sent");
    }
    all[ack.lane]->on_ack(ack.next);
  }
  measure_shares(Clock::now());
  dispatch();
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
    on_peer_ended_locked(reason);
    if (recv_lanes_ > 0) return;  // the last lane to end comes back here
  }
  die(Error(ErrorKind::peer_gone, "its connection ended (" + reason + ")"));
}

}  // namespace torch_iroh::link
