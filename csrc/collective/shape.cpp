#include "collective/shape.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "collective/two_trees.hpp"

namespace torch_iroh::collective {
namespace {

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
    struct Counts {
      ByLevel out{}, in{};
    };
    std::map<std::size_t, Counts> of_rank, of_host;
    for (std::size_t rank = 0; rank < world(); ++rank) {
      targets(rank, [&](std::size_t target) {
        const auto level = static_cast<std::size_t>(between(rank, target));
        ++pattern.edges[level];
        ++(level == 0 ? of_rank[rank] : of_host[host(rank)]).out[level];
        ++(level == 0 ? of_rank[target] : of_host[host(target)]).in[level];
      });
    }
    for (const auto& [rank, counts] : of_rank) {
      pattern.load.add_port(std::max(counts.out[0], counts.in[0]));
      pattern.both.add_port(counts.out[0] + counts.in[0]);
    }
    for (const auto& [host, counts] : of_host) {
      pattern.load.add_uplink({counts.out[1], counts.out[2]});
      pattern.load.add_uplink({counts.in[1], counts.in[2]});
      pattern.both.add_uplink({counts.out[1] + counts.in[1], counts.out[2] + counts.in[2]});
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
      shape.fan.add_port(ranks - 1);
      shape.fan.add_uplink({near - ranks, world() - near});
      shape.pairs.add_port(ranks - 1);
      shape.pairs.add_uplink({(near - ranks) * ranks, (world() - near) * ranks});
      if (near > ranks) shape.worst = std::max(shape.worst, Level::site);
      if (world() > near) shape.worst = Level::wan;
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
  std::size_t host(std::size_t rank) const { return static_cast<std::size_t>(host_of_[rank]); }

  const std::vector<std::int32_t>& host_of_;
  const std::vector<std::int32_t>& site_of_;
};

}  // namespace

void Load::add_uplink(const Uplink& one) {
  const auto covers = [](const Uplink& a, const Uplink& b) { return a.site >= b.site && a.wan >= b.wan; };
  if (one.site + one.wan == 0) return;
  if (std::any_of(uplinks_.begin(), uplinks_.end(), [&](const Uplink& known) { return covers(known, one); })) return;
  std::erase_if(uplinks_, [&](const Uplink& known) { return covers(one, known); });
  uplinks_.push_back(one);
}

void Load::share(std::uint64_t ranks) {
  for (Uplink& one : uplinks_) one = {one.site * ranks, one.wan * ranks};
}

Level Pattern::worst() const {
  if (edges[2] > 0) return Level::wan;
  return edges[1] > 0 ? Level::site : Level::host;
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
  const auto share_all = [sharing](Pattern& pattern) {
    pattern.load.share(sharing);
    pattern.both.share(sharing);
  };
  share_all(shape.ring);
  share_all(shape.two_rings);
  for (Exchange& one : shape.butterfly) share_all(one.pattern);
  for (Exchange& one : shape.bruck) share_all(one.pattern);
  shape.pairs.share(sharing);
  share_all(shape.trees.pattern);
  return shape;
}

}  // namespace torch_iroh::collective
