// The formulas by which a group chooses, against the simulator of the real schedules.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "collective/chooser.hpp"
#include "collective/costs.hpp"
#include "collective/hierarchy.hpp"
#include "collective/planner.hpp"
#include "collective/simulator.hpp"
#include "support.hpp"

namespace torch_iroh::collective {
namespace {

using transport::Network;

struct World {
  std::int32_t ranks_per_host, hosts_per_site, sites;
  std::int32_t ranks() const { return ranks_per_host * hosts_per_site * sites; }
};

struct Wires {
  const char* name;
  transport::LinkCost site, wan;
  transport::LinkCost host;
};

// One way; picoseconds for a byte: 8000 is 1 Gbit/s. Within a host: as iroh on loopback, or as memory.
constexpr std::uint64_t kMessageNs = 50'000;
constexpr std::uint64_t kByteCpuPs = 1'000;
constexpr transport::LinkCost kLoopback = {50'000, 1'000, kMessageNs, kByteCpuPs};
constexpr transport::LinkCost kMemory = {2'000, 250, 5'000, 250};
const std::vector<Wires> kWires = {
    {"10 Gbit/s, 0.1 ms; 1 Gbit/s, 25 ms", {100'000, 800, 0, 0}, {25'000'000, 8'000, 0, 0}, kLoopback},
    {"1 Gbit/s, 0.5 ms; 100 Mbit/s, 10 ms", {500'000, 8'000, 0, 0}, {10'000'000, 80'000, 0, 0}, kLoopback},
    {"1 Gbit/s, 0.1 ms; 10 Mbit/s, 50 ms", {100'000, 8'000, 0, 0}, {50'000'000, 800'000, 0, 0}, kLoopback},
    {"1 Gbit/s, 0.2 ms; the same", {200'000, 8'000, 0, 0}, {200'000, 8'000, 0, 0}, kLoopback},
    {"1 Gbit/s, 0.2 ms; 100 Mbit/s, 10 ms; memory", {200'000, 8'000, 0, 0}, {10'000'000, 80'000, 0, 0}, kMemory},
};
const std::vector<World> kWorlds = {{1, 1, 2},  {1, 1, 3}, {1, 1, 5}, {1, 1, 8}, {1, 1, 13},
                                    {1, 1, 16}, {1, 4, 2}, {2, 1, 2}, {4, 1, 2}, {2, 2, 2},
                                    {4, 2, 2},  {8, 1, 4}, {1, 3, 3}, {1, 8, 4}, {1, 1, 64}};
const std::vector<std::uint64_t> kBytes = {256, 4 << 10, 64 << 10, 512 << 10, 4 << 20, 64 << 20};
const std::vector<Op> kCosted = {Op::all_reduce, Op::all_gather, Op::reduce_scatter, Op::broadcast,
                                 Op::reduce,     Op::gather,     Op::scatter,        Op::all_to_all};

Network network_of(const World& world, const Wires& wires) {
  Network network{wires.host, wires.site, wires.wan, {}, {}};
  for (transport::LinkCost* link : {&network.site, &network.wan})
    link->message_ns = kMessageNs, link->cpu_byte_ps = kByteCpuPs;
  for (std::int32_t rank = 0; rank < world.ranks(); ++rank) {
    network.host_of.push_back(rank / world.ranks_per_host);
    network.site_of.push_back(rank / world.ranks_per_host / world.hosts_per_site);
  }
  return network;
}

LinkModel model_of(const World& world, const Network& network) {
  const auto link = [&](const transport::LinkCost& cost) {
    return Link{.latency = static_cast<double>(cost.latency_ns) * 1e-9,
                .bandwidth = 1e12 / static_cast<double>(cost.byte_ps),
                .message_cost = static_cast<double>(cost.message_ns) * 1e-9,
                .byte_cost = static_cast<double>(cost.cpu_byte_ps) * 1e-12};
  };
  LinkModel model{link(network.host), link(network.site), link(network.wan), world.ranks_per_host,
                  world.hosts_per_site};
  model.one_uplink = true;
  return model;
}

std::shared_ptr<const Hierarchy> hierarchy_of(const World& world) {
  std::vector<std::int32_t> sizes;
  for (const std::int32_t size : {world.ranks_per_host, world.hosts_per_site, world.sites})
    if (size > 1) sizes.push_back(size);
  if (sizes.size() < 2) return nullptr;
  return std::make_shared<const Hierarchy>(Hierarchy::uniform(sizes));
}

Request request_of(Op op, const World& world, std::uint64_t floats) {
  Request request;
  request.op = op;
  request.world = world.ranks();
  request.hierarchy = hierarchy_of(world);
  const bool whole = op == Op::all_reduce || op == Op::broadcast || op == Op::reduce;
  if (whole) request.count = floats;
  if (!whole) {
    const std::uint64_t block = std::max<std::uint64_t>(1, floats / static_cast<std::uint64_t>(world.ranks()));
    request.blocks.assign(static_cast<std::size_t>(world.ranks()), block);
  }
  if (op == Op::all_to_all) request.send_blocks = request.blocks, request.even = true;
  return request;
}

std::string text_of(const World& world) {
  return std::to_string(world.sites) + " sites of " + std::to_string(world.hosts_per_site) + " hosts of " +
         std::to_string(world.ranks_per_host);
}

}  // namespace

TEST_CASE("costs: the choice is near the best of what the simulator finds") {
  const bool show = std::getenv("TEST_COSTS_SHOW") != nullptr;
  int cells = 0, off = 0;
  double worst = 1;
  for (const Wires& wires : kWires) {
    for (const World& world : kWorlds) {
      const Network network = network_of(world, wires);
      const Costs costs(network, hierarchy_of(world));
      for (const Op op : kCosted) {
        for (const std::uint64_t bytes : kBytes) {
          if (testing::kSanitized && bytes > (512 << 10)) continue;
          if (world.ranks() > 16 && bytes > (4 << 20)) continue;  // minutes of simulation
          Request request = request_of(op, world, bytes / 4);
          const Algorithm chosen = costs.best(request, 4, 256 << 10);
          double best = 0, mine = 0;
          std::string all;
          for (int i = 0; i < kAlgorithmCount; ++i) {
            request.algorithm = static_cast<Algorithm>(i);
            if (!supports(request.algorithm, request)) continue;
            const bool direct = request.algorithm == Algorithm::direct;
            if (direct && world.ranks() > kDirectWorld) continue;  // not to be chosen
            const double seconds = simulate(cast_everyone(request), 4, model_of(world, network)).seconds;
            if (best == 0 || seconds < best) best = seconds;
            if (request.algorithm == chosen) mine = seconds;
            char text[100];
            std::snprintf(text, sizeof text, " %s %.2f/%.2f", std::string(name_of(request.algorithm)).c_str(),
                          static_cast<double>(costs.of(request.algorithm, request, 4, 256 << 10)) * 1e-6,
                          seconds * 1e3);
            all += text;
          }
          ++cells;
          worst = std::max(worst, mine / best);
          if (mine <= 1.25 * best) continue;
          ++off;
          if (show)
            std::printf("%s | %s | %s %llu: %s %.2f times the best;%s\n", wires.name, text_of(world).c_str(),
                        std::string(name_of(op)).c_str(), static_cast<unsigned long long>(bytes),
                        std::string(name_of(chosen)).c_str(), mine / best, all.c_str());
        }
      }
    }
  }
  INFO(cells << " cells, " << off << " above 1.25, the worst " << worst);
  // Six, up to 1.39: operations through levels, whose overlap no formula here has (broadcast of 512 KiB to 4 hosts of
  // 8 ranks, reduce_scatter of 64 MiB among 3 sites of 3 hosts), and sizes where two algorithms change places.
  // TEST_COSTS_SHOW=1 lists them.
  CHECK(off * 200 <= cells);
  CHECK(worst < 1.5);
}

TEST_CASE("costs: the chunk is chosen with the algorithm, near the best that the simulator finds for any of both") {
  const std::vector<std::size_t> chunks = {64 << 10, kDefaultChunkBytes, 1 << 20};
  int cells = 0, other = 0;
  double worst = 1, gained = 1;
  for (const Wires& wires : kWires) {
    for (const World& world : {World{1, 1, 5}, World{1, 4, 2}, World{2, 2, 2}}) {
      const auto costs = std::make_shared<const Costs>(network_of(world, wires), hierarchy_of(world));
      const Chooser chooser({}, costs, kDefaultChunkBytes);
      for (const Op op : {Op::all_reduce, Op::broadcast, Op::all_gather}) {
        for (const std::uint64_t bytes : {64 << 10, 512 << 10, 4 << 20}) {
          CollectiveCall call;
          call.work.dtype = DType::float32;
          call.request = request_of(op, world, bytes / 4);
          chooser.choose(call);
          double best = 0, mine = 0, usual = 0;
          for (const std::size_t chunk : chunks) {
            LinkModel model = model_of(world, costs->network());
            model.chunk_bytes = chunk;
            Request request = call.request;
            for (int i = 0; i < kAlgorithmCount; ++i) {
              request.algorithm = static_cast<Algorithm>(i);
              if (!supports(request.algorithm, request)) continue;
              const double seconds = simulate(cast_everyone(request), 4, model).seconds;
              if (best == 0 || seconds < best) best = seconds;
              if (request.algorithm != call.request.algorithm) continue;
              if (chunk == call.chunk_bytes) mine = seconds;
              if (chunk == kDefaultChunkBytes) usual = seconds;
            }
          }
          ++cells;
          if (call.chunk_bytes != kDefaultChunkBytes) ++other;
          worst = std::max(worst, mine / best);
          gained = std::max(gained, usual / mine);
          CAPTURE(wires.name);
          CAPTURE(text_of(world));
          CAPTURE(name_of(op));
          CAPTURE(bytes);
          CAPTURE(call.chunk_bytes);
          CHECK(mine <= 1.4 * best);
        }
      }
    }
  }
  MESSAGE(cells << " cells, " << other << " with other chunks, the worst " << worst << " times the best, gained up to "
                << gained);
  CHECK(other > 0);
}

TEST_CASE("costs: a chunk that somebody asked for stays, and one for sizes that ranks do not know alike, too") {
  const World world{1, 4, 2};
  const auto costs = std::make_shared<const Costs>(network_of(world, kWires[1]), hierarchy_of(world));
  const auto chunk_of = [&](const Chooser& chooser, Request request) {
    CollectiveCall call;
    call.work.dtype = DType::float32;
    call.request = std::move(request);
    chooser.choose(call);
    return call.chunk_bytes;
  };
  const Request request = request_of(Op::all_reduce, world, 128 << 10);
  CHECK(chunk_of(Chooser({}, costs, 4096), request) == 4096);
  CHECK(chunk_of(Chooser(Pins::parse("all_reduce=ring/128KiB"), costs, kDefaultChunkBytes), request) == 128 << 10);
  Request uneven = request_of(Op::all_to_all, world, 128 << 10);
  uneven.even = false;
  CHECK(chunk_of(Chooser({}, costs, kDefaultChunkBytes), uneven) == kDefaultChunkBytes);
}

TEST_CASE("costs: a choice does not depend on the rank that makes it, and a pin goes before it") {
  const World world{2, 2, 2};
  const auto costs = std::make_shared<const Costs>(network_of(world, kWires[0]), hierarchy_of(world));
  for (const std::uint64_t bytes : kBytes) {
    CollectiveCall call;
    call.work.dtype = DType::float32;
    call.request = request_of(Op::all_reduce, world, bytes / 4);
    const Algorithm best = costs->best(call.request, 4, 256 << 10);
    for (call.request.rank = 0; call.request.rank < world.ranks(); ++call.request.rank) {
      Chooser(Pins(), costs, 256 << 10).choose(call);
      CHECK(call.request.algorithm == best);
      CHECK(call.chunk_bytes == 256 << 10);
      Chooser(Pins::parse("all_reduce=tree/64KiB"), costs, 256 << 10).choose(call);
      CHECK(call.request.algorithm == Algorithm::tree);
      CHECK(call.chunk_bytes == 64 << 10);
      Chooser(Pins::parse("all_reduce=auto/64KiB"), costs, 256 << 10).choose(call);
      CHECK(call.request.algorithm == costs->best(call.request, 4, 64 << 10));
    }
  }
}

TEST_CASE("costs: what there is one way for only stays") {
  const World world{2, 2, 2};
  const Costs costs(network_of(world, kWires[0]), hierarchy_of(world));
  CHECK(costs.best(request_of(Op::barrier, world, 0), 4, 256 << 10) == Algorithm::direct);
  Request uneven = request_of(Op::all_to_all, world, 1 << 20);
  uneven.even = false;
  CHECK(costs.best(uneven, 4, 256 << 10) == Algorithm::direct);
}

TEST_CASE("costs: ranks of two hosts in turns make a flat ring dear") {
  Network network = network_of({2, 1, 2}, kWires[1]);
  const Costs in_order(network, nullptr);
  network.host_of = network.site_of = {0, 1, 0, 1};
  const Costs in_turns(network, nullptr);
  Request request;
  request.op = Op::all_reduce;
  request.world = 4;
  request.count = 4 << 20;
  // Both ranks of a host send through its port, in place of one.
  const auto ring = [&](const Costs& costs) { return costs.of(Algorithm::ring, request, 4, 256 << 10); };
  CHECK(ring(in_turns) > ring(in_order) * 19 / 10);
}

TEST_CASE("costs: absurd links and sizes are the largest number, not a small one") {
  Network network = network_of({1, 1, 8}, kWires[0]);
  network.wan = {~std::uint64_t{0}, ~std::uint64_t{0}, 0, 0};
  const Costs costs(network, nullptr);
  for (const Op op : kCosted) {
    Request request = request_of(op, {1, 1, 8}, std::uint64_t{1} << 45);
    for (int i = 0; i < kAlgorithmCount; ++i) {
      const auto one = static_cast<Algorithm>(i);
      if (supports(one, request)) CHECK(costs.of(one, request, 4, 256 << 10) > std::uint64_t{1} << 60);
    }
    CHECK(supports(costs.best(request, 4, 256 << 10), request));
  }
}

TEST_CASE("costs: every world has a choice that can be run") {
  for (std::int32_t hosts = 1; hosts <= 20; ++hosts) {
    for (std::int32_t ranks = 1; ranks <= 3; ++ranks) {
      const World world{ranks, 1, hosts};
      const Costs costs(network_of(world, kWires[2]), hierarchy_of(world));
      for (const Op op : kCosted) {
        for (const std::uint64_t bytes : {0U, 4U, 100'000U}) {
          const Request request = request_of(op, world, bytes);
          CHECK(supports(costs.best(request, 4, 256 << 10), request));
        }
      }
    }
  }
}

}  // namespace torch_iroh::collective
