// Collectives among ranks that share memory. The ranks are threads of this process, each with its own mappings: what
// they do is what processes do. Every operation against a plain reference, with and without reading each other's
// buffers, in one round and in many; mismatches, ranks that leave, fail or never come.
#include <doctest/doctest.h>

#ifdef __linux__

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "collective/failure_text.hpp"
#include "collective/host_queue.hpp"
#include "support.hpp"
#include "transport/host_team.hpp"

namespace {

using namespace torch_iroh;
using namespace torch_iroh::testing;
using collective::CollectiveCall;
using collective::HostQueue;
using collective::Op;
using transport::HostTeam;

const std::vector<Op> kOps = {Op::all_reduce, Op::reduce,  Op::broadcast,  Op::all_gather, Op::reduce_scatter,
                              Op::gather,     Op::scatter, Op::all_to_all, Op::barrier};
const std::vector<int> kWorlds = kSanitized ? std::vector<int>{2, 3, 5} : std::vector<int>{2, 3, 4, 5, 7, 8};
// More than a window holds (262,144 floats), and two rounds of it.
constexpr std::uint64_t kManyRounds = 600'011;

// The ranks of one host, as their groups would hold them.
class World {
 public:
  explicit World(int world, bool direct = true) {
    std::vector<std::unique_ptr<HostTeam>> teams;
    std::vector<transport::HostIntroduction> introductions;
    for (int rank = 0; rank < world; ++rank) {
      teams.push_back(std::make_unique<HostTeam>(rank, world));
      introductions.push_back(teams.back()->introduction());
    }
    for (auto& team : teams) team->attach(introductions);
    for (auto& team : teams) {
      reads_ = reads_ && team->can_read();
      team->settle(direct);
    }
    for (int rank = 0; rank < world; ++rank) {
      HostQueue::Hooks hooks;
      hooks.fail = [this, rank](const Error& cause, const std::string& news) {
        queues_[static_cast<std::size_t>(rank)]->fail(cause, news);
      };
      hooks.ended = [] {};
      queues_.push_back(
          std::make_shared<HostQueue>(std::move(teams[static_cast<std::size_t>(rank)]), kPatience, hooks));
    }
  }
  ~World() {
    for (auto& queue : queues_) queue->fail(Error(ErrorKind::aborted, "the test is over"), "");
    for (auto& queue : queues_) queue->close();
  }

  int size() const { return static_cast<int>(queues_.size()); }
  bool reads() const { return reads_; }  // the kernel permits it, also within one process
  HostQueue& operator[](int rank) { return *queues_[static_cast<std::size_t>(rank)]; }

 private:
  std::vector<std::shared_ptr<HostQueue>> queues_;
  bool reads_ = true;
};

// One rank's part of one operation over floats that sums hold exactly.
struct Part {
  std::vector<float> input;
  std::vector<float> output;
  std::vector<float> expected;
  CollectiveCall call;
  std::shared_ptr<Outcome> outcome = std::make_shared<Outcome>();
};

float value(int rank, std::uint64_t index) {
  return static_cast<float>((static_cast<std::uint64_t>(rank) * 7 + index) % 97);
}

// Elements that `from` has for `to` in an all_to_all.
std::uint64_t amount(int from, int to, std::uint64_t count) {
  return count * static_cast<std::uint64_t>((from * 2 + to * 3) % 4) / 2;
}

Part make_part(Op op, int rank, int world, std::uint64_t count, int root) {
  Part part;
  auto& request = part.call.request;
  request.op = op;
  request.rank = rank;
  request.world = world;
  request.root = root;
  part.call.work.dtype = DType::float32;
  part.call.work.reduce = ReduceOp::sum;
  part.call.shape = "[" + std::to_string(count) + "]";
  const auto ranks = static_cast<std::size_t>(world);
  const auto values = [](int of, std::uint64_t first, std::uint64_t length) {
    std::vector<float> made(length);
    for (std::uint64_t i = 0; i < length; ++i) made[i] = value(of, first + i);
    return made;
  };
  const auto sums = [&](std::uint64_t first, std::uint64_t length) {
    std::vector<float> made(length);
    for (int of = 0; of < world; ++of) {
      for (std::uint64_t i = 0; i < length; ++i) made[i] += value(of, first + i);
    }
    return made;
  };
  const auto append = [](std::vector<float>& to, const std::vector<float>& more) {
    to.insert(to.end(), more.begin(), more.end());
  };
  // Blocks of different lengths, one of them empty.
  std::vector<std::uint64_t> blocks(ranks);
  std::vector<std::uint64_t> firsts(ranks);
  for (std::size_t i = 0; i < ranks; ++i) {
    blocks[i] = i % 3 == 1 ? 0 : count + i;
    firsts[i] = i == 0 ? 0 : firsts[i - 1] + blocks[i - 1];
  }
  const auto me = static_cast<std::size_t>(rank);
  const std::uint64_t total = firsts.back() + blocks.back();
  const bool is_root = rank == root;
  switch (op) {
    case Op::all_reduce:
      request.count = count;
      part.output = values(rank, 0, count);
      part.expected = sums(0, count);
      break;
    case Op::reduce:
      request.count = count;
      part.input = values(rank, 0, count);
      part.output.assign(is_root ? count : 0, -1);
      if (is_root) part.expected = sums(0, count);
      break;
    case Op::broadcast:
      request.count = count;
      part.expected = values(root, 0, count);
      part.output = is_root ? part.expected : std::vector<float>(count, -1);
      break;
    case Op::all_gather:
    case Op::gather:
      request.blocks = blocks;
      part.input = values(rank, 3, blocks[me]);
      if (op == Op::gather && !is_root) break;
      part.output.assign(total, -1);
      for (int of = 0; of < world; ++of) append(part.expected, values(of, 3, blocks[static_cast<std::size_t>(of)]));
      break;
    case Op::scatter:
      request.blocks = blocks;
      if (is_root) part.input = values(root, 0, total);
      part.output.assign(blocks[me], -1);
      part.expected = values(root, firsts[me], blocks[me]);
      break;
    case Op::reduce_scatter:
      request.blocks = blocks;
      part.input = values(rank, 0, total);
      part.output.assign(blocks[me], -1);
      part.expected = sums(firsts[me], blocks[me]);
      break;
    case Op::all_to_all:
      for (int peer = 0; peer < world; ++peer) {
        request.send_blocks.push_back(amount(rank, peer, count));
        request.blocks.push_back(amount(peer, rank, count));
        append(part.input, values(rank, static_cast<std::uint64_t>(peer), request.send_blocks.back()));
        append(part.expected, values(peer, static_cast<std::uint64_t>(rank), request.blocks.back()));
      }
      part.output.assign(part.expected.size(), -1);
      break;
    case Op::barrier: break;
  }
  return part;
}

void push(HostQueue& queue, Part& part, std::uint64_t sequence, Duration limit = kPatience) {
  part.call.work.input = reinterpret_cast<const std::byte*>(part.input.data());
  part.call.work.output = reinterpret_cast<std::byte*>(part.output.data());
  part.call.timeout = limit;
  part.call.done = [outcome = part.outcome](const Error* error) { outcome->set(error); };
  queue.push(sequence, part.call, after(Clock::now(), limit));
}

void check(const Part& part, const std::vector<float>& input_before, const std::string& label) {
  INFO(label);
  REQUIRE(part.outcome->wait());
  if (const auto error = part.outcome->error()) FAIL(error->what());
  CHECK(part.outcome->calls() == 1);
  CHECK(part.input == input_before);
  CHECK(part.output == part.expected);
}

std::string text_of(const Outcome& outcome) {
  REQUIRE(outcome.wait());
  const auto error = outcome.error();
  REQUIRE(error.has_value());
  return error->what();
}

}  // namespace

TEST_CASE("host: every operation equals its reference, by one thread for all ranks") {
  for (const bool direct : {true, false}) {
    for (const int world : kWorlds) {
      World ranks(world, direct);
      if (direct && !ranks.reads()) continue;
      std::uint64_t sequence = 0;
      for (const std::uint64_t count : {std::uint64_t{1}, std::uint64_t{13}, std::uint64_t{9001}, kManyRounds}) {
        if (count == kManyRounds && (world > 3 || kSanitized)) continue;
        for (const Op op : kOps) {
          const int root = static_cast<int>(sequence) % world;
          std::vector<Part> parts;
          for (int rank = 0; rank < world; ++rank) parts.push_back(make_part(op, rank, world, count, root));
          const std::vector<Part> before = parts;
          for (int rank = 0; rank < world; ++rank) {
            push(ranks[rank], parts[static_cast<std::size_t>(rank)], sequence);
            ranks[rank].attend();
          }
          for (std::size_t i = 0; i < parts.size(); ++i) {
            check(parts[i], before[i].input,
                  std::string(name_of(op)) + " world " + std::to_string(world) + " count " + std::to_string(count) +
                      " rank " + std::to_string(i) + (direct ? " direct" : " windows"));
          }
          ++sequence;
        }
      }
    }
  }
}

TEST_CASE("host: a rank that shows little in its window takes much from one that shows directly, and the other way") {
  constexpr std::uint64_t kMuch = 400'000;
  World ranks(2);
  std::uint64_t sequence = 0;
  for (const int generous : {0, 1}) {
    std::vector<Part> parts(2);
    for (int rank = 0; rank < 2; ++rank) {
      Part& part = parts[static_cast<std::size_t>(rank)];
      part = make_part(Op::all_to_all, rank, 2, 0, 0);
      const auto peer = static_cast<std::size_t>(1 - rank);
      part.call.request.send_blocks[peer] = rank == generous ? kMuch : 5;
      part.call.request.blocks[peer] = rank == generous ? 5 : kMuch;
      for (std::uint64_t i = 0; i < part.call.request.send_blocks[peer]; ++i) part.input.push_back(value(rank, i));
      for (std::uint64_t i = 0; i < part.call.request.blocks[peer]; ++i) part.expected.push_back(value(1 - rank, i));
      part.output.assign(part.expected.size(), -1);
    }
    const auto before = parts;
    for (int rank = 0; rank < 2; ++rank) {
      push(ranks[rank], parts[static_cast<std::size_t>(rank)], sequence);
      ranks[rank].attend();
    }
    for (std::size_t i = 0; i < 2; ++i) check(parts[i], before[i].input, "rank " + std::to_string(i));
    ++sequence;
  }
}

TEST_CASE("host: callers that drive their own operations, many in flight") {
  for (const bool direct : {true, false}) {
    constexpr int kWorld = 3;
    World ranks(kWorld, direct);
    if (direct && !ranks.reads()) continue;
    constexpr std::uint64_t kRounds = kSanitized ? 60 : 400;
    std::vector<std::vector<Part>> parts(kWorld);
    for (int rank = 0; rank < kWorld; ++rank) {
      for (std::uint64_t i = 0; i < kRounds; ++i) {
        const std::uint64_t count = i % 10 == 9 ? 50'000 : i % 7;
        parts[static_cast<std::size_t>(rank)].push_back(
            make_part(kOps[i % kOps.size()], rank, kWorld, count, static_cast<int>(i % kWorld)));
      }
    }
    const auto before = parts;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kWorld; ++rank) {
      threads.emplace_back([&, rank] {
        auto& mine = parts[static_cast<std::size_t>(rank)];
        for (std::uint64_t i = 0; i < mine.size(); ++i) {
          push(ranks[rank], mine[i], i);
          // Some are waited for, some are left to the thread of the process.
          if ((i + static_cast<std::uint64_t>(rank)) % 3 == 0) {
            ranks[rank].drive(i);
          } else {
            ranks[rank].attend();
          }
        }
        ranks[rank].drive(mine.size() - 1);
      });
    }
    for (auto& thread : threads) thread.join();
    for (int rank = 0; rank < kWorld; ++rank) {
      for (std::uint64_t i = 0; i < kRounds; ++i) {
        const auto index = static_cast<std::size_t>(rank);
        check(parts[index][i], before[index][i].input, "rank " + std::to_string(rank) + " #" + std::to_string(i));
      }
    }
  }
}

TEST_CASE("host: two different calls are an error that names both, on every rank") {
  World ranks(3);
  std::vector<Part> parts;
  for (int rank = 0; rank < 3; ++rank) {
    parts.push_back(make_part(Op::all_reduce, rank, 3, rank == 1 ? 14 : 13, 0));
  }
  for (int rank = 0; rank < 3; ++rank) {
    push(ranks[rank], parts[static_cast<std::size_t>(rank)], 0);
    ranks[rank].attend();
  }
  for (int rank = 0; rank < 3; ++rank) {
    const std::string text = text_of(*parts[static_cast<std::size_t>(rank)].outcome);
    INFO(text);
    CHECK(contains(text, "the ranks disagree about collective #0"));
    CHECK(contains(text, "float32[13]"));
    CHECK(contains(text, "float32[14]"));
  }
}

TEST_CASE("host: two calls that nobody compares are found out by the next one") {
  World ranks(2);
  std::vector<std::vector<Part>> parts(2);
  for (int rank = 0; rank < 2; ++rank) {
    // Each is its own root, and its bytes are in its window: none waits for the other.
    auto& mine = parts[static_cast<std::size_t>(rank)];
    mine.push_back(make_part(Op::broadcast, rank, 2, 13, rank));
    mine.push_back(make_part(Op::barrier, rank, 2, 0, 0));
    for (std::uint64_t i = 0; i < 2; ++i) push(ranks[rank], mine[i], i);
    ranks[rank].attend();
  }
  for (const auto& mine : parts) {
    const std::string text = text_of(*mine[1].outcome);
    INFO(text);
    CHECK(contains(text, "the ranks disagree about collective #0"));
    CHECK(contains(text, "root 0"));
    CHECK(contains(text, "root 1"));
  }
}

TEST_CASE("host: an all_to_all whose amounts do not meet names the two ranks") {
  World ranks(2);
  std::vector<Part> parts{make_part(Op::all_to_all, 0, 2, 8, 0), make_part(Op::all_to_all, 1, 2, 8, 0)};
  parts[0].call.request.send_blocks[1] -= 1;
  for (int rank = 0; rank < 2; ++rank) {
    push(ranks[rank], parts[static_cast<std::size_t>(rank)], 0);
    ranks[rank].attend();
  }
  REQUIRE(parts[0].outcome->wait());  // it hears of it
  const std::string text = text_of(*parts[1].outcome);
  CHECK(contains(text, "rank 0 sends"));
  CHECK(contains(text, "to rank 1, which expects"));
}

TEST_CASE("host: a rank that never comes is named when the time is over") {
  World ranks(3);
  std::vector<Part> parts{make_part(Op::all_reduce, 0, 3, 13, 0), make_part(Op::all_reduce, 1, 3, 13, 0)};
  push(ranks[1], parts[1], 0);
  ranks[1].attend();
  push(ranks[0], parts[0], 0, milliseconds(200));
  ranks[0].drive(0);
  const std::string text = text_of(*parts[0].outcome);
  CHECK(contains(text, "Timed out waiting 200ms on rank 0"));
  CHECK(contains(text, "still waiting for rank 2 (rank 2 never began this operation)"));
  // The other one hears of it at once.
  const std::string news = text_of(*parts[1].outcome);
  CHECK(contains(news, "Timed out waiting 200ms on rank 0"));
  CHECK(contains(news, "(reported by rank 0)"));
}

TEST_CASE("host: a rank that has left is missed only by what still needs it") {
  World ranks(2);
  std::vector<Part> parts{make_part(Op::broadcast, 0, 2, 13, 0), make_part(Op::broadcast, 1, 2, 13, 0)};
  push(ranks[0], parts[0], 0);
  ranks[0].drive(0);  // its bytes are in its window: it need not wait
  CHECK(parts[0].outcome->calls() == 1);
  ranks[0].leave();
  push(ranks[1], parts[1], 0);
  ranks[1].drive(0);
  check(parts[1], {}, "after the root has left");
  Part barrier = make_part(Op::barrier, 1, 2, 0, 0);
  push(ranks[1], barrier, 1);
  ranks[1].drive(1);
  CHECK(contains(text_of(*barrier.outcome), "rank 0 is gone: it left the group"));
}

TEST_CASE("host: an operation whose memory is held begins after its release, and those behind it wait") {
  World ranks(2);
  std::vector<std::vector<Part>> parts(2);
  for (int rank = 0; rank < 2; ++rank) {
    auto& mine = parts[static_cast<std::size_t>(rank)];
    mine.push_back(make_part(Op::all_reduce, rank, 2, 13, 0));
    mine.push_back(make_part(Op::all_reduce, rank, 2, 14, 0));
    mine[0].call.held = rank == 0;
    push(ranks[rank], mine[0], 0);
    push(ranks[rank], mine[1], 1);
    ranks[rank].attend();
  }
  std::this_thread::sleep_for(milliseconds(30));
  CHECK(parts[0][0].outcome->calls() == 0);
  CHECK(parts[1][1].outcome->calls() == 0);
  ranks[0].release(0);
  for (auto& mine : parts) {
    for (Part& part : mine) check(part, {}, "released");
  }
}

TEST_CASE("host: memory of another group or of nobody is not taken for that of a rank") {
  HostTeam first(0, 2);
  HostTeam second(1, 2);
  HostTeam stranger(1, 2);
  auto introductions = std::vector{first.introduction(), second.introduction()};
  introductions[1].memory = stranger.introduction().memory;
  CHECK_THROWS_AS(first.attach(introductions), Error);
  introductions[1].memory = 0;  // stdin
  CHECK_THROWS_AS(first.attach(introductions), Error);
  introductions[1].memory = 987'654;
  CHECK_THROWS_AS(first.attach(introductions), Error);
}

#endif  // __linux__
