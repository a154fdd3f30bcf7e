// Matching of sends and receives by (peer, tag), in order, with messages of unlimited size and bounded memory: a sender
// offers a message, and sends what is beyond a small allowance only when the receiver has granted it. Lives on its
// group's strand.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/payload.hpp"
#include "base/time.hpp"
#include "collective/messages.hpp"
#include "transport/transport.hpp"

namespace torch_iroh::collective {

// Marks the sequence numbers of point-to-point data.
inline constexpr std::uint64_t kPointToPointBit = std::uint64_t{1} << 63;

struct PointToPointCall {
  int peer = -1;  // recv: -1 takes a message from anyone
  std::int32_t tag = 0;
  std::span<const std::byte> from;  // send
  std::span<std::byte> to;          // recv
  std::string what;                 // "float32, 12 elements": equal on both sides
  std::shared_ptr<void> keep;
  std::uint64_t id = 0;  // send: for caller_waits()
  TimePoint deadline = kNever;
  std::function<void(const Error*, int source)> done;
};

class PointToPoint {
 public:
  struct Group {  // what it needs from its group
    std::function<void(int peer, const Message& message)> tell;
    std::function<void(int peer, const transport::Tag& tag, std::span<const std::byte> bytes, std::function<void()>)>
        transmit;
    std::function<void(const Error& cause)> fail;  // tells the others too
    std::function<void(int change)> count_kept;    // messages that this rank keeps for a receiver, with no caller left
    std::size_t chunk_bytes;
  };

  PointToPoint(int rank, int world, Group group);

  void send(PointToPointCall call);
  void recv(PointToPointCall call);
  // The caller of send `id` does nothing else until it is done. While other ranks have messages for this one that it
  // does not receive, that may be for ever (two ranks that send to each other): then the message is copied, and is
  // done, as long as the copies are not too many.
  void caller_waits(int peer, std::uint64_t id);
  std::size_t drop_kept(int peer);  // of a rank that will not receive them; how many they were

  void on_offer(int from, const Message& offer);
  void on_grant(int from, const Message& grant);
  void on_data(int from, const transport::Tag& tag, Payload payload);

  // Everything in flight ends with the error that `explain` gives for it: "recv from rank 1 (float32, 4 elements)".
  void fail(const std::function<Error(const std::string& what)>& explain);
  // Does anything in flight need `rank`? -1: is a message from anyone awaited?
  bool waits_for(int rank) const;
  // Not later than the first deadline; the messages are only looked through when it has come.
  TimePoint next_deadline() const { return next_deadline_; }
  std::optional<std::string> overdue(TimePoint now);  // names one operation that is past its deadline

 private:
  using Key = std::pair<int, std::uint64_t>;  // (peer, number of its message)
  struct Outgoing {
    PointToPointCall call;
    std::size_t chunks_left = 0;
    bool started = false;
    bool granted = false;
    std::uint64_t kept = 0;    // charge for a copy, which nobody waits for
    std::uint64_t charge = 0;  // in the allowance
  };
  struct Offer {
    std::uint64_t number;
    std::int32_t tag;
    std::uint64_t bytes;
    std::string what;
  };
  struct Matched {
    PointToPointCall call;
    std::uint64_t bytes_left = 0;
  };

  void offer(const Key& key, Outgoing& outgoing);
  void keep_copies();
  void release_kept(Outgoing& outgoing);
  bool match(int from, const Offer& offer, PointToPointCall& call);
  void start(const Key& key, Outgoing& outgoing);
  void absorb(const Key& key, const transport::Tag& tag, const Payload& payload);

  const int rank_;
  const Group group_;
  std::vector<std::uint64_t> next_number_;              // by receiver
  std::vector<std::uint64_t> allowance_used_;           // by receiver
  std::vector<std::size_t> ungranted_;                  // by receiver: offers that are out
  std::map<int, std::deque<std::uint64_t>> unoffered_;  // by receiver: messages that wait for grants of others
  std::vector<std::uint64_t> early_bytes_;              // by sender: in early_
  std::map<Key, Outgoing> outgoing_;
  std::vector<Key> blocked_;  // their callers wait, and they have not started
  std::uint64_t kept_bytes_ = 0;
  TimePoint next_deadline_ = kNever;
  std::list<PointToPointCall> waiting_;       // receives without an offer, oldest first
  std::deque<std::pair<int, Offer>> offers_;  // offers without a receive, oldest first
  std::vector<std::size_t> offers_from_;      // by sender: in offers_
  std::map<Key, Matched> matched_;
  std::map<Key, std::vector<std::pair<transport::Tag, Payload>>> early_;  // data of offers without a receive
};

}  // namespace torch_iroh::collective
