// The road to one peer: a QUIC connection with a control lane and data lanes, proof of who is at the other end, and one
// verdict when it is gone. Knows no groups: it moves frames and reports.
//
//   idle --first send--> dialing --the peer's hello--> up          idle, dialing --adopt a connection--> up
//   any --cause--> dead (final; the node makes a new link when one is needed again)
//
// Both sides may dial at once: the connection dialled by the smaller endpoint id stays.
#pragma once

#include <atomic>
#include <cstdint>
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

namespace torch_iroh::link {

struct LinkOptions {
  int streams = 4;  // data lanes, besides the control lane
  Duration heartbeat = milliseconds(500);
  Duration peer_timeout = milliseconds(3000);
  Duration connect_timeout = milliseconds(10000);
  bool operator==(const LinkOptions&) const = default;
};

class Link : public std::enable_shared_from_this<Link> {
 public:
  // Called on polling or worker threads, never with a lock held. `on_frame` keeps the order of each lane.
  struct Events {
    std::function<void(const iroh::EndpointId&, const FrameHeader&, Payload)> on_frame;
    std::function<void(const iroh::EndpointId&, const Error&)> on_dead;
  };

  Link(iroh::Endpoint endpoint, iroh::EndpointAddr peer, const LinkOptions& options, Events events);

  const iroh::EndpointId& peer() const { return peer_.id; }

  void connect();                                   // starts to dial when idle
  void send_control(OutFrame frame);                // in order
  void send_data(OutFrame frame);                   // on the data lane with the least to do
  void send_everywhere(const FrameHeader& header);  // an empty frame, last on every lane; nothing when not up

  // A connection that the peer dialled. False: it is a duplicate and was closed.
  bool adopt(iroh::Connection connection);

  void on_tick(TimePoint now, Duration paused);

  // Everything sent so far reaches the peer, then `flushed` is called; at once when the link is not up.
  void flush(std::function<void()> flushed);
  void kill(const Error& cause);

  bool is_up() const;
  bool is_dead() const;
  std::string path_text() const;  // "direct 10.0.0.2:4242", "relay https://...", "not connected"
  std::optional<double> rtt_ms() const;

 private:
  enum class State : std::uint8_t { idle, dialing, up, dead };

  void dial();
  void on_dialed(std::uint64_t attempt, Result<iroh::Connection> result);
  // `attempt` numbers the connections that were tried; news of an older one is ignored.
  std::uint64_t next_attempt();
  void begin(const iroh::Connection& connection, std::uint64_t attempt);
  void open_lanes(const iroh::Connection& connection, std::uint64_t attempt, std::uint8_t index);
  void accept_lanes(const iroh::Connection& connection, std::uint64_t attempt);
  bool add_lane(iroh::RecvStream stream, std::uint64_t attempt);
  bool greet(std::uint64_t attempt, const FrameHeader& header, const Payload& payload);
  void on_greeted();
  void on_recv_lane_end(std::uint64_t attempt, bool greeted, const std::optional<Error>& error);
  void on_closed(std::uint64_t attempt, const std::string& reason);
  void die(const Error& cause);
  void release_backlog();
  void send(OutFrame frame, std::vector<OutFrame>& backlog, bool control);
  bool lanes_are_open() const { return lanes_.size() == static_cast<std::size_t>(options_.streams) + 1; }
  static void finish(std::vector<OutFrame>& frames, const Error& error);

  const iroh::Endpoint endpoint_;
  const iroh::EndpointAddr peer_;
  const LinkOptions options_;
  const Events events_;

  mutable std::mutex mutex_;
  State state_ = State::idle;
  std::optional<Error> cause_;  // once dead
  iroh::Connection connection_;
  iroh::Canceller dialing_;
  std::uint64_t attempt_ = 0;
  TimePoint dial_deadline_ = kNever;
  TimePoint redial_at_ = kNever;
  std::string last_dial_error_;
  bool greeted_ = false;   // the peer's hello has come
  bool released_ = false;  // what was sent before that is on its way: later frames may follow
  std::vector<std::shared_ptr<SendLane>> lanes_;
  std::vector<OutFrame> control_backlog_;
  std::vector<OutFrame> data_backlog_;
  std::uint64_t lanes_seen_ = 0;  // bit set of the peer's lanes; one bit per lane index below 64
  int recv_lanes_ = 0;            // still being read
  std::string closed_reason_;
  bool closed_ = false;
  Liveness liveness_;
  TimePoint heartbeat_at_{};
};

}  // namespace torch_iroh::link
