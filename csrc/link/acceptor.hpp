// Takes what comes to an endpoint, up to the end of the handshake. Who may stay is its owner's decision.
#pragma once

#include <functional>
#include <memory>
#include <mutex>

#include "iroh/endpoint.hpp"

namespace torch_iroh::link {

class Acceptor : public std::enable_shared_from_this<Acceptor> {
 public:
  // Called on polling threads, never with a lock held; with the error of a handshake that failed.
  using OnConnected = std::function<void(Result<iroh::Connection>)>;

  explicit Acceptor(OnConnected on_connected) : on_connected_(std::move(on_connected)) {}

  // Until the endpoint is closed, or this is gone; several endpoints share one limit.
  void accept(const iroh::Endpoint& endpoint);

 private:
  void on_handshake(Result<iroh::Connection> result);

  const OnConnected on_connected_;
  std::mutex mutex_;
  int handshakes_ = 0;
};

}  // namespace torch_iroh::link
