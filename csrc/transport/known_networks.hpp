// What earlier groups of this process have measured: a group among the same hosts need not measure again.
#pragma once

#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/time.hpp"
#include "transport/network.hpp"

namespace torch_iroh::transport {

class KnownNetworks {
 public:
  // A host, and the site that its ranks name ("": none).
  struct Host {
    std::string identity;
    std::string hint;
    bool operator==(const Host&) const = default;
  };
  // Links change, so what is older is measured again.
  static constexpr Duration kMostAge = milliseconds(600'000);

  static KnownNetworks& own();  // of this process

  // `network.site_of` is by host. Hosts that cannot be told from others are not remembered.
  void remember(std::vector<Host> hosts, Network network, TimePoint measured);
  struct Found {
    Network network;
    Duration age{};
  };
  // The links among `hosts`, which were all hosts of one earlier group, or some of them.
  std::optional<Found> find(const std::vector<Host>& hosts, TimePoint now) const;

 private:
  struct Known {
    std::vector<Host> hosts;
    Network network;
    TimePoint measured;
  };

  mutable std::mutex mutex_;
  std::deque<Known> known_;  // the newest first
};

}  // namespace torch_iroh::transport
