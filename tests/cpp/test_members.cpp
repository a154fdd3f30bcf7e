// Collectives of some ranks of a group: the schedules are those of a world of the members alone, AVG divides by the
// group's world, others' numbers stay in step, and who listens for the group's failure hears of it once.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "collective/group.hpp"
#include "collective/schedule.hpp"
#include "requests.hpp"
#include "support.hpp"
#include "transport/in_process.hpp"

namespace {

using namespace torch_iroh;
using namespace torch_iroh::testing;
using collective::Group;
using collective::GroupOptions;

using Members = std::shared_ptr<const std::vector<std::int32_t>>;

Members members(std::vector<std::int32_t> ranks) {
  return std::make_shared<const std::vector<std::int32_t>>(std::move(ranks));
}

}  // namespace

TEST_CASE("members: their schedules are those of a world of their own, with their ranks") {
  const Members some = members({6, 1, 4});
  for (const Op op : kOps) {
    for (const Algorithm algorithm : {Algorithm::ring, Algorithm::direct, Algorithm::tree, Algorithm::hierarchical}) {
      for (std::int32_t index = 0; index < 3; ++index) {
        Request alone = request_of(op, algorithm, 3, 7, 1);
        alone.rank = index;
        Request among = alone;
        among.world = 8;
        among.members = some;
        among.rank = (*some)[static_cast<std::size_t>(index)];
        among.root = 1;
        const auto expected = make_schedule(alone);
        const auto schedule = make_schedule(among);
        REQUIRE(schedule.steps.size() == expected.steps.size());
        for (std::size_t i = 0; i < schedule.steps.size(); ++i) {
          const std::int32_t peer = expected.steps[i].peer;
          CHECK(schedule.steps[i].peer == (peer < 0 ? peer : (*some)[static_cast<std::size_t>(peer)]));
          CHECK(schedule.steps[i].from == expected.steps[i].from);
          CHECK(schedule.steps[i].to == expected.steps[i].to);
        }
      }
    }
  }
}

TEST_CASE("members: a rank or a root that is none of them is refused by name") {
  Request request = request_of(Op::broadcast, Algorithm::direct, 8, 7, 1);
  request.members = members({6, 1, 4});
  request.rank = 2;
  CHECK_THROWS_WITH(make_schedule(request), "make_schedule(broadcast): rank 2 is not a member");
  request.rank = 1;
  request.root = 0;
  CHECK_THROWS_WITH(make_schedule(request), "make_schedule(broadcast): root 0 is not a member");
  request.members = members({1, 9});
  CHECK_THROWS_WITH(make_schedule(request), "make_schedule(broadcast): member 9 is no rank");
}

TEST_CASE("members: two halves of a group work side by side, in step, and AVG divides by the world") {
  auto ends = transport::make_in_process(5);
  std::vector<std::shared_ptr<Group>> groups;
  std::atomic<int> heard{0};
  GroupOptions options;
  options.name = "test";
  options.chunk_bytes = 256;
  for (auto& end : ends) groups.push_back(Group::make(end, options));
  for (const auto& group : groups) group->on_failure([&heard](const Error&) { ++heard; });
  const std::vector<Members> halves = {members({0, 3}), members({1, 2, 4})};
  const auto half_of = [&](std::int32_t rank) { return rank == 0 || rank == 3 ? halves[0] : halves[1]; };
  constexpr std::uint64_t kCount = 1001;
  for (int round = 0; round < 4; ++round) {
    std::vector<std::vector<float>> memory(5);
    std::vector<std::promise<bool>> ended(10);
    for (std::int32_t rank = 0; rank < 5; ++rank) {
      const auto index = static_cast<std::size_t>(rank);
      memory[index].assign(kCount, static_cast<float>(5 * (rank + round)));
      // A part that is nothing for its rank takes its number and no more.
      collective::CollectiveCall nothing;
      nothing.request.members = members({rank});
      nothing.part_of = "rank " + std::to_string(rank) + " alone";
      nothing.done = [&ended, index](const Error* error) { ended[5 + index].set_value(error == nullptr); };
      groups[index]->submit(std::move(nothing));
      collective::CollectiveCall call;
      call.request.op = Op::all_reduce;
      call.request.count = kCount;
      call.request.members = half_of(rank);
      call.part_of = "all_reduce(in halves";
      call.work.dtype = DType::float32;
      call.work.reduce = ReduceOp::avg;
      call.work.output = reinterpret_cast<std::byte*>(memory[index].data());
      call.held = true;
      call.done = [&ended, index](const Error* error) { ended[index].set_value(error == nullptr); };
      groups[index]->release(groups[index]->submit(std::move(call)));
    }
    for (auto& one : ended) CHECK(one.get_future().get());
    for (std::int32_t rank = 0; rank < 5; ++rank) {
      const auto half = half_of(rank);
      float sum = 0;
      for (const std::int32_t member : *half) sum += static_cast<float>(member + round);
      const auto& got = memory[static_cast<std::size_t>(rank)];
      CHECK(std::all_of(got.begin(), got.end(), [&](float value) { return value == sum; }));
    }
  }
  CHECK(heard == 0);
  groups[2]->abort(Error(ErrorKind::aborted, "enough"));
  for (const int rank : {1, 4}) {
    CHECK(eventually([&] { return groups[static_cast<std::size_t>(rank)]->failure().has_value(); }));
  }
  for (const auto& group : groups) group->shutdown();
  CHECK(heard == 5);
}
