#include "link/acceptor.hpp"

#include <utility>

namespace torch_iroh::link {
namespace {

constexpr int kMostHandshakes = 256;

}  // namespace

void Acceptor::accept(const iroh::Endpoint& endpoint) {
  endpoint.accept_next().then([weak = weak_from_this(), endpoint](Result<std::optional<iroh::Incoming>> result) {
    const auto self = weak.lock();
    if (!self || !result.ok() || !result.value()) return;  // the endpoint is closed
    {
      // A flood of attempts must not hold memory: beyond the limit they are dropped, which refuses them.
      const std::lock_guard lock(self->mutex_);
      if (self->handshakes_ < kMostHandshakes) {
        ++self->handshakes_;
      } else {
        result.value().reset();
      }
    }
    if (result.value()) {
      result.value()->accept().then([weak](Result<iroh::Accepting> accepting) {
        auto finish = [weak](Result<iroh::Connection> connection) {
          if (const auto acceptor = weak.lock()) acceptor->on_handshake(std::move(connection));
        };
        if (!accepting.ok()) return finish(accepting.error());
        accepting.value().handshake().then(finish);
      });
    }
    self->accept(endpoint);
  });
}

void Acceptor::on_handshake(Result<iroh::Connection> result) {
  {
    const std::lock_guard lock(mutex_);
    --handshakes_;
  }
  on_connected_(std::move(result));
}

}  // namespace torch_iroh::link
