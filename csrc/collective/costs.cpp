#include "collective/costs.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "collective/hierarchy.hpp"
#include "collective/pins.hpp"
#include "collective/planner.hpp"

namespace torch_iroh::collective {
namespace {

using transport::LinkCost;
using transport::Network;
using Ns = std::uint64_t;

// Absurd links and sizes end at the largest number, which nobody chooses.
Ns times(Ns a, Ns b) {
  Ns product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<Ns>::max() : product;
}
Ns plus(Ns a, Ns b) {
  Ns sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<Ns>::max() : sum;
}
Ns ns_of(Ns bytes, Ns byte_ps) {
  return plus(times(bytes / 1000, byte_ps), times(bytes % 1000, byte_ps) / 1000);
}
Ns parts_of(Ns whole, Ns part) {
  return whole / part + (whole % part > 0 ? 1 : 0);
}

// One algorithm's formulas on one shape. S: bytes of the whole; N ranks; a shard is S/N.
class Pricer {
 public:
  Pricer(const Network& network, const Shape& shape, Ns chunk_bytes)
      : network_(network),
        shape_(shape),
        chunk_bytes_(chunk_bytes),
        world_(static_cast<Ns>(shape.world)),
        others_(world_ - 1) {}

  Ns price(Algorithm algorithm, Op op, Ns bytes) const {
    if (world_ <= 1) return 0;
    switch (algorithm) {
      case Algorithm::ring: return op == Op::reduce || op == Op::broadcast ? chain(bytes) : ring(op, bytes, 1);
      case Algorithm::ring_bidirectional: return ring(op, bytes, 2);
      case Algorithm::direct: return direct(op, bytes);
      case Algorithm::tree: return op == Op::gather || op == Op::scatter ? binomial(bytes) : tree(op, bytes);
      case Algorithm::butterfly: return exchanges(shape_.butterfly, shard(bytes), op == Op::all_reduce ? 2 : 1);
      case Algorithm::bruck:
        return op == Op::all_to_all ? bruck_all_to_all(bytes) : exchanges(shape_.bruck, shard(bytes), 1);
      case Algorithm::hierarchical: break;
    }
    return std::numeric_limits<Ns>::max();
  }

 private:
  const LinkCost& link(Level level) const {
    return level == Level::host ? network_.host : level == Level::site ? network_.site : network_.wan;
  }
  Ns shard(Ns bytes) const { return parts_of(bytes, world_); }
  Ns first_chunk(Ns message) const { return std::min(message, chunk_bytes_); }
  Ns chunks(Ns message) const { return std::max<Ns>(1, parts_of(message, chunk_bytes_)); }
  // Of a processor, at one end.
  Ns work(Level level, Ns messages, Ns message) const {
    return plus(times(times(messages, chunks(message)), link(level).message_ns),
                ns_of(times(messages, message), link(level).cpu_byte_ps));
  }
  // One chunk from memory to memory.
  Ns hop(Level level, Ns chunk) const {
    return plus(plus(link(level).latency_ns, ns_of(chunk, link(level).byte_ps)), times(2, work(level, 1, chunk)));
  }
  // The busiest port's or uplink's time for messages of `bytes` each.
  Ns busiest(const Load& load, Ns bytes) const {
    Ns most = ns_of(times(load.port(), bytes), network_.host.byte_ps);
    for (const Load::Uplink& one : load.uplinks()) {
      most = std::max(most, plus(ns_of(times(one.site, bytes), network_.site.byte_ps),
                                 ns_of(times(one.wan, bytes), network_.wan.byte_ps)));
    }
    return most;
  }

  // Everyone sends and receives at once: `load` of messages of `bytes`, `sent` and `received` by one rank.
  // A processor is the bound (and one chunk must still get through) or a port is (and both ends still do one chunk).
  Ns round(Level worst, const Load& load, Ns bytes, Ns sent, Ns received) const {
    const Ns chunk = first_chunk(bytes);
    const Ns busy = plus(work(worst, plus(sent, received), bytes), ns_of(chunk, link(worst).byte_ps));
    const Ns wire = plus(busiest(load, bytes), times(2, work(worst, 1, chunk)));
    return plus(link(worst).latency_ns, std::max(busy, wire));
  }

  // Each shard goes round; every rank works on another one. Either the way round is the bound, or what one round takes
  // a port or a processor. `ways`: that many rings, with a part of each shard.
  Ns ring(Op op, Ns bytes, Ns ways) const {
    const Ns rounds = times(others_, op == Op::all_reduce ? 2 : 1);
    const Ns message = parts_of(shard(bytes), ways);
    const Ns chunk = first_chunk(message);
    const Level worst = shape_.ring.worst();
    Ns way_round = 0;
    for (std::size_t level = 0; level < kLevels; ++level) {
      const auto at = static_cast<Level>(level);
      // Both rings run at once: each hop of one waits for about one of the other's.
      const Ns other = times(ways - 1, times(2, work(at, 1, chunk)));
      way_round = plus(way_round, times(shape_.ring.edges[level], plus(hop(at, chunk), other)));
    }
    const Ns port = busiest(ways == 1 ? shape_.ring.load : shape_.two_rings.load, message);
    const Ns busy = times(times(2, ways), work(worst, 1, message));
    const Ns rest = busiest(shape_.ring.load, message - chunk);
    const Ns by_latency = plus(times(rounds, way_round) / world_, rest);
    const Ns by_rate = plus(times(rounds, std::max(port, busy)), hop(worst, 0));
    return std::max(by_latency, by_rate);
  }

  // From one rank to the next, chunk by chunk.
  Ns chain(Ns bytes) const {
    const Ns chunk = first_chunk(bytes);
    Ns way = 0;
    for (std::size_t level = 0; level < kLevels; ++level)
      way = plus(way, times(shape_.ring.edges[level], hop(static_cast<Level>(level), chunk)));
    const Ns pace = std::max(busiest(shape_.ring.load, chunk), times(2, work(shape_.ring.worst(), 1, chunk)));
    return plus(times(way, others_) / world_, times(chunks(bytes) - 1, pace));
  }

  Ns direct(Op op, Ns bytes) const {
    const Ns block = shard(bytes);
    switch (op) {
      case Op::all_reduce: return times(2, round(shape_.worst, shape_.pairs, block, others_, others_));
      case Op::all_gather:
      case Op::reduce_scatter:
      case Op::all_to_all: return round(shape_.worst, shape_.pairs, block, others_, others_);
      case Op::broadcast:
      case Op::reduce: return round(shape_.worst, shape_.fan, bytes, others_, 0);
      case Op::gather:
      case Op::scatter: return round(shape_.worst, shape_.fan, block, others_, 0);
      case Op::barrier: return times(shape_.bruck.size(), hop(shape_.worst, 0));
    }
    return std::numeric_limits<Ns>::max();
  }

  // Two trees with half of the bytes each. An inner rank serves two children one after the other.
  Ns tree(Op op, Ns bytes) const {
    const bool both_ways = op == Op::all_reduce;
    const Trees& trees = both_ways ? shape_.trees : shape_.rooted;
    const Ns half = parts_of(bytes, 2);
    const Ns chunk = first_chunk(half);
    const Ns rest = half - chunk;
    Ns way = 0;
    for (std::size_t level = 0; level < kLevels; ++level) {
      const auto at = static_cast<Level>(level);
      const Ns second_child = plus(ns_of(chunk, link(at).byte_ps), work(at, 1, chunk));
      way = plus(way, times(trees.path[level], plus(hop(at, chunk), second_child / 2)));
    }
    // Of a rank, in one direction: up to 2 messages in and 2 out.
    const Ns busy = rest > 0 ? work(trees.pattern.worst(), both_ways ? 8 : 4, rest) : 0;
    Ns wire = busiest(both_ways ? trees.pattern.both : trees.pattern.load, rest);
    // With a root outside, the second tree's half begins when that of the first is half through (as simulated).
    if (!both_ways && world_ > 3) wire = plus(wire, wire / 2);
    return plus(times(both_ways ? 2 : 1, way), std::max(busy, wire));
  }

  // Subtrees' blocks at once: the root's last child brings half of everything.
  Ns binomial(Ns bytes) const {
    Ns total = 0;
    Ns run = shard(bytes);
    for (std::size_t i = 0; i < shape_.bruck.size(); ++i) {
      const Exchange& one = shape_.bruck[i];
      const Ns message = times(run, one.shards);
      total = plus(total, round(one.pattern.worst(), unshared(one.pattern.worst()), message, 1, 0));
    }
    return total;
  }
  static Load unshared(Level level) {
    Load one;
    if (level == Level::host) one.add_port(1);
    if (level != Level::host) one.add_uplink({level == Level::site ? 1U : 0U, level == Level::wan ? 1U : 0U});
    return one;
  }

  Ns exchanges(const std::vector<Exchange>& rounds, Ns block, Ns passes) const {
    Ns total = 0;
    for (const Exchange& one : rounds)
      total = plus(total, round(one.pattern.worst(), one.pattern.load, times(block, one.shards), 1, 1));
    return times(passes, total);
  }

  // Each round moves every block whose distance has that bit: about half of them.
  Ns bruck_all_to_all(Ns bytes) const {
    Ns total = 0;
    for (const Exchange& one : shape_.bruck)
      total = plus(total, round(one.pattern.worst(), one.pattern.load, times(shard(bytes), world_ / 2), 1, 1));
    return total;
  }

  const Network& network_;
  const Shape& shape_;
  const Ns chunk_bytes_;
  const Ns world_;
  const Ns others_;
};

// As levels.hpp has it.
Algorithm inside(const std::optional<Algorithm>& wanted, Op op, std::int32_t size) {
  if (wanted) return *wanted;
  const bool rooted = op == Op::reduce || op == Op::broadcast || op == Op::gather || op == Op::scatter;
  return size <= 4 ? Algorithm::direct : rooted ? Algorithm::tree : Algorithm::butterfly;
}

Level worst_inside(const Network& network, const Hierarchy& hierarchy, std::size_t level) {
  // The first rank of each unit stands for it.
  const auto first_rank = [&](std::int32_t unit) {
    for (std::size_t below = level; below-- > 0;) unit = hierarchy.level(below).member(unit, 0);
    return static_cast<std::size_t>(unit);
  };
  const Partition& groups = hierarchy.level(level);
  Level worst = Level::host;
  for (std::int32_t group = 0; group < groups.groups(); ++group) {
    const std::size_t first = first_rank(groups.member(group, 0));
    for (std::int32_t i = 1; i < groups.size_of(group); ++i) {
      const std::size_t other = first_rank(groups.member(group, i));
      if (network.host_of[first] == network.host_of[other]) continue;
      if (network.site_of[first] != network.site_of[other]) return Level::wan;
      worst = Level::site;
    }
  }
  return worst;
}

}  // namespace

Costs::Costs(Network network, std::shared_ptr<const Hierarchy> hierarchy)
    : network_(std::move(network)),
      hierarchy_(std::move(hierarchy)),
      shape_(Shape::of(network_.host_of, network_.site_of)) {
  if (!hierarchy_) return;
  std::uint64_t sharing = 1;  // ranks of a host that work side by side
  for (std::size_t level = 0; level < hierarchy_->depth(); ++level) {
    const Partition& groups = hierarchy_->level(level);
    const bool top = level + 1 == hierarchy_->depth();
    const Level worst = worst_inside(network_, *hierarchy_, level);
    const std::int32_t owners = top                                               ? groups.largest()
                                : hierarchy_->algorithm(level) == Algorithm::tree ? 1
                                                                                  : groups.smallest();
    stages_.push_back({Shape::uniform(groups.largest(), worst, worst == Level::host ? 1 : sharing), owners});
    if (worst == Level::host) sharing *= static_cast<std::uint64_t>(owners);
  }
}

std::uint64_t Costs::of(Algorithm algorithm, const Request& request, std::size_t element_bytes,
                        std::size_t chunk_bytes) const {
  const Op op = request.op;
  const Ns bytes = known_bytes(request, element_bytes).value_or(0);
  if (algorithm != Algorithm::hierarchical) return Pricer(network_, shape_, chunk_bytes).price(algorithm, op, bytes);
  if (stages_.empty()) return std::numeric_limits<Ns>::max();  // these links were given without levels
  Ns total = 0;
  Ns part = bytes;
  Ns inside_rest = 0;
  Ns uplink_rest = 0;
  for (std::size_t level = 0; level < stages_.size(); ++level) {
    const Stage& stage = stages_[level];
    const auto price = [&](Op inner, Ns of_bytes) {
      return Pricer(network_, stage.shape, chunk_bytes)
          .price(inside(hierarchy_->algorithm(level), inner, stage.shape.world), inner, of_bytes);
    };
    const bool top = level + 1 == stages_.size();
    switch (op) {
      case Op::all_reduce:
        if (top) {
          total = plus(total, price(op, part));
        } else if (stage.owners == 1) {
          total = plus(total, plus(price(Op::reduce, part), price(Op::broadcast, part)));
        } else {
          total = plus(total, plus(price(Op::reduce_scatter, part), price(Op::all_gather, part)));
          part = parts_of(part, static_cast<Ns>(stage.owners));
        }
        break;
      case Op::reduce_scatter:
      case Op::all_gather:
        total = plus(total, price(op, part));
        if (!top) part = parts_of(part, static_cast<Ns>(stage.owners));
        break;
      case Op::gather:
      case Op::scatter: {
        // What the root's unit of this level holds.
        Ns held = bytes;
        for (std::size_t above = stages_.size() - 1; above > level; --above)
          held = parts_of(held, static_cast<Ns>(stages_[above].shape.world));
        total = plus(total, price(op, held));
        break;
      }
      default: {  // broadcast and reduce: chunks flow through all levels at once
        const Ns first = price(op, std::min<Ns>(part, chunk_bytes));
        const Ns whole = price(op, part);
        total = plus(total, first);
        // But those between hosts go through the same uplinks.
        Ns& rest = stage.shape.worst == Level::host ? inside_rest : uplink_rest;
        const Ns own_rest = whole > first ? whole - first : 0;
        rest = stage.shape.worst == Level::host ? std::max(rest, own_rest) : plus(rest, own_rest);
        break;
      }
    }
  }
  return plus(total, std::max(inside_rest, uplink_rest));
}

Algorithm Costs::best(const Request& request, std::size_t element_bytes, std::size_t chunk_bytes) const {
  if (request.op == Op::barrier || request.world <= 1 || !known_bytes(request, element_bytes)) return Algorithm::direct;
  std::optional<Algorithm> best;
  std::uint64_t least = 0;
  for (int i = kAlgorithmCount; i-- > 0;) {
    const auto one = static_cast<Algorithm>(i);
    if (!supports(one, request) || (one == Algorithm::direct && request.world > kDirectWorld)) continue;
    const std::uint64_t cost = of(one, request, element_bytes, chunk_bytes);
    if (!best || cost < least) least = cost, best = one;
  }
  return best.value_or(Algorithm::direct);
}

}  // namespace torch_iroh::collective
