// The laboratory's network on a clock of the test's own: when what arrives, and what is dropped and counted.
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "lab/control.hpp"
#include "lab/network.hpp"
#include "lab_packets.hpp"
#include "support.hpp"

namespace torch_iroh::lab {
namespace {

using namespace testing;  // NOLINT: the packets of this test
using std::chrono::milliseconds;
using torch_iroh::testing::contains;

struct Arrival {
  Time at;
  SiteId to;
  Octets bytes;
};

// Two sites, 203.0.113.1 and .2, by default without limits.
struct World {
  Network network{1};
  SiteId one = network.add_site("one", "here");
  SiteId two = network.add_site("two", "there");
  std::vector<Arrival> arrivals;

  World() {
    network.site(one).prefixes = {Prefix::parse("203.0.113.1")};
    network.site(two).prefixes = {Prefix::parse("203.0.113.2")};
  }
  void send(std::size_t payload, Time now, std::size_t segment = 0, std::uint8_t destination = 2) {
    const Shape shape{.destination = destination};
    network.offer(one, framed(shape, packet(shape, counting(payload), segment == 0), segment), now);
  }
  // Lets time pass until nothing is under way.
  void settle() {
    while (const auto next = network.next()) {
      network.advance(*next, [&](SiteId to, std::span<const std::uint8_t> bytes) {
        arrivals.push_back({*next, to, {bytes.begin(), bytes.end()}});
        return true;
      });
    }
  }
  const Counters& counters() { return network.site(one).counters; }
};

// Of a UDP packet of so many bytes on an Ethernet of 10 Mbit/s.
Nanoseconds on_ten_megabits(std::size_t payload) {
  return Nanoseconds((payload + 28 + kWireOverhead) * 800);
}

}  // namespace

TEST_CASE("lab network: without rules a packet arrives at once, at whom its address says") {
  World world;
  world.send(100, milliseconds(5));
  world.settle();
  REQUIRE(world.arrivals.size() == 1);
  CHECK(world.arrivals[0].at == milliseconds(5));
  CHECK(world.arrivals[0].to == world.two);
  CHECK(world.network.traffic().at({world.one, world.two}).packets == 1);
}

TEST_CASE("lab network: rate, delay and rate again add up") {
  World world;
  world.network.site(world.one).line.up_bits_per_second = 10e6;
  world.network.site(world.two).line.down_bits_per_second = 10e6;
  world.network.everywhere().delay = milliseconds(20);
  for (int packet = 0; packet < 3; ++packet) world.send(1000, Time(0));
  world.settle();
  REQUIRE(world.arrivals.size() == 3);
  for (int packet = 0; packet < 3; ++packet) {  // stored and forwarded twice; the second line works beside the first
    CHECK(world.arrivals[packet].at == milliseconds(20) + on_ten_megabits(1000) * (packet + 2));
  }
}

TEST_CASE("lab network: a super-frame keeps time as its packets would") {
  for (const double rate : {10e6, 100e6, 1e9}) {
    CAPTURE(rate);
    World whole, single;
    for (World* world : {&whole, &single}) {
      world->network.site(world->one).line.up_bits_per_second = rate;
      world->network.site(world->two).line.down_bits_per_second = rate;
    }
    whole.send(40'000, Time(0), 1000);
    for (int packet = 0; packet < 40; ++packet) single.send(1000, Time(0));
    whole.settle();
    single.settle();
    const double last = static_cast<double>(single.arrivals.back().at.count());
    CHECK(std::abs(static_cast<double>(whole.arrivals.back().at.count()) - last) < last * 0.01);
    // A slow line carries packets, a fast one super-frames.
    if (rate == 10e6) CHECK(whole.arrivals.size() == 40);
    if (rate == 1e9) CHECK(whole.arrivals.size() == 1);
  }
}

TEST_CASE("lab network: loss does not slow a full line down") {
  World clean, lossy;
  lossy.network.everywhere().loss = 0.05;
  for (World* world : {&clean, &lossy}) {
    world->network.site(world->one).line = {.up_bits_per_second = 100e6, .queue = milliseconds(10'000)};
    for (int frame = 0; frame < 500; ++frame) world->send(8000, Time(0), 1000);
    world->settle();
  }
  CHECK(lossy.counters().lost > 0);
  CHECK(lossy.counters().up_dropped == 0);
  CHECK(lossy.arrivals.back().at <= clean.arrivals.back().at);
}

TEST_CASE("lab network: what would wait longer than the queue is dropped") {
  World world;
  world.network.site(world.one).line = {.up_bits_per_second = 10e6, .queue = milliseconds(50)};
  for (int packet = 0; packet < 200; ++packet) world.send(1000, Time(0));
  world.settle();
  const auto fitting = static_cast<std::size_t>(milliseconds(50) / on_ten_megabits(1000)) + 1;
  CHECK(world.arrivals.size() == fitting);
  CHECK(world.counters().up_dropped == 200 - fitting);

  World below;
  below.network.site(below.two).line = {.down_bits_per_second = 10e6, .queue = milliseconds(50)};
  below.send(60'000, Time(0), 300);
  below.send(60'000, Time(0), 300);
  below.settle();
  CHECK(below.network.site(below.two).counters.down_dropped > 100);
  CHECK(below.network.site(below.two).counters.received_packets + below.network.site(below.two).counters.down_dropped ==
        400);
}

TEST_CASE("lab network: jitter stays within its bounds and keeps the order unless told otherwise") {
  for (const bool reorder : {false, true}) {
    World world;
    world.network.everywhere() = {
        .delay = milliseconds(10), .jitter = milliseconds(5), .loss = {}, .reorder = reorder, .cut = false};
    for (int packet = 0; packet < 500; ++packet) world.send(static_cast<std::size_t>(packet), milliseconds(packet));
    world.settle();
    REQUIRE(world.arrivals.size() == 500);
    bool in_order = true;
    for (std::size_t at = 0; at < 500; ++at) {
      const Arrival& arrival = world.arrivals[at];
      const std::size_t sent = arrival.bytes.size() - Frame::kVirtioBytes - 28;
      const Nanoseconds took = arrival.at - milliseconds(sent);
      CHECK(took >= milliseconds(10));
      CHECK(took <= milliseconds(15));
      in_order = in_order && sent == at;
    }
    CHECK(in_order == !reorder);
  }
}

TEST_CASE("lab network: loss is of packets, also of those inside super-frames") {
  World world;
  world.network.everywhere().loss = 0.1;
  for (int frame = 0; frame < 1000; ++frame) world.send(2000, Time(0), 100);
  world.settle();
  const double lost = static_cast<double>(world.counters().lost);
  CHECK(std::abs(lost - 2000) < 5 * std::sqrt(2000 * 0.9));
  std::uint64_t arrived = 0;
  for (const Arrival& arrival : world.arrivals) arrived += Frame::parse(arrival.bytes)->segments();
  CHECK(arrived == 20'000 - world.counters().lost);
  CHECK(world.network.site(world.two).counters.received_packets == arrived);
}

TEST_CASE("lab network: the narrower rule is stronger, and any cut cuts") {
  World world;
  world.network.everywhere().delay = milliseconds(50);
  world.network.between_regions("here", "there").delay = milliseconds(30);
  world.send(1, Time(0));
  world.settle();
  CHECK(world.arrivals.back().at == milliseconds(30));
  world.network.between_sites(world.one, world.two).delay = milliseconds(0);
  world.send(1, milliseconds(100));
  world.settle();
  CHECK(world.arrivals.back().at == milliseconds(100));
  for (bool* cut : {&world.network.everywhere().cut, &world.network.between_regions("here", "there").cut,
                    &world.network.between_sites(world.one, world.two).cut, &world.network.site(world.two).cut}) {
    *cut = true;
    const std::uint64_t before = world.counters().cut;
    world.send(1, milliseconds(200));
    CHECK(world.counters().cut == before + 1);
    *cut = false;
  }
  CHECK(!world.network.next());
}

TEST_CASE("lab network: the longest prefix wins; nobody's address and one's own lead nowhere") {
  World world;
  world.network.site(world.one).prefixes.push_back(Prefix::parse("203.0.113.0/24"));
  world.send(1, Time(0), 0, 2);
  world.send(1, Time(0), 0, 77);
  world.settle();
  CHECK(world.arrivals.size() == 1);
  world.network.site(world.one).prefixes.pop_back();
  world.send(1, Time(0), 0, 78);
  CHECK(world.counters().unroutable == 2);
  world.network.offer(world.one, Octets(5), Time(0));
  CHECK(world.counters().malformed == 1);
}

TEST_CASE("lab network: a packet that is larger than either line's MTU is lost, alone or in a super-frame") {
  for (const bool at_sender : {true, false}) {
    World world;
    world.network.site(at_sender ? world.one : world.two).line.mtu = 1028;
    world.send(1000, Time(0));
    world.send(1001, Time(0));
    world.send(5000, Time(0), 1000);
    world.send(5000, Time(0), 1001);
    world.settle();
    CHECK(world.arrivals.size() == 2);
    CHECK(world.counters().too_big == 1 + 5);
  }
}

TEST_CASE("lab network: what is under way has a bound") {
  World world;
  world.network.everywhere().delay = milliseconds(1000);
  const std::size_t frames = kMaxHeldBytes / 60'000 + 100;
  for (std::size_t frame = 0; frame < frames; ++frame) world.send(60'000, Time(0), 60'000);
  CHECK(world.counters().overflow > 0);
  world.settle();
  world.send(60'000, milliseconds(2000), 60'000);
  CHECK(world.network.next() == milliseconds(3000));
}

TEST_CASE("lab network: an unplugged site is handed nothing") {
  World world;
  world.network.site(world.two).plugged = false;
  world.send(1, Time(0));
  world.settle();
  CHECK(world.arrivals.empty());
  CHECK(world.network.site(world.two).counters.refused == 1);
}

TEST_CASE("lab control: commands change the network, wrong ones are refused in words and change nothing") {
  Network network(1);
  std::vector<std::string> opened;
  Control control(network, [&](const std::string& space) {
    if (space == "gone") throw std::runtime_error("no such namespace");
    opened.push_back(space);
  });
  CHECK(control.handle("site one space1 here\nsite two space2 there\n\nroute two 203.0.113.2 2001:db8:2::/48") == "ok");
  CHECK(opened == std::vector<std::string>{"space1", "space2"});
  CHECK(network.site(1).prefixes.size() == 2);
  CHECK(control.handle("line one up=20 down=100 queue=30.5") == "ok");
  CHECK(network.site(0).line.up_bits_per_second == 20e6);
  CHECK(network.site(0).line.queue == Nanoseconds(30'500'000));
  CHECK(control.handle("sites one two delay=10 jitter=1 loss=0.5 reorder=1 cut=1") == "ok");
  CHECK(network.between_sites(0, 1).loss == doctest::Approx(0.005));
  CHECK(control.handle("sites one two delay=inherit") == "ok");
  CHECK(!network.between_sites(0, 1).delay);
  CHECK(network.between_sites(0, 1).cut);
  CHECK(contains(control.handle("counters"), "\"two\":{\"sent_packets\":0"));
  CHECK(control.handle("traffic") == "[]");

  const auto refused = [&](std::string_view request, std::string_view text) {
    INFO(std::string(request));
    const std::string reply = control.handle(request);
    CHECK(reply.starts_with("error: "));
    CHECK_MESSAGE(contains(reply, text), reply);
  };
  refused("site one space3 here", "there is a site 'one' already");
  refused("site three gone here", "no such namespace");
  CHECK(network.sites().size() == 2);
  CHECK(opened.size() == 2);
  refused("site three", "no namespace given");
  refused("site thr\"ee x y", "name has odd letters");
  refused("line three up=1", "there is no site 'three'");
  refused("line one up=-1", "up=-1 is not a number from 0 to");
  refused("line one up=1 down=nan", "down=nan is not a number");
  CHECK(network.site(0).line.up_bits_per_second == 20e6);
  refused("line one up=1 up=2", "is said twice");
  refused("line one speed=1", "'speed' cannot be set here");
  refused("everywhere loss=101", "loss=101 is not a number from 0 to 100");
  refused("everywhere delay=1e9", "delay=1e9 is not a number");
  refused("everywhere cut=yes", "cut is 0 or 1");
  refused("route one 10.0.0.0/40", "is no address or prefix");
  refused("fly", "there is no such command");
  refused(std::string(100, 'x'), "command is too long");
  refused("line one up=7\nfly\nline one up=8", "no such command");
  CHECK(network.site(0).line.up_bits_per_second == 7e6);
}

}  // namespace torch_iroh::lab
