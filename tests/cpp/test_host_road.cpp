// Messages between ranks of one host: the ring in memory by itself, then whole roads. The ranks are threads of this
// process, each with its own mappings: what they do is what processes do.
#include <doctest/doctest.h>

#ifdef __linux__

#include <unistd.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support.hpp"
#include "transport/host_ring.hpp"
#include "transport/host_road.hpp"
#include "transport/host_team.hpp"

namespace {

using namespace torch_iroh;
using namespace torch_iroh::testing;
using transport::HostRoad;
using transport::HostTeam;
using transport::RingKind;
using transport::RingReader;
using transport::RingWriter;
using transport::Tag;
using Bytes = std::vector<std::byte>;

Bytes bytes_of(std::uint32_t seed, std::size_t count) {
  std::mt19937 dice(seed);
  Bytes bytes(count);
  for (auto& byte : bytes) byte = static_cast<std::byte>(dice());
  return bytes;
}

bool equal(const Payload& payload, const Bytes& bytes) {
  return payload.size() == bytes.size() && std::equal(bytes.begin(), bytes.end(), payload.bytes().begin());
}

// Around an entry (992 bytes), a slot (256 KiB) and the longest message.
const std::vector<std::size_t> kSizes = {0,       1,       991,     992,     993,       5000,
                                         262'143, 262'144, 262'145, 600'011, 1'048'575, 1'048'576};

std::vector<std::shared_ptr<HostTeam>> teams_of(int world) {
  std::vector<std::shared_ptr<HostTeam>> teams;
  std::vector<transport::HostIntroduction> introductions;
  for (int rank = 0; rank < world; ++rank) {
    teams.push_back(std::make_shared<HostTeam>(rank, world));
    introductions.push_back(teams.back()->introduction());
  }
  for (auto& team : teams) team->attach(introductions);
  for (auto& team : teams) team->settle(false);
  return teams;
}

// Both sides of one ring, driven by hand.
struct Ring {
  std::vector<std::shared_ptr<HostTeam>> teams = teams_of(2);
  RingWriter writer{teams[0]->line(1), teams[0]->line_of(1)};
  int rung = 0;
  std::shared_ptr<RingReader> reader =
      std::make_shared<RingReader>(getpid(), teams[1]->line(0), teams[1]->line_of(0), [this] { ++rung; }, teams[1]);

  bool put(const Bytes& bytes, std::size_t& done, RingKind kind = RingKind::data) {
    return writer.put(kind, {7, 8, 9, 10}, bytes, done);
  }
};

TEST_CASE("ring: messages of every size come whole and in order") {
  Ring ring;
  CHECK(ring.writer.is_opened());
  ring.writer.close_descriptor();
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    CAPTURE(kSizes[i]);
    const auto kind = i % 2 == 0 ? RingKind::data : RingKind::control;
    const Bytes bytes = bytes_of(1, kSizes[i]);
    std::size_t done = 0;
    REQUIRE(ring.put(bytes, done, kind));
    const auto message = ring.reader->next();
    REQUIRE(message);
    CHECK(message->kind == kind);
    CHECK(message->tag.sequence == 7);
    CHECK(message->tag.signature == 10);
    CHECK(equal(message->payload, bytes));
    CHECK_FALSE(ring.reader->next());
  }
}

TEST_CASE("ring: a full ring refuses, says who waits, and goes on where it stopped") {
  Ring ring;
  const Bytes bytes = bytes_of(2, 1 << 20);  // four slots
  std::size_t first = 0, second = 0, third = 0;
  CHECK(ring.put(bytes, first));
  CHECK(ring.put(bytes, second));
  CHECK_FALSE(ring.put(bytes, third));
  CHECK(third == 0);
  CHECK_FALSE(ring.writer.regained_room());
  CHECK(ring.rung == 0);
  CHECK(equal(ring.reader->next()->payload, bytes));
  CHECK(ring.rung > 0);
  CHECK(ring.writer.regained_room());
  CHECK(ring.put(bytes, third));
  const int rung = ring.rung;
  CHECK(equal(ring.reader->next()->payload, bytes));
  CHECK(equal(ring.reader->next()->payload, bytes));
  CHECK(ring.rung == rung);  // nobody waits
}

TEST_CASE("ring: entries run out as well as slots") {
  Ring ring;
  const Bytes word = bytes_of(3, 4);
  int in = 0;
  for (std::size_t done = 0; ring.put(word, done) && in < 10'000; done = 0) ++in;
  CHECK(in == 128);
  for (int i = 0; i < in; ++i) CHECK(equal(ring.reader->next()->payload, word));
  CHECK_FALSE(ring.reader->next());
}

TEST_CASE("ring: what the receiver keeps stops nothing, and may be let go of in any order") {
  Ring ring;
  std::vector<Payload> kept;
  for (std::uint32_t i = 0; i < 50; ++i) {
    std::size_t done = 0;
    REQUIRE(ring.put(bytes_of(i, 200'000), done));
    kept.push_back(ring.reader->next()->payload);
  }
  for (std::uint32_t i = 0; i < 50; ++i) CHECK(equal(kept[i], bytes_of(i, 200'000)));
  std::shuffle(kept.begin(), kept.end(), std::mt19937(4));
  kept.clear();
  // All slots are back: as many fit as into a new ring.
  std::size_t one = 0, two = 0;
  CHECK(ring.put(bytes_of(5, 1 << 20), one));
  CHECK(ring.put(bytes_of(5, 1 << 20), two));
}

TEST_CASE("ring: what is no message, or gives back what it has not, is an error") {
  const auto spoil = [](const auto& change) {
    Ring ring;
    std::size_t done = 0;
    REQUIRE(ring.put(bytes_of(6, 5000), done));
    // The sender's own memory, by another mapping of it.
    const auto memory =
        transport::SharedMemory::open_of(getpid(), ring.teams[0]->line(1).ring.load() - 1, 128 * 1024 + 8 * (256 << 10),
                                         transport::SharedMemory::Access::read_and_write);
    change(ring, memory.data());
    CHECK_THROWS_AS(ring.reader->next(), Error);
  };
  spoil([](Ring&, std::byte* entry) { entry[0] = std::byte{9}; });                     // kind
  spoil([](Ring&, std::byte* entry) { entry[1] = std::byte{8}; });                     // slot
  spoil([](Ring&, std::byte* entry) { entry[1] = std::byte{0xff}; });                  // 5000 bytes in an entry
  spoil([](Ring&, std::byte* entry) { std::memset(entry + 4, 0xff, 4); });             // length
  spoil([](Ring& ring, std::byte*) { ring.teams[0]->line(1).put.store(1'000'000); });  // more than there can be
  Ring ring;
  ring.teams[1]->line(0).returned.store(1);
  std::size_t done = 0;
  CHECK_THROWS_AS(ring.put(bytes_of(6, 5000), done), Error);
}

// ---- roads ----

class Log final : public transport::Receiver {
 public:
  void on_data(int from, const Tag& tag, Payload payload) override {
    if (delay_ > Duration::zero()) std::this_thread::sleep_for(delay_);
    const std::lock_guard lock(mutex_);
    data_[from].emplace_back(tag.sequence, Bytes(payload.bytes().begin(), payload.bytes().end()));
    if (keep_) kept_.push_back(std::move(payload));
  }
  void on_control(int from, Payload payload) override {
    const std::lock_guard lock(mutex_);
    control_[from].emplace_back(payload.bytes().begin(), payload.bytes().end());
  }
  void on_lost(int rank, bool left, const Error& cause) override {
    const std::lock_guard lock(mutex_);
    lost_.emplace(rank, (left ? "left: " : "") + std::string(cause.what()));
  }

  std::vector<std::pair<std::uint64_t, Bytes>> data(int from) const {
    const std::lock_guard lock(mutex_);
    const auto found = data_.find(from);
    return found == data_.end() ? std::vector<std::pair<std::uint64_t, Bytes>>{} : found->second;
  }
  std::vector<Bytes> control(int from) const {
    const std::lock_guard lock(mutex_);
    const auto found = control_.find(from);
    return found == control_.end() ? std::vector<Bytes>{} : found->second;
  }
  std::string lost(int rank) const {
    const std::lock_guard lock(mutex_);
    const auto found = lost_.find(rank);
    return found == lost_.end() ? "" : found->second;
  }

  Duration delay_{};
  bool keep_ = false;

 private:
  mutable std::mutex mutex_;
  std::map<int, std::vector<std::pair<std::uint64_t, Bytes>>> data_;
  std::map<int, std::vector<Bytes>> control_;
  std::map<int, std::string> lost_;
  std::vector<Payload> kept_;
};

struct Roads {
  explicit Roads(int world) : logs(static_cast<std::size_t>(world)) {
    for (auto& team : teams_of(world)) roads.push_back(std::make_shared<HostRoad>(team, kPatience));
  }
  ~Roads() {
    for (auto& road : roads) road->close({});
  }
  void start(int rank) { roads[static_cast<std::size_t>(rank)]->start(logs[static_cast<std::size_t>(rank)]); }

  std::vector<Log> logs;
  std::vector<std::shared_ptr<HostRoad>> roads;
};

TEST_CASE("road: everyone sends to everyone at once, and all comes, in order") {
  const int world = 4;
  const std::uint32_t count = kSanitized ? 40 : 200;
  Roads all(world);
  all.logs[2].delay_ = milliseconds(1);
  all.logs[3].keep_ = true;
  for (int rank = 0; rank < world; ++rank) all.start(rank);
  const auto size_of_turn = [](std::uint32_t turn) { return kSizes[turn % kSizes.size()] / (turn % 3 + 1); };
  const auto seed = [](int from, int to, std::uint32_t turn) {
    return turn * 100 + static_cast<std::uint32_t>(from * 10 + to);
  };
  std::vector<std::thread> senders;
  for (int rank = 0; rank < world; ++rank) {
    senders.emplace_back([&, rank] {
      std::vector<Outcome> sent(count * world);
      std::vector<Bytes> lent;
      lent.reserve(count * world);
      std::size_t calls = 0;
      for (std::uint32_t turn = 0; turn < count; ++turn) {
        for (int peer = 0; peer < world; ++peer) {
          if (peer == rank) continue;
          lent.push_back(bytes_of(seed(rank, peer, turn), size_of_turn(turn)));
          auto& road = *all.roads[static_cast<std::size_t>(rank)];
          Outcome& outcome = sent[calls++];
          road.send(peer, {turn, 0, 0, 0}, lent.back(),
                    [&outcome](Result<Nothing> result) { outcome.set(result.ok() ? nullptr : &result.error()); });
          if (turn % 5 == 0) road.send_control(peer, bytes_of(turn, turn));
        }
      }
      for (std::size_t i = 0; i < calls; ++i) {
        CHECK(sent[i].wait());
        CHECK_FALSE(sent[i].error());
      }
    });
  }
  for (auto& sender : senders) sender.join();
  for (int rank = 0; rank < world; ++rank) {
    for (int peer = 0; peer < world; ++peer) {
      if (peer == rank) continue;
      const Log& log = all.logs[static_cast<std::size_t>(rank)];
      REQUIRE(eventually([&] { return log.data(peer).size() == count && log.control(peer).size() == count / 5; }));
      const auto data = log.data(peer);
      for (std::uint32_t turn = 0; turn < count; ++turn) {
        CHECK(data[turn].first == turn);
        CHECK(data[turn].second == bytes_of(seed(peer, rank, turn), size_of_turn(turn)));
      }
      const auto control = log.control(peer);
      for (std::uint32_t i = 0; i < count / 5; ++i) CHECK(control[i] == bytes_of(i * 5, i * 5));
    }
  }
}

TEST_CASE("road: what was sent before leaving comes, even to a rank that begins later, and then the goodbye") {
  Roads two(2);
  two.start(0);
  const Bytes bytes = bytes_of(1, 3 << 18);
  Outcome sent;
  std::thread leaving([&] {
    for (int i = 0; i < 5; ++i) two.roads[0]->send(1, {}, bytes, [](Result<Nothing>) {});
    two.roads[0]->send(1, {}, bytes,
                       [&](Result<Nothing> result) { sent.set(result.ok() ? nullptr : &result.error()); });
    two.roads[0]->close(kPatience);
  });
  std::this_thread::sleep_for(milliseconds(50));
  CHECK(sent.calls() == 0);  // more than a ring holds
  two.start(1);
  leaving.join();
  CHECK(sent.wait());
  CHECK_FALSE(sent.error());
  CHECK(eventually([&] { return !two.logs[1].lost(0).empty(); }));
  CHECK(two.logs[1].lost(0) == "left: it left the group");
  CHECK(two.logs[1].data(0).size() == 6);
  Outcome late;
  two.roads[1]->send(0, {}, bytes, [&](Result<Nothing> result) { late.set(result.ok() ? nullptr : &result.error()); });
  CHECK(late.error());
}

TEST_CASE("road: a rank that left is told to whoever turns to it, and to nobody else") {
  Roads three(3);
  for (int rank = 0; rank < 3; ++rank) three.start(rank);
  CHECK_FALSE(three.roads[0]->connected(1));
  three.roads[1]->connect(0);
  CHECK(three.roads[0]->connected(1));
  three.roads[0]->close({});
  CHECK(eventually([&] { return !three.logs[1].lost(0).empty(); }));
  std::this_thread::sleep_for(milliseconds(50));
  CHECK(three.logs[2].lost(0).empty());
  three.roads[2]->connect(0);
  CHECK(eventually([&] { return !three.logs[2].lost(0).empty(); }));
}

TEST_CASE("road: closing ends what nobody takes, and gives the memory back") {
  auto teams = teams_of(2);
  const std::weak_ptr<HostTeam> watched = teams[0];
  auto road = std::make_shared<HostRoad>(std::move(teams[0]), kPatience);
  Log log;
  road->start(log);
  const Bytes bytes = bytes_of(1, 1 << 20);
  std::vector<Outcome> sent(3);
  for (Outcome& outcome : sent) {
    road->send(1, {}, bytes, [&](Result<Nothing> result) { outcome.set(result.ok() ? nullptr : &result.error()); });
  }
  road->close(milliseconds(20));
  CHECK(sent[0].wait());
  CHECK(sent[2].wait());
  CHECK(sent[2].error());
  CHECK(watched.expired());
}

}  // namespace

#endif  // __linux__
