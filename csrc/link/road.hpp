// One way of a link to its peer: a connection that this side dials and sends on, dialled again when it is lost, with
// heartbeats of its own that tell whether what is sent on it arrives. Knows nothing of lanes or of the peer's frames.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/time.hpp"
#include "iroh/endpoint.hpp"
#include "link/lane.hpp"

namespace torch_iroh::link {

// With which a connection is closed that belongs to a link its side has given up: dial again, a new one begins.
inline constexpr std::uint32_t kCloseOldLink = 4;
// The peer's own word, not the network's, ended a connection; in the text that iroh gives as the reason.
bool closed_by_peer(const std::string& reason);

class Road : public std::enable_shared_from_this<Road> {
 public:
  // Called on polling threads, never with a lock held.
  struct Events {
    std::function<void()> on_up;
    std::function<void(const std::string& reason)> on_refused;  // the peer ended the connection; not dialled again
    std::function<void()> on_down;                              // the network did
  };

  Road(std::uint8_t number, std::uint64_t session, iroh::Endpoint endpoint, iroh::EndpointAddr peer)
      : number_(number), session_(session), endpoint_(std::move(endpoint)), peer_(std::move(peer)) {}

  void start(Events events);
  void close(std::uint32_t code, const std::string& reason);

  std::uint8_t number() const { return number_; }
  bool is_up() const;
  iroh::Connection connection() const;     // empty when down
  std::uint64_t connection_count() const;  // another number for each that it has had
  std::string last_error() const;

  // A stream of this road for `lane`, after its hello; null when the road is down.
  void open_lane(std::uint8_t lane, std::function<void(std::shared_ptr<SendLane>)> opened);
  // An unnumbered frame; dropped when the road is down.
  void pulse(const FrameHeader& header, std::span<const std::byte> bytes);

  // Dials what is due, and asks whether it is heard: every `interval`, answered or not when `wants_answer`.
  void on_tick(TimePoint now, Duration interval, bool wants_answer);
  // The answer to what was asked then; how long it took in ms, none for a time at which nothing can have been asked.
  std::optional<double> on_echo(std::uint64_t asked, TimePoint now);
  void forgive();                                // this process stood still: unanswered questions say nothing
  Duration unanswered_for(TimePoint now) const;  // zero: nothing is open
  int answers() const;                           // since forget_answers()
  void forget_answers();

 private:
  enum class State : std::uint8_t { idle, dialing, up, waiting, closed };

  void dial();
  void on_dialed(std::uint64_t attempt, Result<iroh::Connection> result);
  void on_closed(std::uint64_t attempt, const std::string& reason);

  const std::uint8_t number_;
  const std::uint64_t session_;
  const iroh::Endpoint endpoint_;
  const iroh::EndpointAddr peer_;
  Events events_;

  mutable std::mutex mutex_;
  State state_ = State::idle;
  std::uint64_t attempt_ = 0;
  iroh::Connection connection_;
  iroh::Canceller dialing_;
  TimePoint until_ = kNever;  // dialing: when to begin anew; waiting: when to dial
  std::string last_error_;
  std::shared_ptr<SendLane> pulse_;
  TimePoint heartbeat_at_{};
  std::uint64_t heartbeats_ = 0;
  std::deque<TimePoint> asked_;  // not answered yet
  int answers_ = 0;
};

}  // namespace torch_iroh::link
