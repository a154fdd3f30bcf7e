// How this process can be reached from outside its own network: through relays, and at the address that an observer
// sees. An observer is an endpoint with a public address; over its own connection it tells each peer what address the
// peer's packets come from ("ip:port" on a stream of its own, again whenever that changes). iroh's own way to learn
// this, QUIC address discovery, trusts public certificates only, and so cannot be used with a server of one's own.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/time.hpp"
#include "iroh/endpoint.hpp"

namespace torch_iroh::link {

inline constexpr const char* kObserveAlpn = "torch-iroh/observe/1";

struct ReachOptions {
  std::vector<iroh::RelayServer> relays;
  bool public_relays = false;          // those of iroh's makers
  std::vector<std::string> observers;  // "<64 hex digits>@ip:port"
  bool operator==(const ReachOptions&) const = default;
};

// What users write: a comma-separated list of URLs, "n0" or "none"; observers comma-separated. Throw Error(invalid)
// with what is wrong.
void parse_relays(const std::string& text, const std::optional<std::string>& token, ReachOptions& into);
std::vector<std::string> parse_observers(const std::string& text);

// Keeps an endpoint in touch with its observers, for as long as it exists.
class Reach : public std::enable_shared_from_this<Reach> {
 public:
  Reach(iroh::Endpoint endpoint, ReachOptions options) : endpoint_(std::move(endpoint)), options_(std::move(options)) {}
  ~Reach();
  Reach(const Reach&) = delete;
  Reach& operator=(const Reach&) = delete;

  // Sets out; returns when a relay is usable and one observer has answered, or at `by` with a warning of what is
  // missing. What comes later is still used.
  void start(TimePoint by);
  void on_tick(TimePoint now);  // dials lost observers again

  std::vector<std::string> observed() const;  // the addresses that observers have seen

 private:
  struct Observer {
    iroh::EndpointAddr addr;
    iroh::Connection connection;
    bool dialing = false;
    TimePoint retry_at{};
    std::string seen;  // empty: no answer yet
  };
  void dial(std::size_t index);
  void listen(std::size_t index, const iroh::Connection& connection);
  void on_seen(std::size_t index, const std::string& address);
  void on_lost(std::size_t index, const std::string& why);

  const iroh::Endpoint endpoint_;
  const ReachOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Observer> observers_;
  bool online_ = false;
};

}  // namespace torch_iroh::link
