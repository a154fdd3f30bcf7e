#include "collective/cast.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <unordered_map>
#include <utility>

namespace torch_iroh::collective {
namespace {

constexpr std::size_t kSampledRanks = 48;
constexpr std::size_t kManySteps = 100'000;  // of one rank: of such schedules fewer are compared

// Maps the world onto itself: a rotation, or an exclusive or (for worlds of a power of two).
struct Motion {
  bool by_xor = false;
  std::int32_t world = 1;
  std::int32_t by = 0;
  std::int32_t forward(std::int32_t rank) const {
    if (by_xor) return rank ^ by;
    return static_cast<std::int32_t>((static_cast<std::int64_t>(rank) + by) % world);
  }
  std::int32_t back(std::int32_t rank) const {
    if (by_xor) return rank ^ by;
    return static_cast<std::int32_t>((static_cast<std::int64_t>(rank) - by + world) % world);
  }
};

bool same_dependencies(const Schedule& a, const Schedule& b) {
  const auto of_a = dependencies_of(a);
  const auto of_b = dependencies_of(b);
  return std::equal(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(), [](const auto& x, const auto& y) {
    return std::equal(x.begin(), x.end(), y.begin(), y.end(), [](const Dependency& p, const Dependency& q) {
      return p.on == q.on && p.by_chunk == q.by_chunk;
    });
  });
}

// True when `moved`, the schedule of motion.forward(r), is that of r with its peers moved.
bool alike(const Schedule& base, const Schedule& moved, const Motion& motion) {
  if (base.steps.size() != moved.steps.size()) return false;
  for (std::size_t i = 0; i < base.steps.size(); ++i) {
    const Step& a = base.steps[i];
    const Step& b = moved.steps[i];
    if (a.kind != b.kind || a.message != b.message || elements_of(a) != elements_of(b)) return false;
    if (a.peer >= 0 ? b.peer < 0 || motion.forward(a.peer) != b.peer : b.peer >= 0) return false;
  }
  return base.steps.size() > kManySteps || same_dependencies(base, moved);
}

std::int32_t period_of(const LinkModel& model, std::int32_t world) {
  if (model.ranks_per_host >= world) return 1;
  const std::int64_t site = static_cast<std::int64_t>(model.ranks_per_host) * model.hosts_per_site;
  return site >= world ? model.ranks_per_host : static_cast<std::int32_t>(site);
}

bool moves_onto_itself(const Request& request, std::int32_t period, bool by_xor) {
  const auto copies = static_cast<std::uint64_t>(request.world / period);
  std::uint64_t random = 1;
  const auto below = [&](std::uint64_t limit) {
    random = random * 6364136223846793005U + 1442695040888963407U;
    return (random >> 33) % limit;
  };
  std::size_t checks = kSampledRanks;
  for (std::size_t i = 0; i < checks; ++i) {
    // The first and the last of a period against the next and the last copy, then any against any.
    const auto rank =
        i < 4 ? (i % 2) * static_cast<std::uint64_t>(period - 1) : below(static_cast<std::uint64_t>(period));
    const std::uint64_t copy = i < 2 ? 1 % copies : i < 4 ? copies - 1 : below(copies);
    const Schedule base = make_schedule(for_rank(request, static_cast<std::int32_t>(rank)));
    if (base.steps.size() > kManySteps) checks = 4;
    const Motion motion{by_xor, request.world, static_cast<std::int32_t>(copy) * period};
    const std::int32_t moved = motion.forward(static_cast<std::int32_t>(rank));
    if (!alike(base, make_schedule(for_rank(request, moved)), motion)) return false;
  }
  return true;
}

std::uint64_t mix(std::uint64_t state, std::uint64_t value) {
  state ^= value + 0x9e3779b97f4a7c15U + (state << 6) + (state >> 2);
  state ^= state >> 30;
  state *= 0xbf58476d1ce4e5b9U;
  return state ^ (state >> 27);
}

// Sixteen classes for each doubling: shards that differ by an element are one size. The offset keeps powers of two, and
// what lies an element beside them, away from the borders.
std::uint64_t size_class(std::uint64_t count) {
  return static_cast<std::uint64_t>(std::log2(static_cast<double>(count + 1)) * 16 + 0.37);
}

std::size_t distinct(std::vector<std::uint64_t> values) {
  std::sort(values.begin(), values.end());
  return static_cast<std::size_t>(std::unique(values.begin(), values.end()) - values.begin());
}

}  // namespace

Request for_rank(Request request, std::int32_t rank) {
  request.rank = rank;
  return request;
}

std::uint64_t elements_of(const Step& step) {
  return step.kind == StepKind::send ? step.from.count : step.to.count;
}

Size size_of(const Schedule& schedule, std::uint64_t chunk_elements) {
  Size size{schedule.steps.size(), 0};
  for (const Step& step : schedule.steps) size.pieces += (elements_of(step) + chunk_elements - 1) / chunk_elements;
  return size;
}

Size size_of(const Request& request, const std::vector<Player>& players, std::uint64_t chunk_elements,
             const Size& most) {
  Size size;
  for (const Player& player : players) {
    const Size one = size_of(make_schedule(for_rank(request, player.rank)), chunk_elements);
    size.steps += one.steps;
    size.pieces += one.pieces;
    if (!size.within(most)) break;
  }
  return size;
}

Size rough_size_of(const Request& request, std::uint64_t chunk_elements) {
  constexpr std::int32_t kRanks = 15;
  std::vector<Size> sizes;
  for (std::int32_t i = 0; i < kRanks; ++i) {
    const auto rank = static_cast<std::int32_t>(std::int64_t{request.world} * i / kRanks);
    sizes.push_back(size_of(make_schedule(for_rank(request, rank)), chunk_elements));
  }
  std::sort(sizes.begin(), sizes.end(), [](const Size& a, const Size& b) { return a.pieces < b.pieces; });
  const auto world = static_cast<std::uint64_t>(request.world);
  return {sizes[kRanks / 2].steps * world, sizes[kRanks / 2].pieces * world};
}

Cast cast_everyone(const Request& request) {
  Cast cast{request, {}, {}};
  for (std::int32_t rank = 0; rank < request.world; ++rank) cast.players.push_back({rank, 1});
  cast.origin_of = [](std::int32_t receiver, std::int32_t peer, std::uint32_t message) {
    return Origin{static_cast<std::uint32_t>(peer), -1, receiver, message};
  };
  return cast;
}

bool cast_period(const Request& request, const LinkModel& model, Cast& cast) {
  const std::int32_t world = request.world;
  const std::int32_t period = period_of(model, world);
  if (world == period || world % period != 0) return false;
  if (model.host.jitter > 0 || model.site.jitter > 0 || model.wan.jitter > 0) return false;
  bool by_xor = false;
  if (!moves_onto_itself(request, period, false)) {
    const bool powers =
        std::has_single_bit(static_cast<unsigned>(world)) && std::has_single_bit(static_cast<unsigned>(period));
    if (!powers || !moves_onto_itself(request, period, true)) return false;
    by_xor = true;
  }
  cast = {request, {}, {}};
  for (std::int32_t rank = 0; rank < period; ++rank) {
    cast.players.push_back({rank, static_cast<std::uint64_t>(world / period)});
  }
  cast.origin_of = [period, by_xor, world](std::int32_t receiver, std::int32_t peer, std::uint32_t message) {
    const Motion motion{by_xor, world, peer / period * period};
    return Origin{static_cast<std::uint32_t>(peer % period), -1, motion.back(receiver), message};
  };
  return true;
}

// First by its own steps, then by the kinds of the hosts it talks to, until that tells no more apart.
Kinds kinds_of(const Request& request, const LinkModel& model, std::uint64_t most_players) {
  const std::int32_t hosts = model.host_of(request.world - 1) + 1;
  std::vector<std::uint64_t> kinds(static_cast<std::size_t>(hosts));
  std::vector<std::int32_t> peers;
  std::vector<std::uint64_t> first{0};
  std::uint64_t steps = 0;
  for (std::int32_t rank = 0; rank < request.world; ++rank) {
    const auto host = static_cast<std::size_t>(model.host_of(rank));
    std::uint64_t kind = mix(kinds[host], 1);
    const Schedule schedule = make_schedule(for_rank(request, rank));
    steps += schedule.steps.size();
    if (steps > kMostScannedSteps) {
      throw TooLarge("more than " + std::to_string(kMostScannedSteps) +
                     " steps in all: too many to sample a world that is not the same from every rank");
    }
    for (const Step& step : schedule.steps) {
      kind = mix(kind, static_cast<std::uint64_t>(step.kind) << 32 | step.message);
      kind = mix(kind, size_class(elements_of(step)));
      if (step.peer < 0) continue;
      kind = mix(kind, static_cast<std::uint64_t>(model.level_between(rank, step.peer)));
      peers.push_back(step.kind == StepKind::send ? ~step.peer : step.peer);
    }
    kinds[host] = kind;
    first.push_back(peers.size());
  }
  const std::uint64_t most_kinds =
      std::max<std::uint64_t>(1, most_players / static_cast<unsigned>(model.ranks_per_host));
  std::size_t known = distinct(kinds);
  if (known > most_kinds) {
    throw TooLarge("its hosts are of " + std::to_string(known) + " kinds, too many to simulate one of each (" +
                   std::to_string(most_kinds) + ")");
  }
  for (int round = 0; round < kMostRounds; ++round) {
    std::vector<std::uint64_t> next = kinds;
    for (std::size_t host = 0; host < kinds.size(); ++host) {
      const std::size_t rank = host * static_cast<std::size_t>(model.ranks_per_host);
      const std::size_t end = std::min(first.size() - 1, rank + static_cast<std::size_t>(model.ranks_per_host));
      for (std::uint64_t i = first[rank]; i < first[end]; ++i) {
        const std::int32_t peer = peers[i] < 0 ? ~peers[i] : peers[i];
        const auto other = static_cast<std::size_t>(model.host_of(peer));
        const auto place = static_cast<std::uint64_t>(peer % model.ranks_per_host);
        next[host] = mix(mix(next[host], kinds[other]), place);
      }
    }
    const std::size_t found = distinct(next);
    if (found == known || found > most_kinds) break;
    known = found;
    kinds = std::move(next);
  }
  return {std::move(kinds), std::move(peers), std::move(first)};
}

Cast cast_kinds(const Request& request, const LinkModel& model, const Kinds& kinds_and_peers, bool last) {
  const std::vector<std::uint64_t>& kinds = kinds_and_peers.of_host;
  std::unordered_map<std::uint64_t, std::pair<std::int32_t, std::uint64_t>> chosen;  // kind: (host, hosts)
  for (std::size_t host = 0; host < kinds.size(); ++host) {
    auto& [whose, members] = chosen.try_emplace(kinds[host], static_cast<std::int32_t>(host), 0).first->second;
    if (last) whose = static_cast<std::int32_t>(host);
    ++members;
  }
  std::vector<std::pair<std::int32_t, std::uint64_t>> hosts;
  for (const auto& [kind, host] : chosen) hosts.push_back(host);
  std::sort(hosts.begin(), hosts.end());

  Cast cast{request, {}, {}};
  std::unordered_map<std::uint64_t, std::uint32_t> first_player;  // by kind
  for (const auto& [host, members] : hosts) {
    first_player[kinds[static_cast<std::size_t>(host)]] = static_cast<std::uint32_t>(cast.players.size());
    const std::int32_t begin = host * model.ranks_per_host;
    const std::int64_t end = std::min<std::int64_t>(request.world, std::int64_t{begin} + model.ranks_per_host);
    for (std::int32_t rank = begin; rank < end; ++rank) cast.players.push_back({rank, members});
  }
  // The sender itself may not play: which of its sends and receives this is, is its stand-in's too.
  std::vector<std::vector<std::uint32_t>> exchanges;  // by player: the steps that send or receive
  for (const Player& player : cast.players) {
    const Schedule schedule = make_schedule(for_rank(request, player.rank));
    auto& steps = exchanges.emplace_back();
    for (std::uint32_t i = 0; i < schedule.steps.size(); ++i) {
      if (schedule.steps[i].peer >= 0) steps.push_back(i);
    }
  }
  cast.origin_of = [&kinds_and_peers, first_player = std::move(first_player), exchanges = std::move(exchanges),
                    per_host = model.ranks_per_host](std::int32_t receiver, std::int32_t peer, std::uint32_t message) {
    const auto& [of_host, peers, first] = kinds_and_peers;
    const auto rank = static_cast<std::size_t>(peer);
    const std::uint32_t player = first_player.at(of_host[static_cast<std::size_t>(peer / per_host)]) +
                                 static_cast<std::uint32_t>(peer % per_host);
    std::uint32_t seen = 0;
    for (std::uint64_t i = first[rank]; i < first[rank + 1]; ++i) {
      if (peers[i] != ~receiver || seen++ != message) continue;
      return Origin{player, exchanges[player].at(i - first[rank]), receiver, message};
    }
    throw std::logic_error("a receive without its send");
  };
  return cast;
}

}  // namespace torch_iroh::collective
