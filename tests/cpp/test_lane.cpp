// Frames over real streams of the iroh library on 127.0.0.1: lanes, and links made of them. One node is shared by a
// whole process, so where a second one is needed a bare Link plays it.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "iroh_support.hpp"
#include "link/lane.hpp"
#include "link/link.hpp"
#include "link/node.hpp"

namespace {

using namespace torch_iroh;
using namespace torch_iroh::testing;
using link::FrameHeader;
using link::FrameType;
using link::kHeaderBytes;
using link::kMaxFrameBytes;
using link::Link;
using link::LinkOptions;
using link::RecvLane;
using link::SendLane;
using Bytes = std::vector<std::byte>;

Bytes pattern(std::size_t size, std::uint64_t seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(seed * 131 + i * 7 + (i >> 8));
  return bytes;
}

FrameHeader header_of(std::uint32_t number, std::size_t size) {
  FrameHeader header;
  header.type = FrameType::data;
  header.length = static_cast<std::uint32_t>(size);
  header.group = 77;
  header.sequence = number;
  header.message = number * 3;
  return header;
}
Bytes frame_bytes(std::uint32_t number, const Bytes& payload) {
  const auto head = link::encode(header_of(number, payload.size()));
  Bytes bytes(head.begin(), head.end());
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  return bytes;
}

// What a lane or a link received, in order. Filled on polling threads.
class Inbox {
 public:
  struct Frame {
    FrameHeader header;
    Bytes payload;
  };
  void add(const FrameHeader& header, const Payload& payload) {
    const std::lock_guard lock(mutex_);
    frames_.push_back({header, {payload.bytes().begin(), payload.bytes().end()}});
  }
  std::size_t count() const {
    const std::lock_guard lock(mutex_);
    return frames_.size();
  }
  std::vector<Frame> frames() const {
    const std::lock_guard lock(mutex_);
    return frames_;
  }

  Outcome end;  // of the lane, or the link's death

 private:
  mutable std::mutex mutex_;
  std::vector<Frame> frames_;
};

std::shared_ptr<Inbox> receive(iroh::RecvStream stream, std::size_t most = ~std::size_t{0}) {
  auto inbox = std::make_shared<Inbox>();
  const auto on_frame = [inbox, most](const FrameHeader& header, Payload payload) {
    inbox->add(header, payload);
    return inbox->count() < most;
  };
  const auto on_end = [inbox](const std::optional<Error>& error) { inbox->end.set(error ? &*error : nullptr); };
  std::make_shared<RecvLane>(std::move(stream), on_frame, on_end)->start();
  return inbox;
}

// A stream whose first byte waits to be written: the pair makes a stream known by writing to it.
struct Lane {
  std::shared_ptr<SendLane> send;
  std::shared_ptr<Inbox> inbox;
};
Lane make_lane(ConnectedPair& pair) {
  auto [send, recv] = pair.stream(frame_bytes(0, {}));  // frame 0 makes the stream known
  return {std::make_shared<SendLane>(std::move(send)), receive(std::move(recv))};
}

// Checks that frames 0, 1, ... of these sizes have come, whole and in order.
void expect_frames(const Inbox& inbox, const std::vector<std::size_t>& sizes, std::uint64_t seed) {
  CHECK(eventually([&] { return inbox.count() >= sizes.size(); }));
  const auto frames = inbox.frames();
  CHECK(frames.size() == sizes.size());
  for (std::size_t i = 0; i < std::min(frames.size(), sizes.size()); ++i) {
    if (frames[i].header != header_of(static_cast<std::uint32_t>(i), sizes[i])) {
      FAIL("frame " << i << ": another header, sequence " << frames[i].header.sequence);
    }
    if (frames[i].payload != pattern(sizes[i], seed + i))
      FAIL("frame " << i << " of " << sizes[i] << " bytes is spoiled");
  }
}

const std::vector<std::size_t> kSizes = {0,
                                         1,
                                         2,
                                         39,
                                         40,
                                         41,
                                         4015,
                                         4016,
                                         4017,
                                         4055,
                                         4056,
                                         4057,
                                         4096,
                                         4097,
                                         16383,
                                         16384,
                                         16385,
                                         32767,
                                         32768,
                                         32769,
                                         65536,
                                         65537,
                                         99999,
                                         262144,
                                         524287,
                                         kMaxFrameBytes - 1,
                                         kMaxFrameBytes};

}  // namespace

// ---- lanes ----

TEST_CASE("lane: frames of all sizes in mixed order arrive whole and in order, on four lanes at once") {
  if (!have_library()) return;
  constexpr std::size_t kLanes = 4;
  ConnectedPair pair;
  std::vector<Lane> lanes;
  std::vector<std::vector<std::size_t>> sizes(kLanes, std::vector<std::size_t>{0});
  for (std::size_t i = 0; i < kLanes; ++i) lanes.push_back(make_lane(pair));
  std::mt19937 random(1);
  std::vector<std::shared_ptr<std::pair<Bytes, Outcome>>> sent;
  const int rounds = kSanitized ? 1 : 3;
  for (int round = 0; round < rounds; ++round) {
    auto order = kSizes;
    for (int i = 0; i < 60; ++i) order.push_back(random() % 3000);
    for (std::size_t i = 0; i < kLanes; ++i) {
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t size : order) {
        const auto number = static_cast<std::uint32_t>(sizes[i].size());
        auto frame = std::make_shared<std::pair<Bytes, Outcome>>();
        frame->first = pattern(size, i * 1000 + number);
        sizes[i].push_back(size);
        sent.push_back(frame);
        lanes[i].send->send({header_of(number, size), frame->first, [frame](Result<Nothing> result) {
                               frame->second.set(result.ok() ? nullptr : &result.error());
                             }});
      }
    }
  }
  for (const auto& frame : sent) {
    REQUIRE(frame->second.wait());
    CHECK_FALSE(frame->second.error());
  }
  for (std::size_t i = 0; i < kLanes; ++i) {
    expect_frames(*lanes[i].inbox, sizes[i], i * 1000);
    CHECK(lanes[i].send->queued_bytes() == 0);
    CHECK(eventually([&] { return lanes[i].send->idle(); }));
    CHECK(lanes[i].inbox->end.calls() == 0);
  }
}

TEST_CASE("lane: frames of many threads are not mixed, and keep each thread's order") {
  if (!have_library()) return;
  ConnectedPair pair;
  Lane lane = make_lane(pair);
  constexpr std::uint32_t kThreads = 4;
  const std::uint32_t each = kSanitized ? 100 : 500;
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint32_t i = 0; i < each; ++i) {
        const std::uint32_t number = (t + 1) * 100'000 + i;
        const std::size_t size = i % 50 == 0 ? 40'000 : (t * 37 + i) % 900;
        const auto payload = std::make_shared<Bytes>(pattern(size, number));
        lane.send->send({header_of(number, size), *payload, [payload](Result<Nothing>) {}});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(eventually([&] { return lane.inbox->count() == kThreads * each + 1; }));
  std::array<std::uint32_t, kThreads + 1> next{};
  for (const auto& [header, payload] : lane.inbox->frames()) {
    const auto number = static_cast<std::uint32_t>(header.sequence);
    if (number == 0) continue;
    if (number % 100'000 != next.at(number / 100'000)++) FAIL("frame " << number << " is out of order");
    if (payload != pattern(header.length, number)) FAIL("frame " << number << " is spoiled");
  }
}

TEST_CASE("lane: bytes that drip in one by one make the same frames") {
  if (!have_library()) return;
  ConnectedPair pair;
  auto [send, recv] = pair.stream(frame_bytes(0, {}));
  const auto inbox = receive(std::move(recv));
  const std::vector<std::size_t> sizes = {0, 0, 1, 45, 0, 100};
  for (std::uint32_t i = 1; i < sizes.size(); ++i) {
    for (const std::byte byte : frame_bytes(i, pattern(sizes[i], i))) send.write_all(std::array{byte}).get(soon());
  }
  // A large frame whose header drips and whose payload comes in pieces, and a small one behind it.
  auto later = sizes;
  later.push_back(100'000);
  later.push_back(7);
  const Bytes large = frame_bytes(6, pattern(100'000, 6));
  for (std::size_t i = 0; i < kHeaderBytes + 3; ++i) send.write_all(std::array{large[i]}).get(soon());
  for (std::size_t i = kHeaderBytes + 3; i < large.size(); i += 9000) {
    send.write_all(std::span(large).subspan(i, std::min<std::size_t>(9000, large.size() - i))).get(soon());
  }
  for (const std::byte byte : frame_bytes(7, pattern(7, 7))) send.write_all(std::array{byte}).get(soon());
  expect_frames(*inbox, later, 0);
  send.finish().get(soon());
  CHECK(inbox->end.wait());
  CHECK_FALSE(inbox->end.error());
}

TEST_CASE("lane: a stream that ends inside a payload, or is cut off, is an error after its whole frames") {
  if (!have_library()) return;
  for (const bool finished : {true, false}) {
    ConnectedPair pair;
    auto [send, recv] = pair.stream(frame_bytes(0, {}));
    const auto inbox = receive(std::move(recv));
    Bytes bytes = frame_bytes(1, pattern(5000, 1));
    bytes.pop_back();
    send.write_all(bytes).get(soon());
    CHECK(eventually([&] { return inbox->count() == 1; }));
    if (finished) {
      send.finish().get(soon());
    } else {
      pair.dialed.close(5, "cut");
    }
    CHECK(inbox->end.wait());
    CHECK(inbox->end.error().has_value());
    CHECK(inbox->count() == 1);
    CHECK(inbox->end.calls() == 1);
  }
}

TEST_CASE("lane: a stream that ends inside a header is an error") {
  if (!have_library()) return;
  ConnectedPair pair;
  auto [send, recv] = pair.stream(frame_bytes(0, {}));
  const auto inbox = receive(std::move(recv));
  const Bytes head = frame_bytes(1, {});
  send.write_all(std::span(head).first(kHeaderBytes - 1)).get(soon());
  send.finish().get(soon());
  CHECK(inbox->end.wait());
  CHECK(inbox->end.error().has_value());
}

TEST_CASE("lane: a stream that ends behind a large frame ends without an error") {
  if (!have_library()) return;
  ConnectedPair pair;
  auto [send, recv] = pair.stream(frame_bytes(0, {}));
  const auto inbox = receive(std::move(recv));
  send.write_all(frame_bytes(1, pattern(100'000, 1))).get(soon());
  CHECK(eventually([&] { return inbox->count() == 2; }));
  send.finish().get(soon());
  CHECK(inbox->end.wait());
  CHECK_FALSE(inbox->end.error());
}

TEST_CASE("lane: garbage behind good frames is refused as such, and nothing after it is believed") {
  if (!have_library()) return;
  ConnectedPair pair;
  std::mt19937 random(2);
  for (int round = 0; round < 8; ++round) {
    auto [send, recv] = pair.stream(frame_bytes(0, {}));
    const auto inbox = receive(std::move(recv));
    Bytes bytes = frame_bytes(1, pattern(300, 1));
    Bytes garbage(200);
    for (std::byte& byte : garbage) byte = static_cast<std::byte>(random());
    if (round % 2 == 0) {  // a good header, but for its length
      const auto head = link::encode(header_of(2, std::size_t{kMaxFrameBytes} + 1));
      std::copy(head.begin(), head.end(), garbage.begin());
    }
    bytes.insert(bytes.end(), garbage.begin(), garbage.end());
    const Bytes good = frame_bytes(3, {});
    bytes.insert(bytes.end(), good.begin(), good.end());
    send.write_all(bytes).get(soon());
    CHECK(inbox->end.wait());
    REQUIRE(inbox->end.error().has_value());
    CHECK(inbox->end.error()->kind() == ErrorKind::protocol);
    const std::string text = inbox->end.error()->what();
    CHECK_MESSAGE(contains(text, round % 2 == 0 ? "is over the limit" : "bad frame"), text);
    CHECK(inbox->count() == 2);
  }
}

TEST_CASE("lane: a receiver that has enough ends its lane") {
  if (!have_library()) return;
  ConnectedPair pair;
  auto [send, recv] = pair.stream(frame_bytes(0, {}));
  const auto inbox = receive(std::move(recv), 3);
  Bytes bytes;
  for (std::uint32_t i = 1; i < 6; ++i) {
    const Bytes frame = frame_bytes(i, pattern(10, i));
    bytes.insert(bytes.end(), frame.begin(), frame.end());
  }
  send.write_all(bytes).get(soon());  // at once: a lane that has ended stops its stream
  CHECK(inbox->end.wait());
  CHECK_FALSE(inbox->end.error());
  std::this_thread::sleep_for(milliseconds(10));
  CHECK(inbox->count() == 3);
}

TEST_CASE("lane: a failed lane tells every frame, those queued and those that come later, once") {
  if (!have_library()) return;
  for (const bool by_hand : {true, false}) {
    ConnectedPair pair;
    auto [send, recv] = pair.stream(frame_bytes(0, {}));  // nobody reads: what is written backs up
    const auto lane = std::make_shared<SendLane>(std::move(send));
    const auto payload = std::make_shared<Bytes>(pattern(kMaxFrameBytes, 1));
    std::vector<std::shared_ptr<Outcome>> outcomes;
    const auto send_one = [&] {
      auto outcome = std::make_shared<Outcome>();
      outcomes.push_back(outcome);
      lane->send({header_of(1, payload->size()), *payload, [outcome, payload](Result<Nothing> result) {
                    outcome->set(result.ok() ? nullptr : &result.error());
                  }});
    };
    for (int i = 0; i < 10; ++i) send_one();
    CHECK(lane->queued_bytes() > 0);
    CHECK_FALSE(lane->idle());
    if (by_hand) lane->fail(Error(ErrorKind::aborted, "enough"));
    pair.dialed.close(1, "cut");  // ends the write that iroh has
    send_one();
    for (const auto& outcome : outcomes) CHECK(outcome->wait());
    CHECK(outcomes.back()->error().has_value());
    if (by_hand) CHECK(contains(outcomes.back()->error()->what(), "enough"));
    for (const auto& outcome : outcomes) CHECK(outcome->calls() == 1);
    CHECK(eventually([&] { return lane->idle(); }));
  }
}

// ---- links ----

namespace {

// One end of a link: an endpoint, and a link that takes every connection that comes to it.
struct End {
  iroh::Endpoint endpoint = bind_loopback(link::kAlpn);
  std::shared_ptr<Link> link;
  std::shared_ptr<Inbox> inbox = std::make_shared<Inbox>();

  void open(const iroh::EndpointAddr& peer, const LinkOptions& options) {
    Link::Events events;
    events.on_frame = [inbox = inbox](const iroh::EndpointId&, const FrameHeader& header, Payload payload) {
      inbox->add(header, payload);
    };
    events.on_dead = [inbox = inbox](const iroh::EndpointId&, const Error& cause) { inbox->end.set(&cause); };
    link = std::make_shared<Link>(link::Endpoints{endpoint, {}}, link::PeerAddr{peer, {}}, options, std::move(events));
  }
  // The link of a peer that is let in.
  void accept() {
    endpoint.accept_next().then([link = link](Result<std::optional<iroh::Incoming>> incoming) {
      if (!incoming.ok() || !incoming.value()) return;
      incoming.value()->accept().then([link](Result<iroh::Accepting> accepting) {
        if (!accepting.ok()) return;
        accepting.value().handshake().then([link](Result<iroh::Connection> connection) {
          if (connection.ok()) link->adopt(connection.value());
        });
      });
    });
  }
};

struct LinkedPair {
  End a, b;
  explicit LinkedPair(const LinkOptions& options = {}) {
    a.open(b.endpoint.addr(), options);
    b.open(a.endpoint.addr(), options);
    a.accept();
    b.accept();
  }
  ~LinkedPair() {
    for (End* end : {&a, &b}) end->link->kill(Error(ErrorKind::aborted, "the test is over"));
    for (End* end : {&a, &b}) {
      try {
        end->endpoint.close().get(soon());
      } catch (const Error& error) {
        MESSAGE("closing: " << std::string(error.what()));
      }
    }
  }
  LinkedPair(const LinkedPair&) = delete;
  LinkedPair& operator=(const LinkedPair&) = delete;
  bool up() const { return a.link->is_up() && b.link->is_up(); }
};

void send_number(Link& link, std::uint32_t number, std::size_t size, bool control) {
  const auto payload = std::make_shared<Bytes>(pattern(size, number));
  link::OutFrame frame{header_of(number, size), *payload, [payload](Result<Nothing>) {}};
  if (control) {
    link.send_control(std::move(frame));
  } else {
    link.send_data(std::move(frame));
  }
}

}  // namespace

TEST_CASE("link: what is sent before it is up arrives, control in order, both ways, whoever dials first") {
  if (!have_library()) return;
  for (int round = 0; round < (kSanitized ? 3 : 10); ++round) {
    LinkedPair pair({.streams = 1 + round % 8});
    CHECK_FALSE(pair.a.link->is_up());
    constexpr std::uint32_t kCount = 60;
    for (std::uint32_t i = 0; i < kCount; ++i) {
      send_number(*pair.a.link, i, i * 13 % 500, i % 2 == 0);
      if (round % 2 == 0) send_number(*pair.b.link, i, i % 9 == 0 ? 70'000 : 5, i % 2 == 0);
      if (i == kCount / 2) CHECK(eventually([&] { return pair.a.link->is_up(); }));
    }
    for (const auto& inbox : {pair.b.inbox, pair.a.inbox}) {
      if (inbox == pair.a.inbox && round % 2 == 1) continue;
      CHECK(eventually([&] { return inbox->count() == kCount; }));
      std::uint64_t next = 0;
      for (const auto& [header, payload] : inbox->frames()) {
        if (payload != pattern(header.length, header.sequence)) FAIL("frame " << header.sequence << " is spoiled");
        if (header.sequence % 2 != 0) continue;
        CHECK(header.sequence == next);
        next += 2;
      }
    }
    CHECK(eventually([&] { return pair.up(); }));
    CHECK(contains(pair.a.link->path_text(), "direct 127.0.0.1:"));
  }
}

TEST_CASE("link: heartbeats keep a quiet link alive and measure its round trip") {
  if (!have_library()) return;
  LinkedPair pair({.heartbeat = milliseconds(20), .peer_timeout = milliseconds(5000)});
  send_number(*pair.a.link, 1, 10, true);
  CHECK(eventually([&] { return pair.up() && pair.b.inbox->count() == 1; }));
  for (int i = 0; i < 20; ++i) {
    for (End* end : {&pair.a, &pair.b}) end->link->on_tick(Clock::now(), {});
    std::this_thread::sleep_for(milliseconds(5));
  }
  CHECK_FALSE(pair.a.link->is_dead());
  CHECK(pair.b.inbox->count() == 1);  // heartbeats are the link's own
  CHECK(pair.a.link->rtt_ms().value_or(-1) >= 0.0);
  CHECK(pair.a.link->rtt_ms().value_or(1e9) < 5000.0);
}

TEST_CASE("link: silence is death after the timeout, on the clock it is given, and own pauses are forgiven") {
  if (!have_library()) return;
  LinkedPair pair({.peer_timeout = milliseconds(3000)});
  send_number(*pair.a.link, 1, 10, true);
  send_number(*pair.b.link, 1, 10, true);
  CHECK(eventually([&] { return pair.up() && pair.a.inbox->count() == 1 && pair.b.inbox->count() == 1; }));
  pair.a.link->on_tick(Clock::now() + milliseconds(60'000), milliseconds(60'000));
  CHECK_FALSE(pair.a.link->is_dead());
  pair.a.link->on_tick(Clock::now() + milliseconds(63'100), {});
  CHECK(pair.a.link->is_dead());
  CHECK(pair.a.inbox->end.wait());
  CHECK(pair.a.inbox->end.error()->kind() == ErrorKind::peer_gone);
  const std::string text = pair.a.inbox->end.error()->what();
  CHECK_MESSAGE(contains(text, "nothing was received from it for "), text);
  CHECK(pair.b.inbox->end.wait());  // whose peer ended the connections
  CHECK(pair.b.link->is_dead());
  CHECK(pair.b.inbox->end.error()->kind() == ErrorKind::peer_gone);
}

TEST_CASE("link: killed, it fails what is queued and what comes later, and the peer hears why") {
  if (!have_library()) return;
  LinkedPair pair;
  send_number(*pair.a.link, 1, 10, true);
  send_number(*pair.b.link, 1, 10, true);
  CHECK(eventually([&] { return pair.up() && pair.a.inbox->count() == 1 && pair.b.inbox->count() == 1; }));
  pair.a.link->kill(Error(ErrorKind::aborted, "left, says a test"));
  CHECK(pair.a.inbox->end.calls() == 1);
  CHECK_FALSE(pair.a.link->is_up());
  CHECK(pair.a.link->path_text() == "not connected");
  Outcome outcome;
  pair.a.link->send_data(
      {header_of(2, 0), {}, [&](Result<Nothing> result) { outcome.set(result.ok() ? nullptr : &result.error()); }});
  CHECK(outcome.wait());
  CHECK(contains(outcome.error()->what(), "left, says a test"));
  CHECK(pair.b.inbox->end.wait());
  const std::string text = pair.b.inbox->end.error()->what();
  CHECK_MESSAGE(contains(text, "left"), text);
  pair.a.link->kill(Error(ErrorKind::aborted, "again"));
  CHECK(pair.a.inbox->end.calls() == 1);
  Outcome flushed;
  pair.a.link->flush([&] { flushed.set(nullptr); });
  CHECK(flushed.calls() == 1);
}

TEST_CASE("link: flush delivers everything sent before") {
  if (!have_library()) return;
  LinkedPair pair;
  send_number(*pair.a.link, 0, 10, true);
  CHECK(eventually([&] { return pair.up(); }));
  for (std::uint32_t i = 1; i <= 20; ++i) send_number(*pair.a.link, i, 200'000, false);
  Outcome flushed;
  pair.a.link->flush([&] { flushed.set(nullptr); });
  CHECK(flushed.wait());
  pair.a.link->kill(Error(ErrorKind::aborted, "left"));
  CHECK(eventually([&] { return pair.b.inbox->count() == 21; }));
}

TEST_CASE("link: a peer that cannot be reached is named with the time it was given") {
  if (!have_library()) return;
  LinkOptions options;
  options.connect_timeout = milliseconds(300);
  End end;
  iroh::EndpointAddr nobody = bind_loopback(link::kAlpn).addr();  // closed again at once
  nobody.direct = {"127.0.0.1:9"};
  end.open(nobody, options);
  Outcome sent;
  end.link->send_data(
      {header_of(1, 0), {}, [&](Result<Nothing> result) { sent.set(result.ok() ? nullptr : &result.error()); }});
  CHECK(eventually([&] {
    end.link->on_tick(Clock::now(), {});
    return end.link->is_dead();
  }));
  CHECK(end.inbox->end.wait());
  const std::string text = end.inbox->end.error()->what();
  CHECK_MESSAGE(contains(text, "it could not be reached within 300 ms"), text);
  CHECK(sent.wait());
  CHECK(sent.error()->kind() == ErrorKind::peer_gone);
  end.endpoint.close().get(soon());
}

TEST_CASE("link: whatever breaks the protocol on a stream ends the link, with the reason") {
  if (!have_library()) return;
  const auto hello = [](std::uint8_t lane) {
    FrameHeader header{.type = FrameType::hello};
    header.length = link::HelloBody::kBytes;
    const auto head = link::encode(header);
    const auto body = link::encode(link::HelloBody{lane, 0, 77});
    Bytes bytes(head.begin(), head.end());
    bytes.insert(bytes.end(), body.begin(), body.end());
    return bytes;
  };
  const auto numbered = [](std::uint32_t number, FrameType type) {
    FrameHeader header = header_of(5, 0);
    header.type = type;
    header.number = number;
    const auto head = link::encode(header);
    return Bytes(head.begin(), head.end());
  };
  const auto acks = [](std::uint8_t lane, std::uint32_t next) {
    const auto body = link::encode(std::vector<link::Ack>{{lane, next}});
    FrameHeader header{.type = FrameType::ack};
    header.length = static_cast<std::uint32_t>(body.size());
    const auto head = link::encode(header);
    Bytes bytes(head.begin(), head.end());
    bytes.insert(bytes.end(), body.begin(), body.end());
    return bytes;
  };
  const Bytes garbage(100, std::byte{'x'});
  const auto first = std::pair{hello(1), numbered(1, FrameType::data)};
  constexpr std::uint8_t kPulse = link::HelloBody::kPulse;
  struct Case {
    std::vector<std::pair<Bytes, Bytes>> streams;  // what is written on each
    std::string why;
  };
  const std::vector<Case> cases = {
      {{first, {garbage, {}}}, "magic number"},
      {{first, {frame_bytes(1, {}), {}}}, "a stream without a hello"},
      {{first, {hello(2), hello(3)}}, "a second hello on one stream"},
      {{first, {hello(2), garbage}}, "magic number"},
      {{first, {hello(1), numbered(3, FrameType::data)}}, "one before it on its lane is missing"},
      {{first, {hello(kPulse), numbered(2, FrameType::data)}}, "type 2 on a lane where it does not belong"},
      {{first, {hello(1), numbered(2, FrameType::heartbeat)}}, "type 4 on a lane where it does not belong"},
      {{first, {hello(kPulse), acks(0, 2)}}, "an acknowledgement of what was never sent"},
      {{first, {hello(kPulse), acks(60, 1)}}, "an acknowledgement of what was never sent"},
  };
  for (const Case& one : cases) {
    INFO(one.why);
    End end;
    const iroh::Endpoint rude = bind_loopback(link::kAlpn);
    end.open(rude.addr(), {});
    end.accept();
    const iroh::Connection connection = rude.connect(end.endpoint.addr(), link::kAlpn).get(soon());
    std::vector<iroh::SendStream> streams;
    for (const auto& [first, second] : one.streams) {
      CHECK(end.inbox->count() == streams.size());
      streams.push_back(connection.open_uni().get(soon()));
      streams.back().write_all(first, second).get(soon());
      if (streams.size() == 1) CHECK(eventually([&] { return end.inbox->count() == 1; }));
    }
    CHECK(end.inbox->end.wait());
    CHECK(end.inbox->end.error()->kind() == ErrorKind::protocol);
    const std::string text = end.inbox->end.error()->what();
    CHECK_MESSAGE(contains(text, one.why), text);
    CHECK(end.link->is_dead());
    CHECK(end.inbox->count() == 1);
  }
}

// ---- the node of this process ----

namespace {

class Sink final : public link::GroupSink {
 public:
  void on_frame(const iroh::EndpointId&, const FrameHeader& header, Payload payload) override {
    inbox.add(header, payload);
  }
  void on_peer_dead(const iroh::EndpointId&, const Error& cause) override { inbox.end.set(&cause); }
  Inbox inbox;
};

}  // namespace

TEST_CASE("node: one for the process, until its last group leaves") {
  if (!have_library()) return;
  link::NodeOptions options;
  options.bind_addr = "127.0.0.1:0";
  CHECK_FALSE(link::Node::running_options());
  const auto node = link::Node::shared(options);
  CHECK(link::Node::shared(options) == node);
  CHECK(link::Node::running_options() == options);
  auto other = options;
  other.link.streams = 3;
  try {
    link::Node::shared(other);
    FAIL_CHECK("other options were accepted");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::invalid);
  }
  const auto sink = std::make_shared<Sink>();
  node->join(1, sink);
  node->join(2, sink);
  node->set_members(1, {node->addr()});
  node->set_members(2, {node->addr()});
  node->leave(1, {});
  CHECK(link::Node::shared(options) == node);
  node->leave(2, {});
  CHECK_FALSE(link::Node::running_options());
  const auto next = link::Node::shared(other);
  CHECK(next != node);
  CHECK(next->id() != node->id());
  next->join(1, sink);
  link::Node::leave_all();
  CHECK_FALSE(link::Node::running_options());
}

TEST_CASE("node: members talk, early strangers wait to be listed, others are refused with a reason") {
  if (!have_library()) return;
  link::NodeOptions options;
  options.bind_addr = "127.0.0.1:0";
  const auto node = link::Node::shared(options);
  const auto sink = std::make_shared<Sink>();
  node->join(77, sink);  // 77 is the group of header_of()

  End peer;
  peer.open(node->addr().main, options.link);
  peer.accept();
  send_number(*peer.link, 1, 100, true);  // before the node knows it
  const iroh::Endpoint stranger = bind_loopback(link::kAlpn);
  const iroh::Connection waiting = stranger.connect(node->addr().main, link::kAlpn).get(soon());
  auto refused = waiting.closed();
  CHECK(eventually([&] { return peer.link->is_up(); }));
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(sink->inbox.count() == 0);

  node->set_members(77, {node->addr(), {peer.endpoint.addr(), {}}});
  CHECK(eventually([&] { return sink->inbox.count() == 1; }));
  const std::string reason = std::move(refused).get(soon());
  CHECK_MESSAGE(contains(reason, "not a member of any group of this process"), reason);

  send_number(*node->link_to(peer.endpoint.id()), 2, 50'000, false);
  CHECK(eventually([&] { return peer.inbox->count() == 1; }));
  CHECK(node->links_of(77).size() == 1);

  const auto leaving = std::make_shared<Bytes>(pattern(500'000, 3));
  node->link_to(peer.endpoint.id())->send_data({header_of(3, leaving->size()), *leaving, [leaving](Result<Nothing>) {
                                                }});
  node->leave(77, milliseconds(10'000));
  // One data lane and the control lane: nothing has asked for more.
  CHECK(eventually([&] { return peer.inbox->count() == 2 + 2; }));
  const auto frames = peer.inbox->frames();
  CHECK(std::count_if(frames.begin(), frames.end(), [](const auto& frame) {
          return frame.header.type == FrameType::goodbye && frame.header.message == 2;
        }) == 2);
  CHECK(peer.inbox->end.wait());
  CHECK(sink->inbox.end.calls() <= 1);
  peer.endpoint.close().get(soon());
  stranger.close().get(soon());
}

TEST_CASE("node: a killed peer is reported to its groups") {
  if (!have_library()) return;
  link::NodeOptions options;
  options.bind_addr = "127.0.0.1:0";
  const auto node = link::Node::shared(options);
  const auto sink = std::make_shared<Sink>();
  End peer;
  peer.open(node->addr().main, options.link);
  peer.accept();
  node->join(77, sink);
  node->set_members(77, {node->addr(), {peer.endpoint.addr(), {}}});
  send_number(*peer.link, 1, 10, true);
  CHECK(eventually([&] { return sink->inbox.count() == 1; }));
  peer.link->kill(Error(ErrorKind::aborted, "killed by a test"));
  CHECK(sink->inbox.end.wait());
  CHECK(sink->inbox.end.error()->kind() == ErrorKind::peer_gone);
  node->leave(77, {});
  peer.endpoint.close().get(soon());
}
