// The lanes and roads of a link: dialling, placing, sending and receiving. How it lives and dies is in link_health.cpp.
#include "link/link.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "base/random.hpp"
#include "base/workers.hpp"

namespace torch_iroh::link {
namespace {

constexpr Duration kFarewell = milliseconds(1000);
constexpr std::size_t kMostIncoming = 4 * HelloBody::kMaxRoads;
// How much may arrive before it is acknowledged, and how long that may take: the sender keeps a copy until then.
constexpr std::uint64_t kAckBytes = 512 << 10;
constexpr Duration kAckDelay = milliseconds(40);

}  // namespace

Link::Link(Endpoints endpoints, PeerAddr peer, const LinkOptions& options, Events events)
    : endpoints_(std::move(endpoints)),
      peer_(std::move(peer)),
      options_(options),
      events_(std::move(events)),
      session_(random_number()),
      lanes_(2),
      liveness_(options.peer_timeout, Clock::now()) {}

// ---- roads ----

void Link::connect() {
  RoadPtr road;
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::idle) return;
    state_ = State::dialing;
    first_word_by_ = after(Clock::now(), options_.connect_timeout);
    road = add_road_locked();
  }
  start(road);
}

Link::RoadPtr Link::add_road_locked() {
  if (roads_.size() == HelloBody::kMaxRoads) return nullptr;
  const auto number = static_cast<std::uint8_t>(roads_.size());
  const bool has_standby = peer_.standby && endpoints_.standby;
  if (number == 1 && !has_standby) {
    roads_.push_back(nullptr);
    return add_road_locked();
  }
  const bool standby = number == 1;
  roads_.push_back(std::make_shared<Road>(number, session_, standby ? endpoints_.standby : endpoints_.main,
                                          standby ? *peer_.standby : peer_.main));
  return roads_.back();
}

void Link::start(const RoadPtr& road) {
  Road::Events events;
  events.on_up = [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->on_road_up();
  };
  events.on_down = [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->place_lanes();
  };
  events.on_refused = [weak = weak_from_this(), road = std::weak_ptr(road)](const std::string& reason) {
    const auto self = weak.lock();
    const auto refused = road.lock();
    if (self && refused) self->on_road_refused(refused, reason);
  };
  road->start(std::move(events));
}

void Link::on_road_up() {
  RoadPtr standby;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::dead) return;
    if (roads_.front()->is_up() && state_ == State::dialing) {
      state_ = State::up;
      if (roads_.size() == 1 && peer_.standby && endpoints_.standby) standby = add_road_locked();
    }
  }
  place_lanes();
  if (standby) start(standby);
}

void Link::on_road_refused(const RoadPtr& road, const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::dead || road->number() == 1) return;
    // A peer that leaves ends all connections; what it sent before on its own is still being read, and counts.
    if (!incoming_.empty()) {
      give_up_at_ = std::min(give_up_at_, after(Clock::now(), kFarewell));
      closed_reason_ = reason;
      return;
    }
  }
  die(Error(ErrorKind::peer_gone, "it refused the connection or ended it (" + reason + ")"));
}

Link::RoadPtr Link::road_of_locked(std::size_t lane) const {
  const RoadPtr standby = roads_.size() > 1 ? roads_[1] : nullptr;
  if (on_standby_ && standby && standby->is_up()) return standby;
  std::vector<RoadPtr> up;
  for (const RoadPtr& road : roads_) {
    if (road && road != standby && road->is_up() && up.size() < connections_) up.push_back(road);
  }
  if (up.empty()) return standby && standby->is_up() ? standby : nullptr;
  return lane == 0 ? up.front() : up[(lane - 1) % up.size()];
}

void Link::place_lanes() {
  struct Move {
    std::size_t lane;
    RoadPtr road;
    std::uint64_t bound;
  };
  std::vector<Move> moves;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::dead) return;
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      Lane& lane = lanes_[i];
      const RoadPtr road = road_of_locked(i);
      // A road that came back has new streams only.
      if (!road || (road == lane.road && lane.connection == road->connection_count())) continue;
      lane.road = road;
      lane.connection = road->connection_count();
      moves.push_back({i, road, ++lane.bound});
    }
    ack_again_ = 3;
  }
  for (const Move& move : moves) bind(move.lane, move.road, move.bound);
}

void Link::bind(std::size_t lane, const RoadPtr& road, std::uint64_t bound) {
  road->open_lane(static_cast<std::uint8_t>(lane),
                  [weak = weak_from_this(), lane, bound](std::shared_ptr<SendLane> stream) {
                    const auto self = weak.lock();
                    if (!self || !stream) return;
                    std::shared_ptr<SendFlow> flow;
                    {
                      const std::lock_guard lock(self->mutex_);
                      if (self->state_ != State::dead && self->lanes_[lane].bound == bound)
                        flow = self->lanes_[lane].flow;
                    }
                    if (flow) {
                      flow->use(std::move(stream));
                    } else {
                      stream->fail(Error(ErrorKind::aborted, "the lane has moved on"));
                    }
                  });
}

// ---- sending ----

void Link::send_control(OutFrame frame) {
  std::shared_ptr<SendFlow> flow;
  {
    const std::lock_guard lock(mutex_);
    flow = lanes_.front().flow;
  }
  flow->send(std::move(frame));
  connect();
}

void Link::send_data(OutFrame frame) {
  std::shared_ptr<SendFlow> flow;
  {
    const std::lock_guard lock(mutex_);
    const auto less = [](const Lane& a, const Lane& b) { return a.flow->queued_bytes() < b.flow->queued_bytes(); };
    flow = std::min_element(lanes_.begin() + 1, lanes_.end(), less)->flow;
    sent_data_ = true;
  }
  flow->send(std::move(frame));
  connect();
}

std::vector<std::shared_ptr<SendFlow>> Link::flows() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<SendFlow>> flows;
  for (const Lane& lane : lanes_) flows.push_back(lane.flow);
  return flows;
}

void Link::send_everywhere(FrameHeader header) {
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::idle || state_ == State::dead) return;
  }
  const auto all = flows();
  header.message = static_cast<std::uint32_t>(all.size());
  for (const auto& flow : all) flow->send({header, {}, nullptr});
}

// ---- receiving ----

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
    give_up_at_ = std::min(give_up_at_, after(Clock::now(), kFarewell));
    if (recv_lanes_ > 0) return;  // the last lane to end comes back here
  }
  die(Error(ErrorKind::peer_gone, "its connection ended (" + reason + ")"));
}

}  // namespace torch_iroh::link
