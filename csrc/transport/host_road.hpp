// The transport between ranks of one host: messages through shared memory (host_ring.hpp). Knows the group's ranks on
// this host only. The process's HostDriver delivers what comes and sends what had to wait for room.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/gate.hpp"
#include "transport/host_driver.hpp"
#include "transport/host_ring.hpp"
#include "transport/host_team.hpp"
#include "transport/host_watch.hpp"
#include "transport/transport.hpp"

namespace torch_iroh::transport {

class HostRoad final : public Transport, public Attended, public std::enable_shared_from_this<HostRoad> {
 public:
  // `peer_timeout`: how long a rank's process may be stopped before the rank is lost.
  HostRoad(std::shared_ptr<HostTeam> team, Duration peer_timeout);
  ~HostRoad() override;

  int rank() const override { return rank_; }
  int world() const override { return world_; }
  void start(Receiver& receiver) override;
  void send(int peer, const Tag& tag, std::span<const std::byte> bytes, SendDone done) override;
  void send_control(int peer, std::vector<std::byte> bytes) override;
  void connect(int peer) override;
  bool connected(int peer) const override;
  bool may_wait_for_receiver() const override { return true; }  // the driver, which the receiver never needs
  void close(Duration linger) override;
  std::vector<PeerStats> stats() const override;  // of the ranks on this host

  std::optional<TimePoint> advance_if_free() override;
  News waits_for() const override { return News::messages; }

 private:
  struct Pending {
    RingKind kind = RingKind::data;
    Tag tag{};
    std::span<const std::byte> bytes;
    SendDone done;
    std::size_t sent = 0;  // bytes of it that are in the ring
  };
  struct Peer {
    std::unique_ptr<RingWriter> out;
    std::deque<Pending> pending;
    std::shared_ptr<RingReader> in;  // the driver's alone
    bool watched = false;            // somebody exchanges with it, so it is missed when it is gone
    bool lost = false;
    std::uint64_t sent_bytes = 0;
    std::uint64_t received_bytes = 0;
  };

  void put(int rank, Pending message);
  // What can go, goes. `sent`: the messages that are in, whose `done` is to be called without the lock.
  void flush(int rank, Peer& peer, std::vector<Pending>& sent);
  // False: there may be more; the others' turn comes first.
  bool receive(int rank, Peer& peer);
  void deliver(int rank, RingReader::Message message);
  void look(TimePoint now);
  void lose(int rank, bool left, const Error& cause);
  void watch(int rank, Peer& peer);
  bool all_delivered() const;

  // Given back by close(), under both mutexes.
  std::shared_ptr<HostTeam> team_;
  const int rank_;
  const int world_;
  ReceiverGate gate_;
  std::mutex driving_;  // held while the driver works
  HostWatch watch_;     // the driver's alone
  TimePoint look_at_ = kNever;

  mutable std::mutex mutex_;
  std::map<int, Peer> peers_;  // complete from the start
  std::condition_variable delivered_;
  bool started_ = false;
  bool closed_ = false;
};

}  // namespace torch_iroh::transport
