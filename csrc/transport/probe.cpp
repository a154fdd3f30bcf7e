#include "transport/probe.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "base/rank_text.hpp"
#include "transport/known_networks.hpp"
#include "transport/probe_messages.hpp"
#include "transport/prober.hpp"
#include "transport/sites.hpp"

namespace torch_iroh::transport {
namespace {

constexpr Duration kMostAskTime = milliseconds(2000);
constexpr Duration kMostFlowTime = milliseconds(1500);
// The probes' own group number: nobody has chosen it, and all ranks know it.
constexpr std::uint64_t kProbeGroup = 0x70726f6265730000;  // "probes"

// ---- one host's part ----

using probe::beside;
using probe::Found;
using probe::Kind;
using probe::ring_of;
using probe::Step;
using probe::targets_in;
using Bytes = std::vector<std::uint8_t>;

class Part {
 public:
  Part(KeyValueStore& store, std::string prefix, std::vector<int> leaders, std::int32_t host, Prober& prober)
      : store_(store), prefix_(std::move(prefix)), leaders_(std::move(leaders)), host_(host), prober_(prober) {}

  std::size_t hosts() const { return leaders_.size(); }
  std::string step_key(int number) const { return prefix_ + "step/" + std::to_string(number); }
  std::string found_key(int number, std::size_t host) const {
    return prefix_ + "found/" + std::to_string(number) + "/" + std::to_string(host);
  }

  Found perform(const Step& step) {
    Found found;
    const TimePoint now = Clock::now();
    if (step.kind == Kind::flows) {
      const auto ring = ring_of(step.site_of);
      found.rate = prober_.exchange_flow(leader(beside(ring, host_, 1)), leader(beside(ring, host_, hosts() - 1)),
                                         after(now, kMostFlowTime));
      return found;
    }
    const std::vector<std::int32_t> targets = targets_in(step, host_);
    std::vector<int> ranks;
    for (const std::int32_t host : targets) ranks.push_back(leader(host));
    for (const Prober::Answer& one : prober_.ask(ranks, after(now, kMostAskTime))) {
      const auto target = std::find(ranks.begin(), ranks.end(), one.rank) - ranks.begin();
      found.reaches.push_back({host_, targets[static_cast<std::size_t>(target)], one.rtt_us, one.relayed});
    }
    return found;
  }

  // Does what rank 0 says until it says stop.
  void follow(TimePoint deadline) {
    for (int number = 0;; ++number) {
      const std::string key = step_key(number);
      const Duration left = std::max<Duration>(deadline - Clock::now(), milliseconds(1));
      if (!store_.wait({key}, left)) return;  // who waits for the decision says that rank 0 is silent
      const Step step = step_of(key);
      if (step.kind == Kind::stop) return;
      Bytes answer;
      try {
        answer = probe::encode(perform(step), step.kind);
      } catch (const Error& error) {
        answer = probe::encode(Error(error.kind(), "rank " + std::to_string(leader(host_)) + ": " + error.what()));
      }
      store_.set(found_key(number, static_cast<std::size_t>(host_)), answer);
    }
  }

  Step step_of(const std::string& key) const {
    try {
      return probe::decode_step(store_.get(key), hosts());
    } catch (const Error& error) {
      throw Error(ErrorKind::protocol, "rank " + std::to_string(leader(host_)) + ": the store's entry " + key +
                                           " of rank 0 is unreadable: " + error.what());
    }
  }

  // Of all hosts, this one included.
  std::vector<Found> lead(int number, const Step& step, TimePoint by) {
    store_.set(step_key(number), probe::encode(step));
    std::vector<Found> all(hosts());
    all[static_cast<std::size_t>(host_)] = perform(step);
    std::vector<std::string> keys;
    for (std::size_t host = 0; host < hosts(); ++host) {
      if (host != static_cast<std::size_t>(host_)) keys.push_back(found_key(number, host));
    }
    if (!store_.wait(keys, std::max<Duration>(by - Clock::now(), milliseconds(1)))) {
      std::vector<int> late;
      for (std::size_t host = 0; host < hosts(); ++host) {
        if (host != static_cast<std::size_t>(host_) && !store_.has(found_key(number, host)))
          late.push_back(leaders_[host]);
      }
      if (!late.empty()) throw Error(ErrorKind::timeout, ranks_text(late) + " measured for too long");
    }
    for (std::size_t host = 0; host < hosts(); ++host) {
      if (host == static_cast<std::size_t>(host_)) continue;
      const auto which = static_cast<std::int32_t>(host);
      try {
        all[host] = probe::decode_found(store_.get(found_key(number, host)), step.kind, which, targets_in(step, which));
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::protocol) throw;
        throw Error(ErrorKind::protocol,
                    "what rank " + std::to_string(leaders_[host]) + " found is unreadable: " + error.what());
      }
    }
    return all;
  }

 private:
  int leader(std::int32_t host) const { return leaders_[static_cast<std::size_t>(host)]; }

  KeyValueStore& store_;
  const std::string prefix_;
  const std::vector<int> leaders_;  // rank, by host
  const std::int32_t host_;
  Prober& prober_;
};

// ---- rank 0 ----

Decision decide(Part& part, KeyValueStore& store, const std::vector<std::string>& hints, bool hosts_share,
                TimePoint by) {
  Decision decision;
  int number = 0;
  try {
    SiteFinder finder(hints);
    std::vector<Reach> reaches;
    const auto collect = [&](const Step& step) {
      std::vector<Reach> fresh;
      for (const Found& found : part.lead(number++, step, by))
        fresh.insert(fresh.end(), found.reaches.begin(), found.reaches.end());
      reaches.insert(reaches.end(), fresh.begin(), fresh.end());
      return fresh;
    };
    while (!finder.landmarks().empty()) {
      Step step{.kind = Kind::ask, .landmarks = finder.landmarks()};
      for (std::size_t host = 0; host < part.hosts(); ++host)
        step.asks.push_back(finder.asks(static_cast<std::int32_t>(host)));
      finder.add(collect(step));
    }
    const std::vector<std::int32_t> sites = finder.sites();
    collect({.kind = Kind::pings, .site_of = sites});
    const std::vector<std::int32_t> ring = ring_of(sites);
    std::vector<Flow> flows;
    const auto rates = part.lead(number++, {.kind = Kind::flows, .site_of = sites}, by);
    for (std::size_t host = 0; host < rates.size(); ++host) {
      const auto to = static_cast<std::int32_t>(host);
      flows.push_back({beside(ring, to, ring.size() - 1), to, rates[host].rate});
    }
    decision.network = network_of(sites, reaches, flows, hosts_share);
  } catch (const Error& error) {
    decision.failure = error.what();
  }
  store.set(part.step_key(number), probe::encode(Step{}));
  return decision;
}

// What is known from an earlier group, told as if it had just been found.
std::optional<Decision> recall(Part& part, KeyValueStore& store, const std::vector<KnownNetworks::Host>& hosts,
                               bool hosts_share) {
  auto known = KnownNetworks::own().find(hosts, Clock::now());
  if (!known) return std::nullopt;
  known->network.host = host_link(hosts_share);
  store.set(part.step_key(0), probe::encode(Step{}));
  const auto age = std::chrono::duration_cast<std::chrono::seconds>(known->age).count();
  return Decision{std::move(known->network), "", static_cast<std::uint32_t>(age)};
}

std::string text_of(const LinkCost& link) {
  return std::to_string(link.latency_ns / 1000) + " us one way, " +
         std::to_string(8'000'000 / std::max<std::uint64_t>(1, link.byte_ps)) + " Mbit/s";
}

}  // namespace

std::optional<Network> probe_network(KeyValueStore& store, const std::shared_ptr<link::Node>& node,
                                     const JoinRequest& request, const Joined& joined) {
  const auto& hosts = joined.levels.front();
  std::vector<int> leaders;
  std::vector<std::string> hints;
  std::vector<KnownNetworks::Host> names;
  std::int32_t mine = -1;  // the host that this rank leads
  for (std::size_t host = 0; host < hosts.size(); ++host) {
    leaders.push_back(hosts[host].front());
    const auto first = static_cast<std::size_t>(hosts[host].front());
    hints.push_back(joined.meeting.hints[first]);
    names.push_back({joined.meeting.hosts[first], hints.back()});
    if (hosts[host].front() == request.rank) mine = static_cast<std::int32_t>(host);
  }
  const std::string prefix = joined.meeting.prefix + "probe/";
  const std::string decision_key = prefix + "decision";
  const TimePoint begun = Clock::now();
  bool recalled = false;
  const TimePoint deadline = after(begun, std::max<Duration>(request.timeout, 2 * kMostProbeTime));
  if (mine >= 0) {
    auto transport = IrohTransport::join(node, joined.meeting.group ^ kProbeGroup, request.rank, request.world);
    transport->set_members(joined.meeting.members, joined.meeting.wire_version);
    Prober prober(std::move(transport));
    Part part(store, prefix, leaders, mine, prober);
    if (request.rank == 0) {
      const auto known = recall(part, store, names, joined.hosts_share);
      recalled = known.has_value();
      store.set(decision_key,
                encode(known ? *known : decide(part, store, hints, joined.hosts_share, after(begun, kMostProbeTime))));
    } else {
      part.follow(deadline);
    }
  }
  if (!store.wait({decision_key}, std::max<Duration>(deadline - Clock::now(), milliseconds(1)))) {
    throw Error(ErrorKind::timeout, "rank " + std::to_string(request.rank) +
                                        ": making the group: rank 0 did not say what its links are. Try: look at the "
                                        "log of that rank, or Options(probe=\"off\") on all ranks");
  }
  Decision decision;
  try {
    decision = decode_decision(store.get(decision_key), hosts.size());
  } catch (const Error& error) {
    throw Error(ErrorKind::protocol, "rank " + std::to_string(request.rank) + ": the store's entry " + decision_key +
                                         " of rank 0 is unreadable: " + error.what());
  }
  if (!decision.failure.empty()) {
    log(request.rank == 0 ? LogLevel::warn : LogLevel::info,
        "the links of this group could not be measured: " + decision.failure +
            ". It works by fixed rules. Try: TORCH_IROH_SITE on every host, or Options(probe=\"off\")");
    return std::nullopt;
  }
  Network network = std::move(decision.network);
  // Any rank may be the first of a later group.
  auto& known = KnownNetworks::own();
  if (!known.find(names, begun)) known.remember(names, network, begun - std::chrono::seconds(decision.age_seconds));
  const std::vector<std::int32_t> site_of = std::move(network.site_of);
  network.site_of.assign(static_cast<std::size_t>(request.world), 0);
  network.host_of = network.site_of;
  for (std::size_t host = 0; host < hosts.size(); ++host) {
    for (const std::int32_t rank : hosts[host]) {
      network.host_of[static_cast<std::size_t>(rank)] = static_cast<std::int32_t>(host);
      network.site_of[static_cast<std::size_t>(rank)] = site_of[host];
    }
  }
  if (request.rank == 0) {
    const auto sites = *std::max_element(site_of.begin(), site_of.end()) + 1;
    log(LogLevel::info,
        std::to_string(hosts.size()) + " hosts in " + std::to_string(sites) + " sites; within a site " +
            text_of(network.site) + ", between sites " + text_of(network.wan) + " (" +
            (recalled ? "known from an earlier group" : "measured in " + to_text(Clock::now() - begun)) + ")");
  }
  return network;
}

}  // namespace torch_iroh::transport
