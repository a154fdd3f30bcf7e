#include "transport/routed.hpp"

#include <utility>
#include <vector>

namespace torch_iroh::transport {
namespace {

class Routed final : public Transport {
 public:
  Routed(std::shared_ptr<Transport> network, std::shared_ptr<HostRoad> host, const std::vector<int>& neighbours)
      : network_(std::move(network)), host_(std::move(host)), roads_(static_cast<std::size_t>(network_->world())) {
    for (auto& road : roads_) road = network_.get();
    for (const int rank : neighbours) roads_[static_cast<std::size_t>(rank)] = host_.get();
  }

  int rank() const override { return network_->rank(); }
  int world() const override { return network_->world(); }
  void start(Receiver& receiver) override {
    network_->start(receiver);
    host_->start(receiver);
  }
  void send(int peer, const Tag& tag, std::span<const std::byte> bytes, SendDone done) override {
    road(peer).send(peer, tag, bytes, std::move(done));
  }
  void send_control(int peer, std::vector<std::byte> bytes) override {
    road(peer).send_control(peer, std::move(bytes));
  }
  void connect(int peer) override { road(peer).connect(peer); }
  bool connected(int peer) const override { return road(peer).connected(peer); }
  bool may_wait_for_receiver() const override { return true; }
  void close(Duration linger) override {
    host_->close(linger);
    network_->close(linger);
  }
  std::vector<PeerStats> stats() const override {
    std::vector<PeerStats> all = network_->stats();
    for (PeerStats& near : host_->stats()) {
      for (PeerStats& one : all) {
        if (one.rank != near.rank) continue;
        near.endpoint_id = std::move(one.endpoint_id);
        one = near;
      }
    }
    return all;
  }

 private:
  Transport& road(int peer) const { return *roads_.at(static_cast<std::size_t>(peer)); }

  const std::shared_ptr<Transport> network_;
  const std::shared_ptr<HostRoad> host_;
  std::vector<Transport*> roads_;  // by rank
};

}  // namespace

std::shared_ptr<Transport> make_routed(std::shared_ptr<Transport> network, std::shared_ptr<HostTeam> team,
                                       Duration peer_timeout) {
  auto host = std::make_shared<HostRoad>(team, peer_timeout);
  return std::make_shared<Routed>(std::move(network), std::move(host), team->neighbours());
}

}  // namespace torch_iroh::transport
