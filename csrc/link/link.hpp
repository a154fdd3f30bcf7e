// The link to one peer: lanes that lose and double nothing, over roads that may break, proof of who is at the other
// end, and one verdict when it is gone. Knows no groups: it moves frames and reports.
//
// Each side dials its own roads and sends on them; on the peer's it receives. One connection that carries bulk data
// both ways at once moves about half as much (iroh 1.2.0, loopback, 2 cores: 0.8-1.1 against 1.6-2.0 Gbit/s in all),
// and there is nothing to settle when both sides dial at the same moment.
//
//   road 0      the main one: iroh chooses direct or relay
//   road 1      the standby, between endpoints that know only the relay: lanes move there when the main road falls
//               silent (iroh itself would take 15 s), and back once it answers again. Only where there is a relay
//   road 2...   more connections of the main endpoint, where distance or loss ask for more than one
//
//   sending:  idle --first send, or the peer's connection--> dialing --main road up--> up
//   any --cause--> dead (final; the node makes a new link when one is needed again)
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/payload.hpp"
#include "base/time.hpp"
#include "iroh/endpoint.hpp"
#include "link/frame.hpp"
#include "link/lane.hpp"
#include "link/liveness.hpp"
#include "link/receive_flow.hpp"
#include "link/road.hpp"
#include "link/send_flow.hpp"

namespace torch_iroh::link {

struct LinkOptions {
  int streams = 16;  // data lanes at most, besides the control lane
  Duration heartbeat = milliseconds(500);
  Duration peer_timeout = milliseconds(3000);
  Duration connect_timeout = milliseconds(10000);
  bool operator==(const LinkOptions&) const = default;
};

// Where a peer is found: its endpoint, and the one of its that knows only relays.
struct PeerAddr {
  iroh::EndpointAddr main;
  std::optional<iroh::EndpointAddr> standby;
};

// Of this process; standby: none without a relay.
struct Endpoints {
  iroh::Endpoint main;
  iroh::Endpoint standby;
};

// With which a connection to a peer that was given up is closed.
inline constexpr std::uint32_t kCloseDead = 3;

class Link : public std::enable_shared_from_this<Link> {
 public:
  // Called on polling or worker threads, never with a lock held. `on_frame` keeps the order of each lane.
  struct Events {
    std::function<void(const iroh::EndpointId&, const FrameHeader&, Payload)> on_frame;
    std::function<void(const iroh::EndpointId&, const Error&)> on_dead;
  };

  Link(Endpoints endpoints, PeerAddr peer, const LinkOptions& options, Events events);

  const iroh::EndpointId& peer() const { return peer_.main.id; }

  void connect();                            // starts to dial when idle
  void send_control(OutFrame frame);         // in order
  void send_data(OutFrame frame);            // on the data lane in use with the least to do
  void send_everywhere(FrameHeader header);  // an empty frame, last on every lane, with their number as its message;
                                             // nothing when idle

  void adopt(const iroh::Connection& connection);  // that the peer dialled: what it sends comes here

  void on_tick(TimePoint now, Duration paused);

  // Everything sent so far reaches the peer, then `flushed` is called; at once when there is nothing to send or nobody
  // to send it to.
  void flush(std::function<void()> flushed);
  void kill(const Error& cause);

  bool is_up() const;  // the peer has been reached
  bool is_dead() const;
  std::string path_text() const;         // "direct 10.0.0.2:4242", "relay https://...", "not connected"
  std::optional<double> rtt_ms() const;  // the least of the last echoes: the rest is waiting, not distance

 private:
  enum class State : std::uint8_t { idle, dialing, up, dead };
  using RoadPtr = std::shared_ptr<Road>;
  struct Lane {
    std::shared_ptr<SendFlow> flow = std::make_shared<SendFlow>();
    RoadPtr road;                  // that carries it, or will
    std::uint64_t connection = 0;  // of the road
    std::uint64_t bound = 0;       // counts its moves
    std::uint64_t share = 0;       // what it may have unacknowledged; 0: as much as it likes
  };

  RoadPtr add_road_locked();  // the next one; null when there is none to add
  void start(const RoadPtr& road);
  void on_road_up();
  void on_road_refused(const RoadPtr& road, const std::string& reason);
  void place_lanes();  // every lane on the road where it belongs
  void measure_shares(TimePoint now);
  void dispatch();  // queued data to lanes that have room
  RoadPtr road_of_locked(std::size_t lane) const;
  void bind(std::size_t lane, const RoadPtr& road, std::uint64_t bound);

  void accept_lanes(const iroh::Connection& connection);
  void add_lane(const iroh::Connection& connection, iroh::RecvStream stream);
  HelloBody greet(const iroh::Connection& connection, const FrameHeader& header, const Payload& payload);
  void on_numbered(std::uint8_t lane, const FrameHeader& header, Payload payload);
  void deliver(const FrameHeader& header, Payload payload);
  void on_recv_lane_end(const std::optional<Error>& error);
  void on_incoming_closed(const std::string& reason);

  void on_acks(const Payload& payload);
  void send_acks();
  void on_heartbeat(const FrameHeader& header, std::uint8_t road);
  void choose_lanes();
  void choose_road(TimePoint now);
  void on_closing(const FrameHeader& header);
  void on_farewell();
  void on_peer_ended_locked(const std::string& reason);
  std::optional<Error> verdict_locked(TimePoint now);
  void die(const Error& cause);
  std::optional<iroh::Path> selected_path() const;
  std::vector<std::shared_ptr<SendFlow>> flows() const;

  const Endpoints endpoints_;
  const PeerAddr peer_;
  const LinkOptions options_;
  const Events events_;
  const std::uint64_t session_;

  mutable std::mutex mutex_;
  State state_ = State::idle;

  // What this side sends.
  std::vector<RoadPtr> roads_;  // 0, and further ones as they are needed; 1 only where there is a standby
  bool on_standby_ = false;
  TimePoint moved_at_{};
  int moves_ = 0;  // to the standby, within the last while
  std::vector<Lane> lanes_;
  std::deque<OutFrame> data_queue_;  // until a lane has room for it
  TimePoint measure_at_{};
  TimePoint first_word_by_ = kNever;  // when the peer must be reached, and have been heard
  TimePoint give_up_at_ = kNever;     // a connection was ended by the peer: the others must tell why by then
  std::string closed_reason_;
  std::function<void()> flushed_;  // waits for the peer's farewell
  bool sent_data_ = false;         // since lanes were last chosen
  TimePoint choose_lanes_at_{};
  std::size_t connections_ = 1;  // of the main endpoint that carry data
  std::uint64_t lost_ = 0;       // packets, when lanes were last chosen
  std::uint64_t sent_ = 0;
  double least_rtt_ = 1e9;      // ms
  std::deque<double> rtts_ms_;  // of the last echoes

  // What the peer sends.
  std::vector<iroh::Connection> incoming_;
  std::optional<std::uint64_t> session_of_peer_;
  std::array<ReceiveFlow, HelloBody::kMaxLanes> receive_;
  std::uint64_t unacked_bytes_ = 0;
  bool ack_timer_ = false;
  int ack_again_ = 0;             // at so many more ticks, in case an ack was lost with its road
  int recv_lanes_ = 0;            // still being read
  std::uint32_t closings_ = 0;    // of the peer's lanes, read to their end
  bool incoming_closed_ = false;  // by the peer
  bool heard_ = false;            // a first frame has come
  Liveness liveness_;
};

}  // namespace torch_iroh::link
