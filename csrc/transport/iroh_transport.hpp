// The transport over iroh: rank numbers on one side, endpoint ids and links on the other.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "link/node.hpp"
#include "transport/gate.hpp"
#include "transport/transport.hpp"

namespace torch_iroh::transport {

class IrohTransport final : public Transport,
                            public link::GroupSink,
                            public std::enable_shared_from_this<IrohTransport> {
 public:
  // Joins `group` at once, so that no early frame is lost; set_members() must follow.
  static std::shared_ptr<IrohTransport> join(std::shared_ptr<link::Node> node, std::uint64_t group, int rank,
                                             int world);
  ~IrohTransport() override;

  // Who each rank is, by rank, and the wire version that all of them speak.
  void set_members(const std::vector<link::PeerAddr>& members, std::uint8_t wire_version);

  int rank() const override { return rank_; }
  int world() const override { return world_; }
  void start(Receiver& receiver) override;
  void send(int peer, const Tag& tag, std::span<const std::byte> bytes, SendDone done) override;
  void send_control(int peer, std::vector<std::byte> bytes) override;
  void connect(int peer) override;
  bool connected(int peer) const override;
  bool may_wait_for_receiver() const override { return true; }  // polling threads, which the receiver never needs
  void close(Duration linger) override;
  std::vector<PeerStats> stats() const override;

  void on_frame(const iroh::EndpointId& from, const link::FrameHeader& header, Payload payload) override;
  void on_peer_dead(const iroh::EndpointId& peer, const Error& cause) override;

 private:
  struct Peer {
    iroh::EndpointId id{};
    std::shared_ptr<link::Link> link;
    int goodbyes = 0;
    bool lost = false;
    std::uint64_t sent_bytes = 0;
    std::uint64_t received_bytes = 0;
  };
  struct Early {
    iroh::EndpointId from;
    link::FrameHeader header;
    Payload payload;
  };

  IrohTransport(std::shared_ptr<link::Node> node, std::uint64_t group, int rank, int world);
  std::shared_ptr<link::Link> link_of(int peer);
  bool is_lost(int peer) const;
  void deliver_death(const iroh::EndpointId& id, const Error& cause);
  void deliver(const iroh::EndpointId& from, const link::FrameHeader& header, Payload payload);

  const std::shared_ptr<link::Node> node_;
  const std::uint64_t group_;
  const int rank_;
  const int world_;

  ReceiverGate gate_;
  mutable std::mutex mutex_;
  std::uint8_t wire_version_ = link::kWireVersionMax;
  std::vector<Peer> peers_;
  std::map<iroh::EndpointId, int> ranks_;
  std::vector<Early> early_;  // what came before start()
  std::vector<std::pair<iroh::EndpointId, Error>> early_deaths_;
  std::size_t early_bytes_ = 0;
  bool started_ = false;
  bool closed_ = false;
};

}  // namespace torch_iroh::transport
