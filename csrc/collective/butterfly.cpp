// Algorithm::butterfly: halve the distance and the data in every round to reduce-scatter, double both again to
// all-gather. As few rounds as a tree and as few bytes as a ring, for any number of ranks. Best for medium tensors in
// larger worlds.
//
// Words: N ranks; S elements in all; a shard is shard_of(S, N, i), a block is what the request says; a *run* is some
// blocks in a row (mod N). A run that passes block N-1 is two ranges, hence two messages. Empty ones are not sent.
//
// N a power of two: recursive halving and doubling (Rabenseifner). 4 ranks:
//   reduce-scatter  distance 2: 0 <-> 2, 1 <-> 3: each sends the half of the blocks where it is not itself, adds the
//                   other to its own half;  distance 1: 0 <-> 1, 2 <-> 3: likewise with that half
//   all-gather      the same backwards
// Any other N: the same on a circle (Traeff), where nobody is folded in and out and nobody sends more. The *reaches*
// are N, ceil(N/2), ceil(N/4), ..., 1: at reach s rank r still works on the blocks r, r+1, ..., r+s-1. 5 ranks, mod 5:
//   reduce-scatter  5 -> 3: r sends blocks r+3, r+4 to r+3, adds what r-3 sends to blocks r, r+1
//                   3 -> 2: r sends block r+2 to r+2, adds what r-2 sends to block r
//                   2 -> 1: r sends block r+1 to r+1, adds what r-1 sends to block r, which is whole now
//   all-gather      the same backwards: r sends block r to r-1; block r to r-2; blocks r, r+1 to r-3
// Every block is summed once, along one tree that ends at its owner, and the owner's bits are what all others get.
//
// Source: R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; J. L. Traeff, "Optimal,
// non-pipelined reduce-scatter and allreduce algorithms", arXiv:2410.14234, 2024.
#include <algorithm>
#include <utility>

#include "collective/builder.hpp"

namespace torch_iroh::collective {

namespace {

struct Run {
  std::int32_t first = 0;
  std::int32_t count = 0;
};

// A round of the reduce-scatter. The all-gather goes through the rounds from the last on, and in each direction back:
// it sends `get` to `from`, and receives `give` from `to`.
struct Round {
  std::int32_t to = 0, from = 0;
  Run give, get;
};

std::vector<Round> rounds_of(std::int32_t rank, std::int32_t world) {
  std::vector<Round> rounds;
  if ((world & (world - 1)) == 0) {
    for (std::int32_t distance = world / 2; distance > 0; distance /= 2) {
      const std::int32_t partner = rank ^ distance;
      rounds.push_back({partner, partner, {partner & -distance, distance}, {rank & -distance, distance}});
    }
    return rounds;
  }
  for (std::int32_t reach = world; reach > 1;) {
    const std::int32_t keep = (reach + 1) / 2;
    const std::int32_t to = wrap(std::int64_t{rank} + keep, world);
    rounds.push_back({to, wrap(std::int64_t{rank} - keep, world), {to, reach - keep}, {rank, reach - keep}});
    reach = keep;
  }
  return rounds;
}

// The ranges of a run. `block(i)` is where block i lies, for i in 0..world-1, one behind the other.
template <typename Block>
std::vector<Range> ranges_of_run(Run run, std::int32_t world, const Block& block) {
  const auto range = [&](std::int32_t from, std::int32_t count) {
    const Range first = block(from);
    const Range last = block(from + count - 1);
    return Range{first.offset, last.offset + last.count - first.offset};
  };
  const std::int32_t whole = std::min(run.count, world - run.first);
  std::vector<Range> ranges = {range(run.first, whole)};
  if (run.count > whole) ranges.push_back(range(0, run.count - whole));
  return ranges;
}

// The second half: all have their own block of output, all end with all.
template <typename Block>
void gather_all(ScheduleBuilder& builder, const Request& request, const Block& block) {
  const std::vector<Round> rounds = rounds_of(request.rank, request.world);
  for (auto round = rounds.rbegin(); round != rounds.rend(); ++round) {
    for (const Range& range : ranges_of_run(round->get, request.world, block))
      builder.send(round->from, slice_of(Buffer::output, range));
    for (const Range& range : ranges_of_run(round->give, request.world, block))
      builder.recv(round->to, slice_of(Buffer::output, range));
  }
}

}  // namespace

// In place in output. 2 log2 N messages for a power of two; else at most 4 ceil(log2 N) - 2, and 2 ceil(log2 N) at
// ranks whose runs pass no end. 2S(N-1)/N elements when N divides S. log2 N peers, or twice that.
// What was sent is not touched again until the all-gather overwrites it: write after read, so it waits for that send.
Schedule butterfly_all_reduce(const Request& request) {
  const auto shard = [&](std::int32_t index) { return shard_of(request.count, request.world, index); };
  ScheduleBuilder builder;
  for (const Round& round : rounds_of(request.rank, request.world)) {
    for (const Range& range : ranges_of_run(round.give, request.world, shard))
      builder.send(round.to, slice_of(Buffer::output, range));
    for (const Range& range : ranges_of_run(round.get, request.world, shard))
      builder.recv_reduce(round.from, slice_of(Buffer::output, range), slice_of(Buffer::output, range));
  }
  builder.finish(slice_of(Buffer::output, shard(request.rank)));
  gather_all(builder, request, shard);
  return builder.take();
}

// The first half, out of place: partial sums live in scratch, side by side, so only the messages of the first round,
// which read input, may be two. ceil(log2 N) messages, or one more; S - block(r) elements.
// With N odd the first round leaves the last block of the run unsummed: it is copied. Scratch: ceil(N/2) blocks.
// In place: input's own block is read in the first round only, and what writes output depends on that sum (or is it).
Schedule butterfly_reduce_scatter(const Request& request) {
  const std::int32_t world = request.world;
  const std::vector<Range> blocks = ranges_of(request.blocks);
  const auto block = [&](std::int32_t index) { return blocks[index]; };
  const Slice own = slice_of(Buffer::input, blocks[request.rank]);
  const Slice output{Buffer::output, 0, own.count};
  ScheduleBuilder builder;
  if (world == 1) {
    builder.copy(own, output);
    builder.finish(output);
    return builder.take();
  }
  const std::vector<Round> rounds = rounds_of(request.rank, world);
  const std::int32_t origin = rounds[0].get.first;  // the first block in scratch
  const std::int32_t kept = (world + 1) / 2;
  std::vector<std::uint64_t> place = {0};
  for (std::int32_t i = 0; i < kept; ++i)
    place.push_back(place.back() + blocks[wrap(std::int64_t{origin} + i, world)].count);
  const auto partial = [&](Run run) {
    const std::int32_t first = wrap(std::int64_t{run.first} - origin, world);
    return Slice{Buffer::scratch, place[first], place[first + run.count] - place[first]};
  };
  builder.lend_scratch(world == 2 ? 0 : place.back());
  if (world % 2 == 1) {
    const std::int32_t last = wrap(std::int64_t{origin} + kept - 1, world);
    builder.copy(slice_of(Buffer::input, blocks[last]), partial({last, 1}));
  }
  for (std::size_t i = 0; i < rounds.size(); ++i) {
    const Round& round = rounds[i];
    const bool last = i + 1 == rounds.size();
    if (i > 0) {
      builder.send(round.to, partial(round.give));
      builder.recv_reduce(round.from, partial(round.get), last ? output : partial(round.get));
      continue;
    }
    for (const Range& range : ranges_of_run(round.give, world, block))
      builder.send(round.to, slice_of(Buffer::input, range));
    std::uint64_t at = 0;
    for (const Range& range : ranges_of_run(round.get, world, block)) {
      const Slice sum{last ? Buffer::output : Buffer::scratch, at, range.count};
      builder.recv_reduce(round.from, slice_of(Buffer::input, range), sum);
      at += range.count;
    }
  }
  builder.finish(output);
  return builder.take();
}

// The second half. log2 N messages for a power of two, else at most 2 ceil(log2 N) - 1; (N-1) blocks when even.
// In place: the copy is the only step that reads input (sends read output), so input may be output's own block.
Schedule butterfly_all_gather(const Request& request) {
  const std::vector<Range> blocks = ranges_of(request.blocks);
  const Slice own = slice_of(Buffer::output, blocks[request.rank]);
  ScheduleBuilder builder;
  builder.copy({Buffer::input, 0, own.count}, own);
  gather_all(builder, request, [&](std::int32_t index) { return blocks[index]; });
  return builder.take();
}

}  // namespace torch_iroh::collective
