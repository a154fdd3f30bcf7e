// How a link lives: heartbeats, round trips, lanes in use, the verdict on a silent peer, farewells and death.
#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "link/link.hpp"

namespace torch_iroh::link {
namespace {

constexpr std::size_t kRttSamples = 8;
// A stream carries at most 1.25 MB per round trip (iroh's fixed window), so 1 Gbit/s needs one more every 10 ms; more
// than needed only costs CPU (loopback, 2 cores, 64 MiB all_reduce of 2 ranks: 1 lane 1.8 Gbit/s in all, 4 lanes 1.2).
constexpr double kRttPerLane = 8.0;  // ms
constexpr Duration kChooseLanesEvery = milliseconds(1000);
// Beyond this distance several connections share the work: each has a congestion window of its own, and one that is
// halved by a lost packet is not the whole link.
constexpr double kFarRtt = 5.0;  // ms
constexpr std::size_t kFarConnections = 4;
constexpr std::size_t kMostConnections = 12;
constexpr double kLossy = 3e-4;  // of packets
// A full link loses packets because its queue is full, which makes round trips longer; more connections would only fill
// it more. Loss at an empty queue is the medium's own.
constexpr double kQueueing = 1.25;
// How long a question may go unanswered before the lanes move: iroh itself takes 15 s to leave a dead path.
constexpr Duration kSuspect = milliseconds(650);
constexpr Duration kQuickHeartbeat = milliseconds(150);
constexpr Duration kStandbyHeartbeat = milliseconds(5000);
constexpr int kAnswersToReturn = 4;
constexpr Duration kCalm = milliseconds(60'000);
constexpr Duration kFarewell = milliseconds(1000);

}  // namespace

// As many lanes as the distance asks for, on as many connections as distance and loss do.
void Link::choose_lanes() {
  const auto path = selected_path();
  const double rtt = path ? static_cast<double>(path->rtt_ms) : 0.0;
  std::vector<RoadPtr> roads;
  std::vector<RoadPtr> added;
  {
    const std::lock_guard lock(mutex_);
    roads = roads_;
  }
  std::uint64_t lost = 0;
  std::uint64_t sent = 0;
  for (const RoadPtr& road : roads) {
    const iroh::Connection connection = road && road->number() != 1 ? road->connection() : iroh::Connection();
    if (!connection) continue;
    const auto stats = connection.stats();
    lost += static_cast<std::uint64_t>(stats.lost_packets);
    sent += static_cast<std::uint64_t>(stats.sent_datagrams);
  }
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::up) return;
    const double packets = sent > sent_ ? static_cast<double>(sent - sent_) : 0.0;
    const double losses = lost > lost_ ? static_cast<double>(lost - lost_) : 0.0;
    sent_ = sent;
    lost_ = lost;
    if (rtt > 0) least_rtt_ = std::min(least_rtt_, rtt);
    const std::size_t most = std::min(kMostConnections, static_cast<std::size_t>(options_.streams));
    if (rtt < kFarRtt) {
      connections_ = 1;
    } else if (connections_ < kFarConnections) {
      connections_ = std::min(kFarConnections, most);
    } else if (packets > 100 && losses / packets > kLossy && rtt < kQueueing * least_rtt_ + 2) {
      connections_ = std::max(connections_, std::min(2 * connections_, most));
      log(LogLevel::debug, "loses packets: " + std::to_string(connections_) + " connections");
    }
    const auto lanes = std::clamp<std::size_t>(std::max(static_cast<std::size_t>(rtt / kRttPerLane) + 1, connections_),
                                               1, static_cast<std::size_t>(options_.streams));
    if (lanes_.size() < lanes + 1) lanes_.resize(lanes + 1);
    std::size_t have = 0;
    for (const RoadPtr& road : roads_) have += road && road->number() != 1 ? 1 : 0;
    for (; have < connections_; ++have) {
      if (auto road = add_road_locked()) added.push_back(std::move(road));
    }
  }
  for (const RoadPtr& road : added) start(road);
  place_lanes();
}

// The standby while the main road does not answer; the main road again once it answers for a while.
void Link::choose_road(TimePoint now) {
  bool moved = false;
  bool standby = false;
  std::string waited;
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::up || roads_.size() < 2 || !roads_[1]) return;
    if (now - moved_at_ > kCalm) moves_ = 0;
    const Road& main = *roads_.front();
    if (!on_standby_) {
      const double rtt = rtts_ms_.empty() ? 0.0 : *std::min_element(rtts_ms_.begin(), rtts_ms_.end());
      const Duration patience =
          kSuspect + std::chrono::duration_cast<Duration>(std::chrono::duration<double>(rtt / 500));
      const Duration open = main.unanswered_for(now);
      moved = (!main.is_up() || open > patience) && roads_[1]->is_up() && roads_[1]->unanswered_for(now) < patience;
      waited = to_text(open);
      moves_ += moved ? 1 : 0;
    } else {
      // The more often it has failed of late, the longer it must have answered.
      const int needed = kAnswersToReturn << std::min(moves_ - 1, 5);
      moved = main.is_up() && main.unanswered_for(now) < kSuspect && main.answers() >= needed;
    }
    if (moved) {
      on_standby_ = !on_standby_;
      moved_at_ = now;
    }
    standby = on_standby_;
  }
  if (!moved) return;
  {
    const std::lock_guard lock(mutex_);
    roads_.front()->forget_answers();
  }
  log(LogLevel::info, "the link to endpoint " + iroh::short_name(peer()) +
                          (standby ? " moves to the relay: its path has not answered for " + waited
                                   : std::string(" returns to its own path")));
  place_lanes();
  if (standby) send_acks();
}

// The peer itself has ended a connection: what is still on its way may tell more, but not for long.
void Link::on_peer_ended_locked(const std::string& reason) {
  closed_reason_ = reason;
  give_up_at_ = std::min(give_up_at_, after(Clock::now(), kFarewell));
}

std::optional<Error> Link::verdict_locked(TimePoint now) {
  if (state_ == State::idle || state_ == State::dead) return std::nullopt;
  if (now >= give_up_at_) return Error(ErrorKind::peer_gone, "its connection ended (" + closed_reason_ + ")");
  const bool reached = state_ == State::up && heard_;
  if (!reached && now >= first_word_by_) {
    const std::string last = roads_.front()->last_error();
    return Error(ErrorKind::peer_gone, "it could not be reached within " + to_text(options_.connect_timeout) +
                                           (last.empty() ? std::string() : " (last answer: " + last + ")"));
  }
  if (heard_ && liveness_.on_timer(now) == Verdict::dead) {
    return Error(ErrorKind::peer_gone, "nothing was received from it for " + to_text(liveness_.quiet_for(now)) +
                                           " (process gone, or its network is down)");
  }
  return std::nullopt;
}

void Link::on_tick(TimePoint now, Duration paused) {
  std::optional<Error> verdict;
  std::vector<RoadPtr> roads;
  bool choose = false;
  bool standby = false;
  bool again = false;
  {
    const std::lock_guard lock(mutex_);
    liveness_.forgive(paused);
    verdict = verdict_locked(now);
    roads = roads_;
    standby = on_standby_;
    again = ack_again_ > 0 && --ack_again_ >= 0;
    if (sent_data_ && now >= choose_lanes_at_) {
      choose = true;
      sent_data_ = false;
      choose_lanes_at_ = now + kChooseLanesEvery;
    }
  }
  if (verdict) return die(*verdict);
  bool busy = false;
  for (const auto& flow : flows()) busy = busy || !flow->all_acked();
  for (const RoadPtr& road : roads) {
    if (!road) continue;
    if (paused > Duration::zero()) road->forgive();
    const bool main = road->number() == 0;
    const bool quick =
        (main && (busy || standby || road->unanswered_for(now) > Duration::zero())) || (road->number() == 1 && standby);
    const Duration interval = quick  ? std::min(kQuickHeartbeat, options_.heartbeat)
                              : main ? options_.heartbeat
                                     : std::max(kStandbyHeartbeat, options_.heartbeat);
    road->on_tick(now, interval, quick || !main);
  }
  choose_road(now);
  measure_shares(now);
  dispatch();
  if (choose) choose_lanes();
  if (again) send_acks();
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

void Link::on_heartbeat(const FrameHeader& header, std::uint8_t road) {
  if (header.sequence == 0) return;
  const TimePoint now = Clock::now();
  if (header.chunk == 0) {
    FrameHeader echo = header;
    echo.chunk = 1;
    std::vector<RoadPtr> roads;
    {
      const std::lock_guard lock(mutex_);
      for (const RoadPtr& one : roads_) {
        if (!one || one->number() > 1) continue;
        if (one->number() == 0 || on_standby_ || road == 1 || !roads_.front()->is_up()) roads.push_back(one);
      }
    }
    for (const RoadPtr& one : roads) one->pulse(echo, {});
    return;
  }
  RoadPtr asked;
  {
    const std::lock_guard lock(mutex_);
    if (header.message < roads_.size()) asked = roads_[header.message];
  }
  if (!asked) return;
  const auto sample = asked->on_echo(header.sequence, now);
  if (!sample || header.message != road || road == 1) return;  // no time that we sent, or not the way there and back
  const std::lock_guard lock(mutex_);
  rtts_ms_.push_back(*sample);
  if (rtts_ms_.size() > kRttSamples) rtts_ms_.pop_front();
}

void Link::flush(std::function<void()> flushed) {
  bool pending = false;
  for (const auto& flow : flows()) pending = pending || !flow->all_acked();
  {
    const std::lock_guard lock(mutex_);
    pending = pending || !data_queue_.empty();
    if (state_ == State::up || (state_ == State::dialing && pending)) flushed_ = std::exchange(flushed, nullptr);
  }
  if (flushed) return flushed();
  send_everywhere(FrameHeader{.type = FrameType::closing});
}

void Link::kill(const Error& cause) {
  die(cause);
}

void Link::die(const Error& cause) {
  std::vector<iroh::Connection> incoming;
  std::vector<RoadPtr> roads;
  std::function<void()> flushed;
  std::deque<OutFrame> queued;
  {
    const std::lock_guard lock(mutex_);
    if (state_ == State::dead) return;
    state_ = State::dead;
    incoming.swap(incoming_);
    roads = roads_;
    queued.swap(data_queue_);
    flushed = std::exchange(flushed_, nullptr);
  }
  const std::string reason = cause.kind() == ErrorKind::aborted ? "left" : "given up";
  for (const RoadPtr& road : roads) {
    if (road) road->close(kCloseDead, reason);
  }
  for (const iroh::Connection& connection : incoming) connection.close(kCloseDead, reason);
  for (const auto& flow : flows()) flow->fail(cause);
  for (OutFrame& frame : queued) {
    if (frame.done) frame.done(cause);
  }
  if (flushed) flushed();
  events_.on_dead(peer(), cause);
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
    if (!roads_.empty()) connection = roads_[on_standby_ ? 1 : 0]->connection();
    if (!connection && !incoming_.empty()) connection = incoming_.front();
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
