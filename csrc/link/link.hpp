// The road to one peer: two QUIC connections, proof of who is at the other end, and one verdict when it is gone. Knows
// no groups: it moves frames and reports.
//
// Each side dials one connection and sends on it; on the other it receives. One connection that carries bulk data both
// ways at once moves about half as much (iroh 1.2.0, loopback, 2 cores: 0.8-1.1 against 1.6-2.0 Gbit/s in all), and
// with two there is nothing to settle when both sides dial at the same moment.
//
//   sending:  idle --first send, or the peer's connection--> dialing --lanes open--> up
//   any --cause--> dead (final; the node makes a new link when one is needed again)
#pragma once

#include <atomic>
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

namespace torch_iroh::link {

struct LinkOptions {
  int streams = 8;  // data lanes at most, besides the control lane
  Duration heartbeat = milliseconds(500);
  Duration peer_timeout = milliseconds(3000);
  Duration connect_timeout = milliseconds(10000);
  bool operator==(const LinkOptions&) const = default;
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

  Link(iroh::Endpoint endpoint, iroh::EndpointAddr peer, const LinkOptions& options, Events events);

  const iroh::EndpointId& peer() const { return peer_.id; }

  void connect();                                   // starts to dial when idle
  void send_control(OutFrame frame);                // in order
  void send_data(OutFrame frame);                   // on the data lane in use with the least to do
  void send_everywhere(const FrameHeader& header);  // an empty frame, last on every lane; nothing when idle

  void adopt(const iroh::Connection& connection);  // that the peer dialled: what it sends comes here

  void on_tick(TimePoint now, Duration paused);

  // Everything sent so far reaches the peer, then `flushed` is called; at once when there is nothing to send or nobody
  // to send it to.
  void flush(std::function<void()> flushed);
  void kill(const Error& cause);

  bool is_up() const;  // something can be sent right now
  bool is_dead() const;
  std::string path_text() const;         // "direct 10.0.0.2:4242", "relay https://...", "not connected"
  std::optional<double> rtt_ms() const;  // the least of the last echoes: the rest is waiting, not distance

 private:
  enum class State : std::uint8_t { idle, dialing, up, dead };

  void dial();
  void on_dialed(Result<iroh::Connection> result);
  void open_lanes(const iroh::Connection& connection, std::uint8_t index);
  void release_backlog();
  void send(OutFrame frame, std::vector<OutFrame>& backlog, bool control);
  void on_outgoing_closed(const std::string& reason);

  void accept_lanes(const iroh::Connection& connection);
  void add_lane(iroh::RecvStream stream);
  void greet(const FrameHeader& header, const Payload& payload);
  void on_recv_lane_end(const std::optional<Error>& error);
  void on_incoming_closed(const std::string& reason);

  void choose_lanes();
  void on_heartbeat(const FrameHeader& header);
  void on_closing(const FrameHeader& header);
  void on_farewell();
  std::optional<Error> verdict_locked(TimePoint now);
  void die(const Error& cause);
  std::optional<iroh::Path> selected_path() const;

  const iroh::Endpoint endpoint_;
  const iroh::EndpointAddr peer_;
  const LinkOptions options_;
  const Events events_;

  mutable std::mutex mutex_;
  State state_ = State::idle;
  std::optional<Error> cause_;  // once dead

  iroh::Connection outgoing_;
  iroh::Canceller dialing_;
  TimePoint first_word_by_ = kNever;  // when the peer must be reached, and have been heard
  TimePoint redial_at_ = kNever;
  TimePoint give_up_at_ = kNever;  // our connection has ended: the peer's own must tell why by then
  std::string last_dial_error_;
  std::vector<std::shared_ptr<SendLane>> lanes_;
  std::vector<OutFrame> control_backlog_;
  std::vector<OutFrame> data_backlog_;
  std::vector<FrameHeader> everywhere_backlog_;
  std::function<void()> flushed_;  // waits for the peer's farewell
  std::size_t lanes_in_use_ = 1;   // data lanes; lanes_[1] is the first
  bool sent_data_ = false;         // since lanes were last chosen
  TimePoint choose_lanes_at_{};
  TimePoint heartbeat_at_{};
  std::uint64_t heartbeats_ = 0;
  std::deque<double> rtts_ms_;  // of the last echoes

  iroh::Connection incoming_;
  std::uint64_t lanes_seen_ = 0;  // bit set of the peer's lanes
  int recv_lanes_ = 0;            // still being read
  std::uint32_t closings_ = 0;    // of the peer's lanes, read to their end
  bool incoming_closed_ = false;
  std::string closed_reason_;
  bool heard_ = false;  // a first frame has come
  Liveness liveness_;
};

}  // namespace torch_iroh::link
