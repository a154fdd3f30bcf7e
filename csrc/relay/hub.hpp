// The relay's clients and what goes between them: takes the bytes that came from one, and queues those that go to
// others. A datagram keeps its bytes; the receiver's key in front of it becomes the sender's, and the type grows by 2.
// Pure: no socket, no clock, no thread, no cryptography; whoever owns the sockets says whose key a client has proved.
//
//   unknown --confirm--> newest of its key --another with this key--> older: may send, receives nothing
//                             ^---------------- the newer one leaves ----------------'
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/time.hpp"
#include "relay/egress.hpp"
#include "relay/websocket.hpp"

namespace torch_iroh::relay {

using Key = std::array<std::byte, 32>;
using ClientId = std::uint64_t;

// Message types of iroh's relay protocol, version 2 (iroh 1.4). One websocket message is one of these and its body.
enum class Type : std::uint8_t {
  challenge = 0,
  client_auth = 1,
  confirmed = 2,
  denied = 3,
  datagram_out = 4,  // key of the receiver, ECN byte, packet
  batch_out = 5,     // the same with u16 segment size before the packets
  datagram_in = 6,   // the same two with the key of the sender
  batch_in = 7,
  gone = 8,  // key of a client that this one has exchanged packets with
  ping = 9,
  pong = 10,
  restarting = 12,
  status = 13,
};
enum class Status : std::uint8_t { healthy = 0, same_key_elsewhere = 1, rate_limited = 2 };

inline constexpr std::size_t kMostBody = 64 * 1024;  // of a message; iroh's clients refuse more
inline constexpr std::size_t kLeastQueue = 2 * kMostBody;
inline constexpr Duration kMostDelay = milliseconds(200);

struct Counters {
  std::uint64_t received_bytes = 0;
  std::uint64_t sent_bytes = 0;
  std::uint64_t relayed_frames = 0;
  std::uint64_t relayed_bytes = 0;
  std::uint64_t dropped_slow_frames = 0;  // the receiver reads too slowly
  std::uint64_t dropped_slow_bytes = 0;
  std::uint64_t dropped_unknown_frames = 0;  // no such receiver here
  std::uint64_t gone_notices = 0;
  std::uint64_t replaced = 0;
};

// What a client's bytes led to, besides what they queued.
struct Fed {
  std::optional<Bytes> hello;  // the body of client_auth, once
  bool leaves = false;         // the client says goodbye, or broke a rule; close it when its queue is sent
  std::string violation;       // what it did wrong, for the log
};

class Hub {
 public:
  // `queue_bytes`: of datagrams that wait for one client, at most. `seed`: a random number, so that nobody can choose
  // keys that share a place in the table.
  Hub(std::size_t queue_bytes, std::uint64_t seed) : queue_bytes_(queue_bytes), endpoints_(16, HashKey{seed}) {}

  ClientId open();
  // `client` has proved that it holds this key; it is told so. The oldest session of a key that now has too many is
  // returned, for the caller to close.
  std::optional<ClientId> confirm(ClientId client, const Key& key);
  void close(ClientId client);

  Fed feed(ClientId client, View bytes);
  void send(ClientId client, Type type, View body);
  // The websocket's own goodbye; nothing is sent after it.
  void send_close(ClientId client, std::uint16_t code);

  // Clients whose queue is no longer empty since the last call.
  std::vector<ClientId> take_ready();
  // Called about once a second: `passed` is the time since the last call. A queue is as long as its client has lately
  // read in kMostDelay, else a fixed one of bytes would be seconds of delay to a slow client.
  void adapt(Duration passed);
  // As Egress has them.
  std::size_t next_size(ClientId client, std::size_t limit);
  void take_into(ClientId client, std::byte* to, std::size_t size);

  std::size_t clients() const { return clients_.size(); }
  std::size_t endpoints() const { return endpoints_.size(); }
  std::size_t queued_bytes() const;
  const Counters& counters() const { return counters_; }

 private:
  struct Client;
  struct Endpoint {
    Key key{};
    std::vector<Client*> sessions;  // the last one receives
    std::unordered_set<Endpoint*> peers;
  };
  struct Client {
    Client(ClientId number, std::size_t queue_bytes) : id(number), reader(kMostBody + 1), cap(queue_bytes) {}
    ClientId id;
    FrameReader reader;
    Bytes parts;  // of a message that comes in several frames
    bool in_parts = false;
    bool said_hello = false;
    bool ready = false;
    Endpoint* endpoint = nullptr;
    Egress egress;
    std::size_t cap;        // of its datagrams
    std::size_t taken = 0;  // bytes since the last adapt()
    bool was_behind = false;
    // Most clients send to the same receiver again and again.
    Endpoint* last_to = nullptr;
    std::uint64_t last_epoch = 0;
  };
  struct HashKey {
    std::uint64_t seed;
    std::size_t operator()(const Key& key) const;
  };

  Client& client_of(ClientId id);
  void on_frame(Client& from, const Frame& frame, Fed& fed);
  void on_part(Client& from, const Frame& frame, Fed& fed);
  void on_message(Client& from, const Frame& frame, Fed& fed);
  void forward(Client& from, std::byte type, const Frame& frame);
  Endpoint* receiver(Client& from, const Key& key);
  void answer(Client& to, Opcode opcode, View payload);
  void send_to(Client& to, Type type, View body);
  void mark_ready(Client& client);
  void forget(Endpoint& endpoint);

  const std::size_t queue_bytes_;
  ClientId next_ = 1;
  std::unordered_map<ClientId, std::unique_ptr<Client>> clients_;
  std::unordered_map<Key, std::unique_ptr<Endpoint>, HashKey> endpoints_;
  std::uint64_t epoch_ = 0;  // grows when an endpoint goes: remembered pointers are of no use then
  std::vector<ClientId> ready_;
  Counters counters_;
};

}  // namespace torch_iroh::relay
