// How bytes reach the ranks of one group. A transport is one rank's end: it moves tagged chunks and small control
// messages, and says when a rank is lost. It does not know what an operation is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/payload.hpp"
#include "base/time.hpp"

namespace torch_iroh::transport {

// What a chunk belongs to; the group and the sender are known from the road it came on.
struct Tag {
  std::uint64_t sequence = 0;
  std::uint32_t message = 0;
  std::uint32_t chunk = 0;
  std::uint32_t signature = 0;
};

// Called on any thread, one call at a time per sender and kind, never with a lock held.
class Receiver {
 public:
  virtual ~Receiver() = default;
  virtual void on_data(int from, const Tag& tag, Payload payload) = 0;
  virtual void on_control(int from, Payload payload) = 0;  // in the order sent
  // No more will come from that rank. `left`: it said goodbye, and everything it sent before has been delivered.
  virtual void on_lost(int rank, bool left, const Error& cause) = 0;
};

using SendDone = std::function<void(Result<Nothing>)>;

struct PeerStats {
  int rank = 0;
  std::string endpoint_id;  // short form; empty when there is no network between
  std::string path;
  std::optional<double> rtt_ms;
  std::uint64_t sent_bytes = 0;      // payload
  std::uint64_t received_bytes = 0;  // payload
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int world() const = 0;

  // Starts delivering. What came earlier is delivered first.
  virtual void start(Receiver& receiver) = 0;

  // `bytes` (at most the frame limit) is lent until `done` runs; `done` may run before this returns.
  virtual void send(int peer, const Tag& tag, std::span<const std::byte> bytes, SendDone done) = 0;
  virtual void send_control(int peer, std::vector<std::byte> bytes) = 0;

  virtual void connect(int peer) = 0;          // starts to build the road, if there is none
  virtual bool connected(int peer) const = 0;  // there is a road, or one is being built

  // Whether on_data and on_control may block the thread that calls them, to slow a sender down.
  virtual bool may_wait_for_receiver() const = 0;

  // Leaves the group. No call to the receiver begins after this returns. What was sent before is delivered, as long as
  // its receiver lives and for at most `linger`.
  virtual void close(Duration linger) = 0;

  virtual std::vector<PeerStats> stats() const = 0;
};

}  // namespace torch_iroh::transport
