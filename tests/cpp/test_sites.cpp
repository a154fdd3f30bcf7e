// Sites from what hosts measured, links from the same, and what rank 0 publishes of both.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "base/error.hpp"
#include "support.hpp"
#include "transport/known_networks.hpp"
#include "transport/network.hpp"
#include "transport/probe_messages.hpp"
#include "transport/sites.hpp"

namespace torch_iroh::transport {
namespace {

using Sites = std::vector<std::int32_t>;
using RttUs = std::function<std::uint32_t(std::int32_t, std::int32_t)>;
using Relayed = std::function<bool(std::int32_t, std::int32_t)>;

struct Result {
  Sites sites;
  int rounds = 0;
  std::size_t most_targets = 0;  // of one host, in all rounds
  std::size_t landmarks = 0;
};

Result find(
    const std::vector<std::string>& hints, const RttUs& rtt,
    const Relayed& relayed = [](std::int32_t, std::int32_t) { return false; }) {
  SiteFinder finder(hints);
  Result result;
  std::vector<std::size_t> asked(hints.size());
  std::set<std::int32_t> landmarks;
  while (!finder.landmarks().empty()) {
    REQUIRE(++result.rounds <= static_cast<int>(kMostLandmarks));
    std::vector<Reach> found;
    for (std::size_t i = 0; i < hints.size(); ++i) {
      const auto host = static_cast<std::int32_t>(i);
      if (!finder.asks(host)) continue;
      for (const std::int32_t target : targets_of(host, finder.landmarks())) {
        found.push_back({host, target, rtt(host, target), relayed(host, target)});
        ++asked[i];
      }
    }
    landmarks.insert(finder.landmarks().begin(), finder.landmarks().end());
    finder.add(found);
  }
  result.sites = finder.sites();
  result.most_targets = asked.empty() ? 0 : *std::max_element(asked.begin(), asked.end());
  result.landmarks = landmarks.size();
  return result;
}

std::vector<std::string> no_hints(std::size_t hosts) {
  return std::vector<std::string>(hosts);
}

// 0.2 ms within a site, 30 ms between.
RttUs by_site(const Sites& sites) {
  return [sites](std::int32_t a, std::int32_t b) {
    return sites[static_cast<std::size_t>(a)] == sites[static_cast<std::size_t>(b)] ? 200U : 30'000U;
  };
}

template <typename Call>
void expect_refused(Call call, const std::string& part) {
  try {
    call();
    FAIL_CHECK("accepted; wanted a refusal with: " << part);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::protocol);
    CHECK_MESSAGE(testing::contains(error.what(), part), std::string(error.what()));
  }
}

}  // namespace

TEST_CASE("sites: are found whatever the order of the hosts") {
  const std::vector<Sites> worlds = {{0},
                                     {0, 0},
                                     {0, 1},
                                     {0, 1, 0, 1},
                                     {0, 0, 1, 1},
                                     {0, 1, 1, 1, 1, 1, 1, 1, 1},
                                     {0, 0, 0, 0, 0, 0, 0, 1},
                                     {0, 1, 2, 3, 4, 5, 6},
                                     {0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 3, 4, 0, 2}};
  for (const Sites& sites : worlds) {
    const Result found = find(no_hints(sites.size()), by_site(sites));
    CHECK(found.sites == sites);
  }
}

TEST_CASE("sites: random worlds, up to the number of landmarks") {
  std::mt19937_64 random(5);
  for (int round = 0; round < 300; ++round) {
    const std::size_t hosts = 1 + random() % 64;
    const std::size_t count = 1 + random() % kMostLandmarks;
    Sites sites;
    std::vector<std::int32_t> numbers(count, -1);
    std::int32_t next = 0;
    for (std::size_t host = 0; host < hosts; ++host) {
      std::int32_t& number = numbers[random() % count];
      if (number < 0) number = next++;
      sites.push_back(number);
    }
    const Result found = find(no_hints(hosts), by_site(sites));
    if (found.sites != sites) FAIL("seed 5 round " << round);
    CHECK(found.most_targets <= 4 * kMostLandmarks);
  }
}

TEST_CASE("sites: a thousand hosts of two sites measure to a handful") {
  Sites sites;
  for (int host = 0; host < 1000; ++host) sites.push_back(host < 700 ? 0 : 1);
  const Result found = find(no_hints(1000), by_site(sites));
  CHECK(found.sites == sites);
  CHECK(found.rounds <= 2);
  CHECK(found.most_targets <= 4);
}

TEST_CASE("sites: beyond the landmarks hosts are on their own") {
  Sites sites;
  for (std::int32_t host = 0; host < 40; ++host) sites.push_back(host);
  const Result found = find(no_hints(40), by_site(sites));
  CHECK(found.sites == sites);
  CHECK(found.landmarks <= kMostLandmarks);
}

TEST_CASE("sites: 3 ms is still the same site, more is not; of two near landmarks the nearer counts") {
  CHECK(find(no_hints(2), [](auto, auto) { return kSiteRttUs; }).sites == Sites{0, 0});
  CHECK(find(no_hints(2), [](auto, auto) { return kSiteRttUs + 1; }).sites == Sites{0, 1});
  // 0 and 1 are 4 ms apart; 2 is 2.5 ms from 0 and 1.5 ms from 1.
  const RttUs between = [](std::int32_t a, std::int32_t b) { return a + b == 1 ? 4000U : a + b == 2 ? 2500U : 1500U; };
  CHECK(find(no_hints(3), between).sites == Sites{0, 1, 1});
}

TEST_CASE("sites: a hint goes before what was measured, for its host") {
  const RttUs near = [](auto, auto) { return 100U; };
  const RttUs far = [](auto, auto) { return 50'000U; };
  const Result named = find({"a", "b", "a", "b"}, near);
  CHECK(named.sites == Sites{0, 1, 0, 1});
  CHECK(named.rounds == 0);  // nothing to measure for that
  CHECK(find({"a", "a", "a"}, far).sites == Sites{0, 0, 0});
  // Hosts without one join the site whose landmark is near, or make their own.
  CHECK(find({"a", "b", "", ""}, by_site({0, 1, 1, 2})).sites == Sites{0, 1, 1, 2});
  CHECK(find({"", "a", "", "a"}, by_site({0, 1, 0, 1})).sites == Sites{0, 1, 0, 1});
}

TEST_CASE("sites: more names than landmarks") {
  std::vector<std::string> hints;
  Sites sites;
  for (std::int32_t host = 0; host < 30; ++host) hints.push_back("site " + std::to_string(host)), sites.push_back(host);
  CHECK(find(hints, by_site(sites)).sites == sites);
  hints.emplace_back();
  sites.push_back(30);
  CHECK(find(hints, by_site(sites)).sites == sites);
}

TEST_CASE("sites: a host that is reached through a relay only is a site of its own and no landmark") {
  const RttUs near = [](auto, auto) { return 500U; };
  for (std::int32_t leaf = 0; leaf < 6; ++leaf) {
    const Relayed relayed = [leaf](std::int32_t a, std::int32_t b) { return a == leaf || b == leaf; };
    const Sites found = find(no_hints(6), near, relayed).sites;
    for (std::int32_t host = 0; host < 6; ++host) {
      for (std::int32_t other = 0; other < host; ++other) {
        INFO(leaf << ": " << other << " and " << host);
        const bool together = found[static_cast<std::size_t>(host)] == found[static_cast<std::size_t>(other)];
        CHECK(together == (host != leaf && other != leaf));
      }
    }
  }
  // All by relay: all leaves.
  CHECK(find(no_hints(5), near, [](auto, auto) { return true; }).sites == Sites{0, 1, 2, 3, 4});
  // One relayed pair of many does not make a leaf.
  const Relayed one_pair = [](std::int32_t a, std::int32_t b) { return a + b == 1; };
  const Sites found = find(no_hints(4), near, one_pair).sites;
  CHECK(found[0] != found[1]);
}

TEST_CASE("rate: the best window counts, and what cannot be told is 0") {
  CHECK(best_rate({}) == 0);
  CHECK(best_rate({{5, 1000}}) == 0);
  // 1000 bytes each millisecond.
  std::vector<Arrival> steady;
  for (std::uint64_t ms = 0; ms < 100; ++ms) steady.push_back({ms * 1'000'000, 1000});
  CHECK(best_rate(steady) == 1'000'000);
  // Twice as fast from the middle on: slow start must not count.
  std::vector<Arrival> faster = steady;
  for (std::uint64_t i = 0; i < 100; ++i) faster.push_back({100'000'000 + i * 500'000, 1000});
  CHECK(best_rate(faster) == doctest::Approx(2e6).epsilon(0.06));
  // Shorter than the window: all of it.
  CHECK(best_rate({{0, 1000}, {1'000'000, 1000}, {2'000'000, 1000}}) == 1'000'000);
  // Two at one moment are no infinite rate.
  CHECK(best_rate({{7, 1000}, {7, 1000}}) <= 1'000'000'000);
  std::vector<Arrival> burst = steady;
  burst.insert(burst.begin() + 50, 10, {50'000'000, 1000});
  CHECK(best_rate(burst) <= 1'600'000);
}

TEST_CASE("links: numbers are rounded to 1, 2 or 5") {
  for (const auto& [value, wanted] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{{0, 1},
                                                                                          {1, 1},
                                                                                          {2, 2},
                                                                                          {3, 2},
                                                                                          {4, 5},
                                                                                          {7, 5},
                                                                                          {8, 10},
                                                                                          {14, 10},
                                                                                          {15, 20},
                                                                                          {8'123, 10'000},
                                                                                          {25'000'000, 20'000'000},
                                                                                          {32'000'000, 50'000'000},
                                                                                          {49'999'999, 50'000'000}}) {
    CHECK(rounded(value) == wanted);
    CHECK(rounded(rounded(value)) == rounded(value));
  }
}

TEST_CASE("links: the slowest of each level decides") {
  const Sites sites = {0, 0, 1, 1};
  const std::vector<Reach> reaches = {
      {0, 1, 400, false}, {2, 3, 1000, false}, {0, 2, 41'000, false}, {1, 3, 19'000, false}};
  const std::vector<Flow> flows = {{0, 1, 120'000'000}, {1, 2, 12'000'000}, {2, 3, 55'000'000}, {3, 0, 20'000'000}};
  const Network network = network_of(sites, reaches, flows, false);
  CHECK(network.site.latency_ns == 500'000);
  CHECK(network.site.byte_ps == 20'000);  // 1 ms round trip; 55 MB/s is 18.2 ns
  CHECK(network.wan.latency_ns == 20'000'000);
  CHECK(network.wan.byte_ps == 100'000);  // 41 ms; 12 MB/s is 83 ns
  CHECK(network.site_of == sites);
  CHECK(network.wan.message_ns > 0);
  const Network sharing = network_of(sites, reaches, flows, true);
  CHECK(sharing.host.cpu_byte_ps < network.host.cpu_byte_ps);
  CHECK(sharing.wan == network.wan);
}

TEST_CASE("links: a level without links costs what the other one does") {
  const Network one_site = network_of({0, 0}, {{0, 1, 200, false}}, {{0, 1, 1'000'000}, {1, 0, 1'000'000}}, false);
  CHECK(one_site.wan == one_site.site);
  const Network all_apart = network_of({0, 1}, {{0, 1, 20'000, false}}, {{0, 1, 1'000'000}, {1, 0, 1'000'000}}, false);
  CHECK(all_apart.site == all_apart.wan);
  CHECK(all_apart.wan.byte_ps == 1'000'000);
}

TEST_CASE("links: a rate of nothing is a very slow link, not a division by it") {
  CHECK(network_of({0, 1}, {}, {{0, 1, 0}}, false).wan.byte_ps == 1'000'000'000);
}

TEST_CASE("known networks: hosts of an earlier group, or some of them, are found again, sites in the order they come") {
  KnownNetworks known;
  const TimePoint now = Clock::now();
  Network network;
  network.wan.latency_ns = 7;
  network.site_of = {0, 0, 1, 2};
  known.remember({{"a", ""}, {"b", ""}, {"c", ""}, {"d", "home"}}, network, now);
  const auto all = known.find({{"a", ""}, {"b", ""}, {"c", ""}, {"d", "home"}}, now);
  REQUIRE(all);
  CHECK(all->network == network);
  const auto some = known.find({{"d", "home"}, {"b", ""}, {"a", ""}}, now);
  REQUIRE(some);
  CHECK(some->network.site_of == Sites{0, 1, 1});
  CHECK(some->network.wan.latency_ns == 7);
  CHECK(known.find({{"a", ""}}, after(now, milliseconds(7000)))->age == milliseconds(7000));
  CHECK_FALSE(known.find({{"a", ""}, {"e", ""}}, now));
  CHECK_FALSE(known.find({{"a", ""}, {"d", ""}}, now));  // it names another site now
  CHECK_FALSE(known.find({{"a", ""}}, after(now, KnownNetworks::kMostAge + milliseconds(1))));
}

TEST_CASE("known networks: the newest counts, few are kept, and hosts without a name are none") {
  KnownNetworks known;
  const TimePoint now = Clock::now();
  Network network;
  network.site_of = {0, 1};
  known.remember({{"a", ""}, {"", ""}}, network, now);
  CHECK_FALSE(known.find({{"a", ""}, {"", ""}}, now));
  for (std::uint64_t i = 0; i < 20; ++i) {
    network.wan.latency_ns = i;
    known.remember({{"a", ""}, {"b" + std::to_string(i), ""}}, network, now);
  }
  CHECK(known.find({{"a", ""}}, now)->network.wan.latency_ns == 19);
  CHECK(known.find({{"b12", ""}}, now)->network.wan.latency_ns == 12);
  CHECK_FALSE(known.find({{"b11", ""}}, now));
}

TEST_CASE("decision: comes back as it went; what is none is refused") {
  Decision decision;
  decision.network = {{1, 2, 7, 8}, {3, 4, 9, 10}, {5, 6, 11, 12}, {}, {0, 1, 0, 2}};
  const auto good = encode(decision);
  CHECK(decode_decision(good, 4).network == decision.network);
  CHECK(decode_decision(good, 4).failure.empty());
  for (std::size_t size = 0; size < good.size(); ++size) {
    expect_refused([&] { decode_decision({good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)}, 4); },
                   "shorter than its fields");
  }
  auto longer = good;
  longer.push_back(0);
  expect_refused([&] { decode_decision(longer, 4); }, "behind their end");
  expect_refused([&] { decode_decision(good, 3); }, "another number of hosts");
  expect_refused([&] { decode_decision(good, 5); }, "another number of hosts");
  for (const Sites& sites : {Sites{1, 0, 0, 0}, Sites{0, 2, 1, 0}, Sites{0, -1, 0, 0}, Sites{0, 0, 0, 1 << 30}}) {
    decision.network.site_of = sites;
    expect_refused([&] { decode_decision(encode(decision), 4); }, "sites out of order");
  }
  decision.network.site_of = {0, 0, 0, 0};
  decision.network.wan.latency_ns = std::uint64_t{1} << 40;
  expect_refused([&] { decode_decision(encode(decision), 4); }, "slower than any link");
  auto other = good;
  other[0] ^= 1;
  expect_refused([&] { decode_decision(other, 4); }, "not a description");
  other = good;
  other[4] = 2;
  expect_refused([&] { decode_decision(other, 4); }, "not a description");
}

TEST_CASE("decision: a failure keeps its words, as they may be shown") {
  Decision failed;
  failed.failure = "rank 3 did not\nanswer";
  CHECK(decode_decision(encode(failed), 4).failure == "rank 3 did not?answer");
  failed.failure.assign(100'000, 'x');
  CHECK(decode_decision(encode(failed), 4).failure.size() == 1000);
}

TEST_CASE("decision: noise is read or refused, never more") {
  std::mt19937_64 random(11);
  Decision decision;
  decision.network = {{1, 2, 7, 8}, {3, 4, 9, 10}, {5, 6, 11, 12}, {}, {0, 1, 0, 2}};
  const auto good = encode(decision);
  for (int round = 0; round < 20'000; ++round) {
    auto bytes = good;
    for (auto left = 1 + random() % 4; left > 0; --left)
      bytes[random() % bytes.size()] = static_cast<std::uint8_t>(random());
    if (random() % 2 == 0) bytes.resize(random() % (bytes.size() + 1));
    try {
      const Decision read = decode_decision(bytes, 4);
      for (const std::int32_t site : read.network.site_of) CHECK(site < 4);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::protocol) FAIL("seed 11 round " << round);
    }
  }
}

TEST_CASE("probe messages: a step comes back as it went, and asks whom it should") {
  probe::Step ask{.kind = probe::Kind::ask, .landmarks = {2, 0}, .asks = {true, false, true, true}};
  const probe::Step read = probe::decode_step(encode(ask), 4);
  CHECK(read.landmarks == ask.landmarks);
  CHECK(read.asks == ask.asks);
  CHECK(probe::targets_in(read, 0) == std::vector<std::int32_t>{2});
  CHECK(probe::targets_in(read, 1).empty());
  CHECK(probe::targets_in(read, 2).empty());
  CHECK(probe::targets_in(read, 3) == std::vector<std::int32_t>{2, 0});
  const probe::Step pings{.kind = probe::Kind::pings, .site_of = {0, 1, 0, 1}};
  CHECK(probe::decode_step(encode(pings), 4).site_of == pings.site_of);
  // The ring is 0 2 1 3.
  CHECK(probe::targets_in(pings, 0) == std::vector<std::int32_t>{2});
  CHECK(probe::targets_in(pings, 2) == std::vector<std::int32_t>{1});
  CHECK(probe::targets_in(pings, 3) == std::vector<std::int32_t>{0});
  CHECK(probe::decode_step(encode(probe::Step{}), 4).kind == probe::Kind::stop);
  expect_refused([&] { probe::decode_step(encode(ask), 2); }, "a host that is none");
  expect_refused([&] { probe::decode_step(encode(ask), 5); }, "shorter than its fields");
  expect_refused([&] { probe::decode_step({9, 0, 0, 0}, 4); }, "an unknown step");
  ask.landmarks.assign(kMostLandmarks + 1, 0);
  expect_refused([&] { probe::decode_step(encode(ask), 4); }, "too many landmarks");
  auto longer = encode(pings);
  longer.push_back(0);
  expect_refused([&] { probe::decode_step(longer, 4); }, "bytes behind its end");
}

TEST_CASE("probe messages: an answer is taken for exactly what was asked") {
  const probe::Found found{.reaches = {{1, 0, 250, false}, {1, 2, 40'000, true}}};
  const auto bytes = encode(found, probe::Kind::ask);
  const probe::Found read = probe::decode_found(bytes, probe::Kind::ask, 1, {0, 2});
  REQUIRE(read.reaches.size() == 2);
  CHECK(read.reaches[1].from == 1);
  CHECK(read.reaches[1].to == 2);
  CHECK(read.reaches[1].rtt_us == 40'000);
  CHECK(read.reaches[1].relayed);
  expect_refused([&] { probe::decode_found(bytes, probe::Kind::ask, 1, {0}); }, "another number of answers");
  expect_refused([&] { probe::decode_found(bytes, probe::Kind::ask, 1, {0, 3}); }, "an answer that was not asked for");
  const probe::Found flow{.rate = 12'345};
  CHECK(probe::decode_found(encode(flow, probe::Kind::flows), probe::Kind::flows, 0, {}).rate == 12'345);
  try {
    probe::decode_found(probe::encode(Error(ErrorKind::timeout, "rank 7\n is late")), probe::Kind::ask, 1, {0});
    FAIL_CHECK("a failure was taken for an answer");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::timeout);
    CHECK(std::string(error.what()) == "rank 7? is late");
  }
  std::mt19937_64 random(13);
  for (int round = 0; round < 20'000; ++round) {
    auto noise = bytes;
    for (auto left = 1 + random() % 4; left > 0; --left)
      noise[random() % noise.size()] = static_cast<std::uint8_t>(random());
    if (random() % 2 == 0) noise.resize(random() % (noise.size() + 1));
    try {
      const auto kept = probe::decode_found(noise, probe::Kind::ask, 1, {0, 2});
      if (kept.reaches.size() != 2) FAIL("seed 13 round " << round);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::protocol && error.kind() != ErrorKind::timeout) FAIL("seed 13 round " << round);
    }
  }
}

TEST_CASE("groups: ranks by what they have in common, in the order of their first") {
  CHECK(grouped({5, 3, 5, 3, 9}) == std::vector<std::vector<std::int32_t>>{{0, 2}, {1, 3}, {4}});
}

}  // namespace torch_iroh::transport
