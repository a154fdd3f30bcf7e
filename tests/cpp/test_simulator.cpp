// The simulator's clock against times worked out by hand, and its short cuts against simulating everyone.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collective/hierarchy.hpp"
#include "collective/simulator.hpp"
#include "support.hpp"

namespace {

using namespace torch_iroh::collective;

constexpr double kMega = 1e6;

Request request_of(Op op, Algorithm algorithm, std::int32_t world, std::uint64_t count) {
  Request request;
  request.op = op;
  request.algorithm = algorithm;
  request.world = world;
  request.count = count;
  return request;
}

// One rank per host, one host per site: every link is `link`.
LinkModel flat(Link link) {
  LinkModel model;
  model.wan = link;
  return model;
}

Simulation all_of(const Request& request, const LinkModel& model) {
  return simulate(cast_everyone(request), 1, model);
}

TEST_CASE("one message takes processor, latency and bytes over bandwidth, at each end once") {
  const Request request = request_of(Op::broadcast, Algorithm::direct, 2, 100'000);
  const Simulation found =
      all_of(request, flat({.latency = 0.05, .bandwidth = kMega, .message_cost = 0.002, .byte_cost = 1e-8}));
  // 0.003 at the sender, 0.1 on the way, 0.05 late, 0.003 at the receiver.
  CHECK(found.finish[0] == doctest::Approx(0.103));
  CHECK(found.finish[1] == doctest::Approx(0.156));
  CHECK(found.seconds == found.finish[1]);
  CHECK(found.depth == 1);
  CHECK(found.fan_out == 1);
  CHECK(found.messages == 1);
  CHECK(found.bytes == 100'000);
}

TEST_CASE("a port sends one chunk after the other, and receives one after the other") {
  const LinkModel model = flat({.latency = 0.05, .bandwidth = kMega});
  const Simulation out = all_of(request_of(Op::broadcast, Algorithm::direct, 3, 100'000), model);
  CHECK(out.finish[1] == doctest::Approx(0.15));
  CHECK(out.finish[2] == doctest::Approx(0.25));
  const Simulation in = all_of(request_of(Op::reduce, Algorithm::direct, 3, 100'000), model);
  CHECK(in.finish[0] == doctest::Approx(0.25));
  CHECK(in.finish[1] == doctest::Approx(0.1));
  CHECK(in.finish[2] == doctest::Approx(0.1));
}

TEST_CASE("chunks make a chain a pipeline") {
  LinkModel model = flat({.latency = 0.05, .bandwidth = kMega});
  const Request request = request_of(Op::broadcast, Algorithm::ring, 3, 100'000);
  CHECK(all_of(request, model).seconds == doctest::Approx(2 * 0.15));  // one chunk
  model.chunk_bytes = 10'000;
  CHECK(all_of(request, model).seconds == doctest::Approx(0.1 + 0.05 + 0.01 + 0.05));
}

TEST_CASE("the processor works while the port sends, and is the bound when it is slower") {
  LinkModel model = flat({.bandwidth = kMega, .byte_cost = 4e-6});
  model.chunk_bytes = 10'000;
  // Ten chunks of 40 ms processor and 10 ms port: the receiver ends the last one 50 ms after the sender's processor.
  CHECK(all_of(request_of(Op::broadcast, Algorithm::direct, 2, 100'000), model).seconds == doctest::Approx(0.45));
}

TEST_CASE("what is done to the data costs its bytes") {
  LinkModel model = flat({.bandwidth = kMega});
  model.local_byte_cost = 1e-7;
  CHECK(all_of(request_of(Op::reduce, Algorithm::direct, 2, 100'000), model).finish[0] == doctest::Approx(0.11));
}

TEST_CASE("a ring takes 2(N-1) rounds of latency and a shard's time") {
  for (const std::int32_t world : {2, 3, 8, 17}) {
    const std::uint64_t shard = 10'000;
    const Request request =
        request_of(Op::all_reduce, Algorithm::ring, world, shard * static_cast<std::uint64_t>(world));
    const Simulation found = all_of(request, flat({.latency = 0.01, .bandwidth = kMega}));
    CHECK(found.seconds == doctest::Approx(2 * (world - 1) * (0.01 + 0.01)).epsilon(0.01));
    CHECK(found.depth == 2 * static_cast<std::uint32_t>(world - 1));
    CHECK(found.messages == 2 * static_cast<std::uint64_t>(world - 1));
    CHECK(found.bytes == 2 * shard * static_cast<std::uint64_t>(world - 1));
  }
}

TEST_CASE("a level's links carry what stays within it, and ranks of a host share the port that leaves it") {
  LinkModel model;
  model.ranks_per_host = 2;
  model.hosts_per_site = 2;
  model.host = {.latency = 0.001};
  model.site = {.latency = 0.01, .bandwidth = kMega};
  model.wan = {.latency = 0.1, .bandwidth = kMega};
  CHECK(model.level_between(0, 1) == Level::host);
  CHECK(model.level_between(1, 2) == Level::site);
  CHECK(model.level_between(3, 4) == Level::wan);
  const Simulation found = all_of(request_of(Op::broadcast, Algorithm::direct, 5, 100'000), model);
  CHECK(found.finish[1] == doctest::Approx(0.001));
  CHECK(found.finish[2] == doctest::Approx(0.11));
  CHECK(found.finish[3] == doctest::Approx(0.21));
  CHECK(found.finish[4] == doctest::Approx(0.2));  // the wan's port is another

  // Ranks 0 and 1 both send to a rank of the other host: one port.
  const Simulation in = all_of(request_of(Op::reduce, Algorithm::direct, 4, 100'000), model);
  CHECK(in.finish[0] == doctest::Approx(0.21));
  CHECK(in.finish[3] == doctest::Approx(0.2));
}

TEST_CASE("jitter is late by less than its limit, and the same for the same seed") {
  const Request request = request_of(Op::all_reduce, Algorithm::ring, 8, 80'000);
  LinkModel model = flat({.latency = 0.01, .bandwidth = kMega, .jitter = 0.005});
  const Simulation first = all_of(request, model);
  CHECK(first.seconds > 14 * 0.02);
  CHECK(first.seconds < 14 * 0.025);
  CHECK(all_of(request, model).finish == first.finish);
  model.seed = 2;
  CHECK(all_of(request, model).finish != first.finish);
}

TEST_CASE("one period of a world is as good as everyone") {
  LinkModel model = flat({.latency = 0.003, .bandwidth = kMega, .message_cost = 1e-4, .byte_cost = 1e-7});
  model.chunk_bytes = 1000;
  model.host = {.latency = 1e-4, .bandwidth = 10 * kMega};
  for (const Op op : {Op::all_reduce, Op::barrier}) {
    for (const Algorithm algorithm : {Algorithm::ring, Algorithm::direct}) {
      for (const std::int32_t world : {2, 3, 8, 12}) {
        model.ranks_per_host = 1;
        const Request request = request_of(op, algorithm, world, 2500 * static_cast<std::uint64_t>(world));
        const Simulation everyone = all_of(request, model);
        Cast cast;
        REQUIRE(cast_period(request, model, cast));
        CHECK(cast.players.size() == 1);
        const Simulation one = simulate(cast, 1, model);
        CHECK(one.seconds == doctest::Approx(everyone.seconds).epsilon(1e-9));
        CHECK(one.messages == everyone.messages);
        CHECK(one.bytes == everyone.bytes);
        CHECK(one.depth == everyone.depth);
      }
    }
  }
  model.ranks_per_host = 4;
  const Request request = request_of(Op::all_reduce, Algorithm::ring, 12, 30'000);
  Cast cast;
  REQUIRE(cast_period(request, model, cast));
  CHECK(cast.players.size() == 4);
  const Simulation everyone = all_of(request, model);
  CHECK(simulate(cast, 1, model).seconds == doctest::Approx(everyone.seconds).epsilon(1e-9));
}

TEST_CASE("no period where ranks differ or where there is chance") {
  Cast cast;
  CHECK_FALSE(cast_period(request_of(Op::all_reduce, Algorithm::ring, 8, 81), flat({}), cast));
  CHECK_FALSE(cast_period(request_of(Op::broadcast, Algorithm::ring, 8, 80), flat({}), cast));
  CHECK_FALSE(cast_period(request_of(Op::all_reduce, Algorithm::ring, 8, 80), flat({.jitter = 1}), cast));
}

Cast kinds(const Request& request, const LinkModel& model, bool last) {
  static Kinds found;  // of the last call: a cast looks things up in it
  found = kinds_of(request, model, 1000);
  return cast_kinds(request, model, found, last);
}

TEST_CASE("a host for each kind of host: the last of a kind is the last to be served") {
  LinkModel model = flat({.latency = 0.01, .bandwidth = kMega});
  for (const Op op : {Op::broadcast, Op::reduce}) {
    const Request request = request_of(op, Algorithm::direct, 33, 10'000);
    const Cast cast = kinds(request, model, true);
    CHECK(cast.players.size() == 2);
    CHECK(cast.players[0].stands_for == 1);
    CHECK(cast.players[1].stands_for == 32);
    CHECK(simulate(cast, 1, model).seconds == doctest::Approx(all_of(request, model).seconds));
  }
  CHECK_THROWS_AS(kinds_of(request_of(Op::broadcast, Algorithm::direct, 33, 10'000), model, 1), TooLarge);
  // A chain's middle looks the same from everywhere within reach: one that stands for all would wait for itself.
  const Request chain = request_of(Op::broadcast, Algorithm::ring, 1000, 10'000);
  CHECK_THROWS_AS(simulate(kinds(chain, model, true), 1, model), TooLarge);
  const Request ring = request_of(Op::all_reduce, Algorithm::ring, 12, 12'000);
  CHECK(kinds(ring, model, false).players.size() == 1);
  model.ranks_per_host = 4;
  const Cast cast = kinds(ring, model, false);
  CHECK(cast.players.size() == 4);
  CHECK(simulate(cast, 1, model).seconds == doctest::Approx(all_of(ring, model).seconds));
}

TEST_CASE("a sample of a world of levels is near everyone") {
  LinkModel model = flat({.latency = 0.01, .bandwidth = kMega, .message_cost = 1e-4, .byte_cost = 1e-7});
  model.chunk_bytes = 4000;
  for (const std::vector<std::int32_t>& sizes : {std::vector<std::int32_t>{1000}, {1023}, {8, 5, 25}}) {
    Request request = request_of(Op::all_reduce, Algorithm::hierarchical, 1, 0);
    request.hierarchy = std::make_shared<const Hierarchy>(Hierarchy::uniform(sizes));
    request.world = request.hierarchy->world();
    request.count = 100 * static_cast<std::uint64_t>(request.world);
    const Simulation everyone = all_of(request, model);
    const Kinds found = kinds_of(request, model, 200);
    const Cast cast = cast_kinds(request, model, found, true);
    CHECK(cast.players.size() <= 200);
    const Simulation sample = simulate(cast, 1, model);
    MESSAGE(cast.players.size(), " ", sample.seconds / everyone.seconds);
    CHECK(sample.seconds == doctest::Approx(everyone.seconds).epsilon(0.1));
    CHECK(sample.depth == everyone.depth);
    CHECK(sample.fan_out == everyone.fan_out);
  }
}

TEST_CASE("too much is refused with the bound") {
  std::string text;
  try {
    LinkModel model = flat({});
    model.chunk_bytes = 1;
    simulate(cast_everyone(request_of(Op::broadcast, Algorithm::ring, 2, kMostPieces)), 1, model);
  } catch (const TooLarge& error) {
    text = error.what();
  }
  CHECK(torch_iroh::testing::contains(text, std::to_string(kMostPieces)));
  LinkModel levels;
  levels.ranks_per_host = 8;
  levels.hosts_per_site = 125;
  CHECK_THROWS_AS(predict(request_of(Op::all_reduce, Algorithm::ring, 10'000, 10'000), 4, levels), TooLarge);
}

TEST_CASE("a prediction says how it was made") {
  const LinkModel model = flat({.latency = 0.01, .bandwidth = kMega});
  CHECK(predict(request_of(Op::all_reduce, Algorithm::ring, 8, 80), 4, model).method == Method::everyone);
  const Prediction large = predict(request_of(Op::all_reduce, Algorithm::ring, 1000, 999'999), 4, model);
  CHECK(large.method == Method::period);
  CHECK(large.seconds == doctest::Approx(2 * 999 * (0.01 + 4e-3)).epsilon(0.01));
}

}  // namespace
