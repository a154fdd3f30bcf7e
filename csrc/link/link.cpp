// What a link sends: its roads, its lanes, and which of these carries which. What it receives is in link_receiving.cpp,
// how it lives and dies in link_health.cpp.
#include "link/link.hpp"

#include <algorithm>
#include <utility>

#include "base/random.hpp"

namespace torch_iroh::link {
namespace {

// A lane's share is what its connection can have on the way, twice, so that it never runs dry between two
// acknowledgements, and a frame.
constexpr std::uint64_t kLeastShare = 256 << 10;
constexpr Duration kMeasureEvery = milliseconds(20);

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
      on_peer_ended_locked(reason);
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
  dispatch();
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
  bool dead = false;
  {
    const std::lock_guard lock(mutex_);
    dead = state_ == State::dead;
    sent_data_ = true;
    if (!dead) data_queue_.push_back(std::move(frame));
  }
  if (dead) return lanes_.back().flow->send(std::move(frame));  // which knows why
  dispatch();
  connect();
}

// Lanes of one connection each: how fast they are differs from moment to moment, so a frame goes to a lane only when
// that has room. Given out at once, the rest of a message would wait for the slowest of them.
void Link::dispatch() {
  for (;;) {
    std::shared_ptr<SendFlow> flow;
    OutFrame frame;
    {
      const std::lock_guard lock(mutex_);
      if (data_queue_.empty()) return;
      std::uint64_t least = ~std::uint64_t{0};
      for (std::size_t i = 1; i < lanes_.size(); ++i) {
        const Lane& lane = lanes_[i];
        const bool bounded = lane.share != 0;
        const std::uint64_t load = bounded ? lane.flow->unacked_bytes() : lane.flow->queued_bytes();
        if (load < least && !(bounded && load >= lane.share)) {
          least = load;
          flow = lane.flow;
        }
      }
      if (!flow) return;
      frame = std::move(data_queue_.front());
      data_queue_.pop_front();
    }
    flow->send(std::move(frame));
  }
}

void Link::measure_shares(TimePoint now) {
  std::vector<RoadPtr> roads;
  {
    const std::lock_guard lock(mutex_);
    if (now < measure_at_) return;
    measure_at_ = now + kMeasureEvery;
    if (connections_ > 1) roads = roads_;
  }
  std::vector<std::uint64_t> windows(HelloBody::kMaxRoads);
  for (const RoadPtr& road : roads) {
    const iroh::Connection connection = road ? road->connection() : iroh::Connection();
    if (!connection) continue;
    for (const iroh::Path& path : connection.paths()) {
      if (path.selected) windows[road->number()] = path.congestion_window;
    }
  }
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> lanes_on(HelloBody::kMaxRoads);
  for (std::size_t i = 1; i < lanes_.size(); ++i) {
    if (lanes_[i].road) ++lanes_on[lanes_[i].road->number()];
  }
  for (std::size_t i = 1; i < lanes_.size(); ++i) {
    const std::size_t road = lanes_[i].road ? lanes_[i].road->number() : 0;
    lanes_[i].share =
        windows[road] == 0 ? 0 : 2 * windows[road] / std::max<std::uint64_t>(1, lanes_on[road]) + kLeastShare;
  }
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
    // Everything that was sent before goes first, whether a lane has room or not.
    for (Lane& lane : lanes_) lane.share = 0;
    measure_at_ = after(Clock::now(), kMeasureEvery);
  }
  dispatch();
  const auto all = flows();
  header.message = static_cast<std::uint32_t>(all.size());
  for (const auto& flow : all) flow->send({header, {}, nullptr});
}

}  // namespace torch_iroh::link
