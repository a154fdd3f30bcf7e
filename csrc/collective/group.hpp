// One rank's view of a group: collectives in the order they were issued, point-to-point messages beside them, and one
// first cause when it breaks. All state lives on one strand, so nothing here is locked; buffers are lent by the caller.
//
// Two rules keep memory bounded and mistakes visible. A rank announces each operation to the ranks it exchanges data
// with; chunks for an operation that its receiver has not announced are held back beyond a small allowance. And each
// announcement is compared with this rank's own operation of that number: two different calls are an error that names
// both.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/workers.hpp"
#include "collective/call.hpp"
#include "collective/chooser.hpp"
#include "collective/execution.hpp"
#include "collective/host_queue.hpp"
#include "collective/inbox.hpp"
#include "collective/ledger.hpp"
#include "collective/messages.hpp"
#include "collective/monitored_barrier.hpp"
#include "collective/point_to_point.hpp"
#include "collective/schedule.hpp"
#include "transport/transport.hpp"

namespace torch_iroh::collective {

struct GroupOptions {
  std::string name;                              // for error texts
  std::size_t chunk_bytes = kDefaultChunkBytes;  // equal on all ranks
  Pins pins;                                     // equal on all ranks; what they leave open is chosen
  std::shared_ptr<const Costs> costs;            // equal on all ranks; none: the links are not known
  std::shared_ptr<const Hierarchy> hierarchy;    // equal on all ranks; none: the world is flat
  Duration peer_timeout = milliseconds(3000);    // where ranks share memory; else the links have their own
};

// What data counts that comes, or goes, before its operation is announced.
std::uint64_t charge_of(std::size_t bytes);

// Blocks of an all_to_all by rank, 0 for who is not among its members.
std::vector<std::uint64_t> amounts_by_rank(const Request& request, const std::vector<std::uint64_t>& blocks);

struct GroupStats {
  std::uint64_t collectives = 0;  // finished
  double busy_seconds = 0;        // wall time with at least one operation in flight
  std::vector<transport::PeerStats> peers;
  std::string plan;                           // what its user fixed; empty: nothing
  std::optional<transport::Network> network;  // where its links are known
  std::vector<ChoiceStats> choices;           // of collectives that went through the transport
};

class Group : public transport::Receiver, public std::enable_shared_from_this<Group> {
 public:
  // `team`: all ranks of the group share memory, and collectives go through it.
  static std::shared_ptr<Group> make(std::shared_ptr<transport::Transport> transport, const GroupOptions& options,
                                     std::shared_ptr<transport::HostTeam> team = nullptr);
  ~Group() override;

  int rank() const { return rank_; }
  int world() const { return world_; }
  bool shares_memory() const { return host_ != nullptr; }  // among all ranks

  // Thread-safe; return at once, unless the caller drives. The number of the operation among the group's collectives is
  // returned.
  std::uint64_t submit(CollectiveCall call);
  void release(std::uint64_t sequence);
  void send(PointToPointCall call);
  void recv(PointToPointCall call);  // peer -1: from anyone
  void caller_waits_for_send(int peer, std::uint64_t id);
  void monitored_barrier(MonitoredBarrierCall call);

  void connect_all();
  void connect(int peer);  // whose death breaks the group from now on, even when nothing is in flight
  std::uint64_t submitted() const { return submitted_.load(); }

  // Breaks the group: everything in flight fails with `cause`, the other ranks are told.
  void abort(const Error& cause);
  std::optional<Error> failure() const;
  // Runs once, on the strand, when the group breaks or is shut down (or at once if it is). It must be short.
  void on_failure(std::function<void(const Error&)> listener);

  // Leaves the group. Waits a moment for what is in flight, then fails it; blocks for at most about a second when the
  // group is broken, and else until what was sent has arrived.
  // `linger`: how long what was sent may take to arrive.
  void shutdown(Duration linger = milliseconds(60000));

  GroupStats stats() const;

  void on_data(int from, const transport::Tag& tag, Payload payload) override;
  void on_control(int from, Payload payload) override;
  void on_lost(int rank, bool left, const Error& cause) override;

 private:
  static constexpr int kAnyone = -1;

  struct Queued {
    std::uint64_t sequence;
    CollectiveCall call;
    TimePoint deadline;
  };
  // What a rank announces, and what this rank expects.
  struct Announced {
    std::string text;
    std::uint64_t amount = 0;  // all_to_all: elements for this rank
  };
  struct Past {
    std::string description;
    std::vector<std::uint64_t> amounts;  // all_to_all: elements expected from each rank
  };
  struct Running {
    std::uint64_t sequence;
    Past call;
    std::uint32_t signature;
    Duration timeout;
    TimePoint deadline;
    std::shared_ptr<Execution> execution;
    Done done;
    Choice choice;
    TimePoint begun;
  };
  struct Early {
    int from;
    transport::Tag tag;
    Payload payload;
  };
  struct Held {
    transport::Tag tag;
    std::span<const std::byte> bytes;
    transport::SendDone done;
  };
  struct Peer {
    std::optional<Error> lost;
    bool left = false;
    bool told = false;                             // that the group is broken
    std::uint64_t announced = 0;                   // operations below this number have begun there
    std::map<std::uint64_t, Announced> calls;      // announced, not begun here
    std::uint64_t allowance_used = 0;              // bytes sent ahead of its announcements
    std::map<std::uint64_t, std::uint64_t> ahead;  // the same by operation
    std::deque<Held> held;
    std::uint64_t early_bytes = 0;              // kept for operations that have not begun here
    std::vector<std::function<void()>> unsure;  // sends that the road's end cut off; see send_chunk()
  };

  Group(std::shared_ptr<transport::Transport> transport, const GroupOptions& options);

  void post(Task task);
  void run_or_post(Task task);
  void advance();
  void begin(Queued queued);
  void run(const std::function<void()>& step);  // turns what it throws into a failure of the group
  void send_chunk(int peer, const transport::Tag& tag, std::span<const std::byte> bytes, std::function<void()> sent);
  void transmit(int peer, const transport::Tag& tag, std::span<const std::byte> bytes, transport::SendDone done);
  bool may_send(Peer& peer, std::uint64_t sequence, std::size_t bytes) const;  // counts what it lets through
  void release_held(int peer);
  Error gone(int peer) const;
  bool alone() const;  // every other rank is lost
  void handle_data(int from, const transport::Tag& tag, Payload payload);
  void handle_message(int from, const Message& message);
  void handle_call(int from, const Message& message);
  void announce(std::uint64_t sequence, const Request& request, const std::string& description,
                const Execution& execution);
  void compare(int from, std::uint64_t sequence, const Past& mine, const Announced& theirs) const;
  void end_current();
  void fail(const Error& given, bool tell_others);
  void fail(const Error& cause, bool tell_others, const Error& news);
  void tell_failure(int peer, const Error& cause);
  Error explain(const Error& cause, const std::string& what) const;
  std::string waiting_text() const;
  PointToPointCall counted(PointToPointCall call);
  bool waits_for_memory() const { return !current_ && !queue_.empty() && queue_.front().call.held; }
  void watch_deadlines();
  void on_deadline();
  void count_in_flight(int change);
  void share_memory(std::shared_ptr<transport::HostTeam> team);

  const std::shared_ptr<transport::Transport> transport_;
  const GroupOptions options_;
  const Chooser chooser_;
  const int rank_;
  const int world_;
  const std::shared_ptr<Strand> strand_;
  Inbox inbox_;
  Ledger ledger_;
  std::shared_ptr<HostQueue> host_;  // runs the collectives, where all ranks share memory
  std::atomic<std::uint64_t> submitted_{0};
  std::mutex submit_mutex_;  // numbers and queues in one step

  // On the strand only:
  std::deque<Queued> queue_;
  std::optional<Running> current_;
  std::vector<Peer> peers_;
  std::map<std::uint64_t, std::vector<Early>> early_;
  std::map<std::uint64_t, Past> history_;
  std::unique_ptr<PointToPoint> point_to_point_;
  std::unique_ptr<MonitoredBarrier> monitored_barrier_;
  std::function<void(const Error&)> failure_listener_;
  TimePoint timer_at_ = kNever;
  TimePoint mismatch_until_ = kNever;  // foreign data has come: its name must follow until then
  int mismatch_from_ = -1;
  bool advancing_ = false;
  bool closed_ = false;

  mutable std::mutex shared_mutex_;  // guards what other threads read
  std::optional<Error> failure_;
  std::uint64_t finished_ = 0;
  int in_flight_ = 0;
  int kept_messages_ = 0;
  TimePoint busy_since_{};
  Duration busy_{};
  std::condition_variable idle_;
};

}  // namespace torch_iroh::collective
