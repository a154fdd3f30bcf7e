// What may hold an operation back, and what asks who is there: memory that is not ready, sizes that only earlier
// operations tell, the monitored barrier. Over the in-process transport, and the barrier's messages on their own.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective/group.hpp"
#include "support.hpp"
#include "transport/in_process.hpp"

namespace {

using namespace torch_iroh;
using namespace torch_iroh::testing;
using collective::CollectiveCall;
using collective::Group;
using collective::Message;
using collective::MessageKind;
using collective::MonitoredBarrier;
using collective::MonitoredBarrierCall;
using collective::Op;

bool passed(const Outcome& outcome) {
  return outcome.wait() && !outcome.error();
}

bool failed(const Outcome& outcome) {
  return outcome.wait() && outcome.error();
}

std::vector<std::shared_ptr<Group>> groups_of(int world) {
  std::vector<std::shared_ptr<Group>> groups;
  for (auto& transport : transport::make_in_process(world)) groups.push_back(Group::make(std::move(transport), {}));
  return groups;
}

CollectiveCall sum_of(std::vector<float>& values, const std::shared_ptr<Outcome>& outcome) {
  CollectiveCall call;
  call.request.op = Op::all_reduce;
  call.request.count = values.size();
  call.work.dtype = DType::float32;
  call.work.input = reinterpret_cast<const std::byte*>(values.data());
  call.work.output = reinterpret_cast<std::byte*>(values.data());
  call.shape = "[" + std::to_string(values.size()) + "]";
  call.done = [outcome](const Error* error) { outcome->set(error); };
  return call;
}

TEST_CASE("group: an operation whose memory is not ready begins, in its turn, when it is released") {
  const int world = 3;
  auto groups = groups_of(world);
  std::vector<std::vector<float>> first(world, std::vector<float>(100));
  std::vector<std::vector<float>> second(world, std::vector<float>(7, 1.0F));
  std::vector<std::shared_ptr<Outcome>> outcomes;
  std::vector<std::uint64_t> held;
  first[1].assign(100, 2.0F);
  for (int rank = 0; rank < world; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    for (auto* values : {&first[index], &second[index]}) {
      outcomes.push_back(std::make_shared<Outcome>());
      CollectiveCall call = sum_of(*values, outcomes.back());
      call.held = values == &first[index] && rank != 1;  // rank 1's is ready
      const std::uint64_t sequence = groups[index]->submit(std::move(call));
      if (values == &first[index]) held.push_back(sequence);
    }
  }
  std::this_thread::sleep_for(milliseconds(30));
  for (const auto& outcome : outcomes) CHECK(outcome->calls() == 0);
  for (int rank = 0; rank < world; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    if (rank == 1) continue;
    first[index].assign(100, static_cast<float>(rank + 1));  // only now is there something to sum
    groups[index]->release(held[index]);
  }
  for (const auto& outcome : outcomes) CHECK(passed(*outcome));
  for (const auto& values : first) CHECK(values == std::vector<float>(100, 6.0F));
  for (const auto& values : second) CHECK(values == std::vector<float>(7, 3.0F));
  for (auto& group : groups) group->shutdown();
}

TEST_CASE("group: memory that never becomes ready is an error when the deadline passes") {
  auto groups = groups_of(2);
  std::vector<float> values(4);
  auto outcome = std::make_shared<Outcome>();
  CollectiveCall call = sum_of(values, outcome);
  call.held = true;
  call.timeout = milliseconds(50);
  groups[0]->submit(std::move(call));
  CHECK(failed(*outcome));
  CHECK(contains(outcome->error()->what(), "Timed out waiting 50ms on rank 0, whose device"));
  for (auto& group : groups) group->shutdown();
}

TEST_CASE("group: an operation may learn its sizes from the one before it") {
  const int world = 3;
  auto groups = groups_of(world);
  struct Rank {
    std::int64_t count = 0;
    std::vector<std::int64_t> counts = std::vector<std::int64_t>(world);
    std::vector<std::int32_t> mine;
    std::vector<std::int32_t> all;
  };
  std::vector<Rank> ranks(world);
  std::vector<std::shared_ptr<Outcome>> outcomes;
  for (int rank = 0; rank < world; ++rank) {
    Rank& one = ranks[static_cast<std::size_t>(rank)];
    one.count = rank * 2;  // rank 0 has nothing
    one.mine.assign(static_cast<std::size_t>(one.count), rank);

    CollectiveCall counts;
    counts.request.op = Op::all_gather;
    counts.request.blocks.assign(world, 1);
    counts.work.dtype = DType::int64;
    counts.work.input = reinterpret_cast<const std::byte*>(&one.count);
    counts.work.output = reinterpret_cast<std::byte*>(one.counts.data());

    CollectiveCall items;
    items.request.op = Op::all_gather;
    items.work.dtype = DType::int32;
    items.work.input = reinterpret_cast<const std::byte*>(one.mine.data());
    items.prepare = [&one](CollectiveCall& call) {
      std::size_t total = 0;
      for (const std::int64_t count : one.counts) {
        call.request.blocks.push_back(static_cast<std::uint64_t>(count));
        total += static_cast<std::size_t>(count);
      }
      one.all.resize(total);
      call.work.output = reinterpret_cast<std::byte*>(one.all.data());
    };
    for (CollectiveCall* call : {&counts, &items}) {
      outcomes.push_back(std::make_shared<Outcome>());
      call->done = [outcome = outcomes.back()](const Error* error) { outcome->set(error); };
      groups[static_cast<std::size_t>(rank)]->submit(std::move(*call));
    }
  }
  for (const auto& outcome : outcomes) CHECK(passed(*outcome));
  for (const Rank& one : ranks) CHECK(one.all == std::vector<std::int32_t>{1, 1, 2, 2, 2, 2});
  for (auto& group : groups) group->shutdown();
}

// ---- the monitored barrier ----

TEST_CASE("group: the monitored barrier lets all pass, and fails without breaking the group") {
  for (const int world : {1, 2, 3, 5}) {
    auto groups = groups_of(world);
    const auto come = [&](int rank, Duration timeout) {
      auto outcome = std::make_shared<Outcome>();
      MonitoredBarrierCall call;
      call.timeout = timeout;
      call.name_all = true;
      call.done = [outcome](const Error* error) { outcome->set(error); };
      groups[static_cast<std::size_t>(rank)]->monitored_barrier(std::move(call));
      return outcome;
    };
    std::vector<std::shared_ptr<Outcome>> all;
    for (int rank = 0; rank < world; ++rank) all.push_back(come(rank, kPatience));
    for (const auto& outcome : all) CHECK(passed(*outcome));
    if (world > 1) {
      const auto alone = come(0, milliseconds(50));
      CHECK(failed(*alone));
      CHECK(contains(alone->error()->what(), "failed to pass monitoredBarrier in 50 ms"));
      CHECK(contains(alone->error()->what(), "Ranks 1"));
      const auto late = come(world - 1, kPatience);  // to the barrier that rank 0 has given up
      CHECK(failed(*late));
      CHECK(contains(late->error()->what(), "successfully reached monitoredBarrier"));
    }
    for (auto& group : groups) CHECK(!group->failure());
    for (auto& group : groups) group->shutdown();
  }
}

TEST_CASE("monitored barrier: messages that make no sense are refused") {
  MonitoredBarrier head(0, 3, [](int, const Message&) {});
  MonitoredBarrier other(1, 3, [](int, const Message&) {});
  Message arrive{.kind = MessageKind::arrive};
  Message verdict{.kind = MessageKind::verdict};
  CHECK_THROWS_AS(other.on_arrive(2, arrive), Error);
  CHECK_THROWS_AS(other.on_verdict(2, verdict), Error);
  head.on_arrive(1, arrive);
  CHECK_THROWS_AS(head.on_arrive(1, arrive), Error);
  other.on_verdict(0, verdict);  // of a barrier that it has given up: nothing to do
}

}  // namespace
