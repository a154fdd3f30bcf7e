// What the schedule makers share: a builder that numbers messages and drops empty ranges, and the list of makers.
// Internal to collective/: everyone else calls make_schedule.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "collective/schedule.hpp"

namespace torch_iroh::collective {

// Appends steps in program order. An empty range makes no step at all; both ends of a pair see the same count, so
// they drop the same messages and their numbering stays in step.
class ScheduleBuilder {
 public:
  void send(std::int32_t peer, Slice from) {
    if (from.count > 0) add({StepKind::send, peer, sent_[peer]++, from, {}});
  }
  void recv(std::int32_t peer, Slice to) {
    if (to.count > 0) add({StepKind::recv, peer, received_[peer]++, {}, to});
  }
  void recv_reduce(std::int32_t peer, Slice from, Slice to) {
    if (to.count > 0) add({StepKind::recv_reduce, peer, received_[peer]++, from, to});
  }
  void copy(Slice from, Slice to) {
    if (to.count > 0) add({StepKind::copy, -1, 0, from, to});
  }
  void finish(Slice to) {
    if (to.count > 0) add({StepKind::finish, -1, 0, {}, to});
  }
  void lend_scratch(std::uint64_t count) { schedule_.scratch_count = count; }
  Schedule take() { return std::move(schedule_); }

 private:
  void add(Step step) { schedule_.steps.push_back(step); }

  Schedule schedule_;
  std::unordered_map<std::int32_t, std::uint32_t> sent_;
  std::unordered_map<std::int32_t, std::uint32_t> received_;
};

inline Slice slice_of(Buffer buffer, Range range) {
  return {buffer, range.offset, range.count};
}

// `rank` modulo `world`, also for ranks below zero.
inline std::int32_t wrap(std::int64_t rank, std::int32_t world) {
  return static_cast<std::int32_t>(((rank % world) + world) % world);
}

// Where each rank's block lies when the blocks stand in rank order.
inline std::vector<Range> ranges_of(const std::vector<std::uint64_t>& blocks) {
  std::vector<Range> ranges;
  ranges.reserve(blocks.size());
  std::uint64_t offset = 0;
  for (const std::uint64_t count : blocks) {
    ranges.push_back({offset, count});
    offset += count;
  }
  return ranges;
}

// The makers; `make_checked` calls the one for a request that has been checked.
Schedule make_checked(const Request& request);

Schedule ring_all_reduce(const Request& request);
Schedule ring_all_gather(const Request& request);
Schedule ring_reduce_scatter(const Request& request);
Schedule chain_broadcast(const Request& request);
Schedule chain_reduce(const Request& request);

Schedule direct_all_reduce(const Request& request);
Schedule direct_all_gather(const Request& request);
Schedule direct_reduce_scatter(const Request& request);
Schedule direct_broadcast(const Request& request);
Schedule direct_reduce(const Request& request);
Schedule direct_gather(const Request& request);
Schedule direct_scatter(const Request& request);
Schedule direct_all_to_all(const Request& request);

Schedule dissemination_barrier(const Request& request);

Schedule bidirectional_all_reduce(const Request& request);
Schedule bidirectional_all_gather(const Request& request);
Schedule bidirectional_reduce_scatter(const Request& request);

Schedule tree_all_reduce(const Request& request);
Schedule tree_broadcast(const Request& request);
Schedule tree_reduce(const Request& request);
Schedule tree_gather(const Request& request);
Schedule tree_scatter(const Request& request);

Schedule butterfly_all_reduce(const Request& request);
Schedule butterfly_all_gather(const Request& request);
Schedule butterfly_reduce_scatter(const Request& request);

Schedule bruck_all_gather(const Request& request);
Schedule bruck_all_to_all(const Request& request);

Schedule hierarchical_all_reduce(const Request& request);
Schedule hierarchical_reduce(const Request& request);
Schedule hierarchical_broadcast(const Request& request);
Schedule hierarchical_barrier(const Request& request);
Schedule hierarchical_all_gather(const Request& request);
Schedule hierarchical_reduce_scatter(const Request& request);
Schedule hierarchical_gather(const Request& request);
Schedule hierarchical_scatter(const Request& request);

}  // namespace torch_iroh::collective
