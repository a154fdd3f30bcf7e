#include "collective/shape.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "collective/two_trees.hpp"

namespace torch_iroh::collective {
namespace {

Level worst_of(const ByLevel& counts) {
  if (counts[2] > 0) return Level::wan;
  return counts[1] > 0 ? Level::site : Level::host;
}

// Distances and shards of the rounds of butterfly.cpp and bruck.cpp.
std::vector<std::pair<std::int32_t, std::uint64_t>> butterfly_rounds(std::int32_t world) {
  std::vector<std::pair<std::int32_t, std::uint64_t>> rounds;
  for (std::int32_t reach = world; reach > 1;) {
    const std::int32_t next = reach / 2 + reach % 2;
    rounds.emplace_back(next, static_cast<std::uint64_t>(reach - next));
    reach = next;
  }
  return rounds;
}

std::vector<std::pair<std::int32_t, std::uint64_t>> bruck_rounds(std::int32_t world) {
  std::vector<std::pair<std::int32_t, std::uint64_t>> rounds;
  for (std::int64_t distance = 1; distance < world; distance *= 2)
    rounds.emplace_back(static_cast<std::int32_t>(distance),
                        static_cast<std::uint64_t>(std::min<std::int64_t>(distance, world - distance)));
  return rounds;
}

class Places {
 public:
  Places(const std::vector<std::int32_t>& host_of, const std::vector<std::int32_t>& site_of)
      : host_of_(host_of), site_of_(site_of) {}

  std::size_t world() const { return host_of_.size(); }

  Level between(std::size_t a, std::size_t b) const {
    if (host_of_[a] == host_of_[b]) return Level::host;
    return site_of_[a] == site_of_[b] ? Level::site : Level::wan;
  }

  // `targets(rank, send)` calls send(target) for each message of that rank.
  template <typename Targets>
  Pattern pattern(const Targets& targets) const {
    Pattern pattern;
    std::map<std::pair<std::size_t, std::size_t>, std::pair<std::uint64_t, std::uint64_t>> ports;  // out, in
    for (std::size_t rank = 0; rank < world(); ++rank) {
      targets(rank, [&](std::size_t target) {
        const auto level = static_cast<std::size_t>(between(rank, target));
        ++pattern.edges[level];
        ++ports[{level, port_of(rank, level)}].first;
        ++ports[{level, port_of(target, level)}].second;
      });
    }
    for (const auto& [port, counts] : ports) {
      const auto& [out, in] = counts;
      pattern.port[port.first] = std::max({pattern.port[port.first], out, in});
      pattern.both[port.first] = std::max(pattern.both[port.first], out + in);
    }
    return pattern;
  }

  Pattern shifted(std::size_t by) const {
    return pattern([&](std::size_t rank, const auto& send) { send((rank + by) % world()); });
  }

  void count_pairs(Shape& shape) const {
    std::map<std::int32_t, std::uint64_t> of_host, of_site;
    std::map<std::int32_t, std::int32_t> site_of_host;
    for (std::size_t rank = 0; rank < world(); ++rank) {
      ++of_host[host_of_[rank]];
      ++of_site[site_of_[rank]];
      site_of_host[host_of_[rank]] = site_of_[rank];
    }
    for (const auto& [host, ranks] : of_host) {
      const std::uint64_t near = of_site[site_of_host[host]];
      const ByLevel fan = {ranks - 1, near - ranks, world() - near};
      for (std::size_t level = 0; level < kLevels; ++level) {
        shape.fan[level] = std::max(shape.fan[level], fan[level]);
        shape.pairs[level] = std::max(shape.pairs[level], fan[level] * (level == 0 ? 1 : ranks));
      }
    }
  }

  // `parent_of(rank, tree)`: none is -1.
  template <typename ParentOf>
  Trees trees(const ParentOf& parent_of) const {
    Trees trees;
    for (std::int32_t tree = 0; tree < 2; ++tree) {
      for (std::size_t rank = 0; rank < world(); ++rank) {
        ByLevel path{};
        auto at = static_cast<std::int32_t>(rank);
        for (std::int32_t parent = parent_of(at, tree); parent >= 0; parent = parent_of(at, tree)) {
          ++path[static_cast<std::size_t>(between(static_cast<std::size_t>(at), static_cast<std::size_t>(parent)))];
          at = parent;
        }
        // Most links of the slowest level first.
        if (std::lexicographical_compare(trees.path.rbegin(), trees.path.rend(), path.rbegin(), path.rend()))
          trees.path = path;
      }
    }
    trees.pattern = pattern([&](std::size_t rank, const auto& send) {
      for (std::int32_t tree = 0; tree < 2; ++tree) {
        const std::int32_t parent = parent_of(static_cast<std::int32_t>(rank), tree);
        if (parent >= 0) send(static_cast<std::size_t>(parent));
      }
    });
    return trees;
  }

 private:
  std::size_t port_of(std::size_t rank, std::size_t level) const {
    return level == 0 ? rank : static_cast<std::size_t>(host_of_[rank]);
  }

  const std::vector<std::int32_t>& host_of_;
  const std::vector<std::int32_t>& site_of_;
};

}  // namespace

Level Pattern::worst() const {
  return worst_of(edges);
}

Level Shape::worst() const {
  return worst_of(pairs);
}

Shape Shape::of(const std::vector<std::int32_t>& host_of, const std::vector<std::int32_t>& site_of) {
  const Places places(host_of, site_of);
  const std::size_t world = places.world();
  Shape shape;
  shape.world = static_cast<std::int32_t>(world);
  if (world <= 1) return shape;
  shape.ring = places.shifted(1);
  shape.two_rings = places.pattern([&](std::size_t rank, const auto& send) {
    send((rank + 1) % world);
    send((rank + world - 1) % world);
  });
  const bool power_of_two = (world & (world - 1)) == 0;
  for (const auto& [distance, shards] : butterfly_rounds(shape.world)) {
    const auto bit = static_cast<std::size_t>(distance);
    const auto partner = [&](std::size_t rank, const auto& send) { send(rank ^ bit); };
    shape.butterfly.push_back({power_of_two ? places.pattern(partner) : places.shifted(bit), shards});
  }
  for (const auto& [distance, shards] : bruck_rounds(shape.world))
    shape.bruck.push_back({places.shifted(world - static_cast<std::size_t>(distance)), shards});
  places.count_pairs(shape);
  shape.trees =
      places.trees([&](std::int32_t rank, std::int32_t tree) { return tree_node_of(rank, shape.world, tree).parent; });
  shape.rooted = places.trees([&](std::int32_t rank, std::int32_t tree) {
    if (rank == 0) return -1;
    return tree_node_of(rank - 1, shape.world - 1, tree).parent + 1;  // the root where there is none
  });
  return shape;
}

Shape Shape::uniform(std::int32_t world, Level level, std::uint64_t sharing) {
  std::vector<std::int32_t> apart, together(static_cast<std::size_t>(world), 0);
  for (std::int32_t rank = 0; rank < world; ++rank) apart.push_back(rank);
  Shape shape = of(level == Level::host ? together : apart, level == Level::wan ? apart : together);
  const auto share = [sharing](ByLevel& counts) {
    for (std::uint64_t& count : counts) count *= sharing;
  };
  const auto share_all = [&](Pattern& pattern) {
    share(pattern.port);
    share(pattern.both);
  };
  share_all(shape.ring);
  share_all(shape.two_rings);
  for (Exchange& one : shape.butterfly) share_all(one.pattern);
  for (Exchange& one : shape.bruck) share_all(one.pattern);
  share(shape.pairs);
  share_all(shape.trees.pattern);
  return shape;
}

}  // namespace torch_iroh::collective
