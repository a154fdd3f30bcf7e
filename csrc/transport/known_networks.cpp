#include "transport/known_networks.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "base/fork.hpp"

namespace torch_iroh::transport {
namespace {

constexpr std::size_t kMostKnown = 8;

}  // namespace

KnownNetworks& KnownNetworks::own() {
  static PerProcess<KnownNetworks> shared([] { return std::make_unique<KnownNetworks>(); });
  return shared.get();
}

void KnownNetworks::remember(std::vector<Host> hosts, Network network, TimePoint measured) {
  if (std::any_of(hosts.begin(), hosts.end(), [](const Host& host) { return host.identity.empty(); })) return;
  const std::lock_guard lock(mutex_);
  known_.push_front({std::move(hosts), std::move(network), measured});
  if (known_.size() > kMostKnown) known_.pop_back();
}

std::optional<KnownNetworks::Found> KnownNetworks::find(const std::vector<Host>& hosts, TimePoint now) const {
  const std::lock_guard lock(mutex_);
  for (const Known& known : known_) {
    if (now - known.measured > kMostAge) continue;
    std::vector<std::int32_t> sites;
    std::map<std::int32_t, std::int32_t> numbers;  // as they come here, by what they were called there
    for (const Host& host : hosts) {
      const auto at = std::find(known.hosts.begin(), known.hosts.end(), host);
      if (at == known.hosts.end()) break;
      const std::int32_t site = known.network.site_of[static_cast<std::size_t>(at - known.hosts.begin())];
      sites.push_back(numbers.try_emplace(site, static_cast<std::int32_t>(numbers.size())).first->second);
    }
    if (sites.size() != hosts.size()) continue;
    Network network = known.network;
    network.site_of = std::move(sites);
    return Found{std::move(network), now - known.measured};
  }
  return std::nullopt;
}

}  // namespace torch_iroh::transport
