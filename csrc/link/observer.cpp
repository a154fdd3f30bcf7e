#include "link/observer.hpp"

#include <utility>
#include <vector>

#include "base/log.hpp"
#include "base/workers.hpp"
#include "link/reach.hpp"

namespace torch_iroh::link {
namespace {

constexpr Duration kBindTimeout = milliseconds(10000);
constexpr Duration kCloseTimeout = milliseconds(500);
// How late a changed address may be told. A peer's first address is told when it connects.
constexpr Duration kLookInterval = milliseconds(1000);
constexpr std::uint32_t kCloseFull = 2;
constexpr std::uint32_t kCloseTalks = 3;

// The address that the peer's packets come from; empty: no path has one yet.
std::string seen_address(const iroh::Connection& connection) {
  std::string address;
  for (const iroh::Path& path : connection.paths()) {
    if (path.relay) continue;
    if (path.selected) return path.remote_addr;
    address = path.remote_addr;
  }
  return address;
}

}  // namespace

void Observer::start() {
  iroh::EndpointOptions options;
  options.alpns = {kObserveAlpn};
  options.bind_addr = options_.bind_addr;
  options.secret_key = options_.secret_key;
  endpoint_ = iroh::Endpoint::bind(options).get(after(Clock::now(), kBindTimeout));
  acceptor_ = std::make_shared<Acceptor>([weak = weak_from_this()](Result<iroh::Connection> connection) {
    if (const auto self = weak.lock()) self->on_connected(std::move(connection));
  });
  acceptor_->accept(endpoint_);
  arm_tick();
}

void Observer::close() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    peers_.clear();
  }
  try {
    endpoint_.close().get(after(Clock::now(), kCloseTimeout));
  } catch (const Error& error) {
    log(LogLevel::debug, std::string("closing the observer: ") + error.what());
  }
}

void Observer::on_connected(Result<iroh::Connection> result) {
  std::uint64_t number = 0;
  bool full = false;
  {
    const std::lock_guard lock(mutex_);
    if (!result.ok() || closing_) return;
    full = peers_.size() >= options_.most_connections;
    number = ++next_;
    if (!full) peers_[number].connection = result.value();
  }
  const iroh::Connection& connection = result.value();
  if (full) {
    log_once(LogLevel::warn, "observer full",
             "the observer has " + std::to_string(options_.most_connections) +
                 " connections and refuses more: run another one, or raise --max-clients");
    return connection.close(kCloseFull, "this observer is full: use another one");
  }
  // QUIC has let it open a hundred streams by now, and iroh would keep what comes on them.
  const auto send_away = [connection](const auto& stream) {
    if (stream.ok()) connection.close(kCloseTalks, "an observer takes nothing");
  };
  connection.accept_uni().then(send_away);
  connection.accept_bi().then(send_away);
  connection.closed().then([weak = weak_from_this(), number](const Result<std::string>&) {
    const auto self = weak.lock();
    if (!self) return;
    iroh::Connection ended;  // freed after the lock
    const std::lock_guard lock(self->mutex_);
    const auto peer = self->peers_.find(number);
    if (peer == self->peers_.end()) return;
    ended = std::move(peer->second.connection);
    self->peers_.erase(peer);
  });
  tell(number, connection);
}

void Observer::tell(std::uint64_t number, const iroh::Connection& connection) {
  const std::string address = seen_address(connection);
  {
    const std::lock_guard lock(mutex_);
    const auto peer = peers_.find(number);
    if (address.empty() || peer == peers_.end() || peer->second.said == address) return;
    peer->second.said = address;
    ++answers_;
  }
  connection.open_uni().then([address](Result<iroh::SendStream> opened) {
    if (!opened.ok()) return;  // the connection has ended
    auto stream = std::make_shared<iroh::SendStream>(std::move(opened.value()));
    stream->write_all(std::as_bytes(std::span(address))).then([stream](const Result<Nothing>& written) {
      if (written.ok()) stream->finish().then([stream](const Result<Nothing>&) {});
    });
  });
}

void Observer::arm_tick() {
  workers().at(after(Clock::now(), kLookInterval), [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->tick();
  });
}

void Observer::tick() {
  std::vector<std::pair<std::uint64_t, iroh::Connection>> all;
  {
    const std::lock_guard lock(mutex_);
    if (closing_) return;
    for (const auto& [number, peer] : peers_) all.emplace_back(number, peer.connection);
  }
  for (const auto& [number, connection] : all) tell(number, connection);
  arm_tick();
}

std::size_t Observer::connections() const {
  const std::lock_guard lock(mutex_);
  return peers_.size();
}

std::uint64_t Observer::answers() const {
  const std::lock_guard lock(mutex_);
  return answers_;
}

}  // namespace torch_iroh::link
