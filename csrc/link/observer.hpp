// The other side of Reach: an endpoint with a public address that tells each peer what address its packets come from,
// as "ip:port" on a stream of its own, again whenever that changes. Sends those away who want to say
// something; keeps each connection, whose heartbeat keeps the peer's NAT mapping.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "iroh/endpoint.hpp"
#include "link/acceptor.hpp"

namespace torch_iroh::link {

struct ObserverOptions {
  std::string bind_addr;                      // "ip:port"
  std::optional<iroh::SecretKey> secret_key;  // none: a fresh one
  std::size_t most_connections = 4096;        // more are sent away
};

class Observer : public std::enable_shared_from_this<Observer> {
 public:
  explicit Observer(const ObserverOptions& options) : options_(options) {}

  void start();  // blocks while it binds; throws what iroh says
  void close();

  iroh::EndpointId id() const { return endpoint_.id(); }
  std::vector<std::string> bound_sockets() const { return endpoint_.bound_sockets(); }
  std::size_t connections() const;
  std::uint64_t answers() const;  // addresses said so far

 private:
  struct Peer {
    iroh::Connection connection;
    std::string said;
  };
  void on_connected(Result<iroh::Connection> result);
  void tell(std::uint64_t number, const iroh::Connection& connection);
  void arm_tick();
  void tick();

  const ObserverOptions options_;
  iroh::Endpoint endpoint_;
  std::shared_ptr<Acceptor> acceptor_;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, Peer> peers_;
  std::uint64_t next_ = 0;
  std::uint64_t answers_ = 0;
  bool closing_ = false;
};

}  // namespace torch_iroh::link
