// Algorithm::butterfly: halve the distance and the data in every round to reduce-scatter, double both again to
// all-gather. As few rounds as a tree and as few bytes as a ring, for any number of ranks. Best for medium tensors in
// larger worlds.
//
// Words: N ranks; S elements in all; a shard is shard_of(S, N, i), a block is what the request says. The *reaches* are
// N, ceil(N/2), ceil(N/4), ..., 1 (each half of the one before, rounded up): at reach s rank r still works on the
// blocks r, r+1, ..., r+s-1 (mod N). A run of blocks that passes block N-1 is two ranges, hence up to two messages.
//
// 5 ranks, reaches 5, 3, 2, 1; all indices mod 5:
//   reduce-scatter  5 -> 3: r sends blocks r+3, r+4 to r+3, adds what r-3 sends to blocks r, r+1
//                   3 -> 2: r sends block r+2 to r+2, adds what r-2 sends to block r
//                   2 -> 1: r sends block r+1 to r+1, adds what r-1 sends to block r, which is whole now
//   all-gather      the same backwards: r sends block r to r-1; block r to r-2; blocks r, r+1 to r-3
// For N a power of two these are the distances and amounts of recursive halving and doubling (Rabenseifner); unlike
// there, other N need no extra ranks folded in and out, and nobody sends more than (N-1)/N of the data.
// Every block is summed once, along one tree that ends at its owner, and the owner's bits are what all others get.
//
// Source: J. L. Traeff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", arXiv:2410.14234, 2024;
// R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
#include <algorithm>
#include <utility>

#include "collective/builder.hpp"

namespace torch_iroh::collective {

namespace {

// N, ceil(N/2), ..., 1.
std::vector<std::int32_t> reaches_of(std::int32_t world) {
  std::vector<std::int32_t> reaches = {world};
  while (reaches.back() > 1) reaches.push_back((reaches.back() + 1) / 2);
  return reaches;
}

// `block(i)` is where block i lies, for i in 0..world-1, one behind the other.
template <typename Block>
class Runs {
 public:
  Runs(std::int32_t world, Block block) : world_(world), block_(std::move(block)) {}

  std::int32_t world() const { return world_; }

  // Blocks first, first+1, ..., `count` of them (mod N): one range, or two where they pass the end.
  std::vector<Range> of(std::int64_t first, std::int32_t count) const {
    const std::int32_t begin = wrap(first, world_);
    const std::int32_t whole = std::min(count, world_ - begin);
    std::vector<Range> runs;
    if (whole > 0) runs.push_back(run(begin, whole));
    if (count > whole) runs.push_back(run(0, count - whole));
    return runs;
  }

 private:
  Range run(std::int32_t from, std::int32_t length) const {
    const Range first = block_(from);
    const Range last = block_(from + length - 1);
    return {first.offset, last.offset + last.count - first.offset};
  }

  const std::int32_t world_;
  const Block block_;
};

// The second half: all have their own block of output, all end with all.
template <typename Block>
void gather_all(ScheduleBuilder& builder, const Runs<Block>& runs, std::int64_t rank) {
  const std::vector<std::int32_t> reaches = reaches_of(runs.world());
  for (std::size_t i = reaches.size() - 1; i > 0; --i) {
    const std::int32_t have = reaches[i];
    const std::int32_t get = reaches[i - 1] - have;
    for (const Range& run : runs.of(rank, get))
      builder.send(wrap(rank - have, runs.world()), slice_of(Buffer::output, run));
    for (const Range& run : runs.of(rank + have, get))
      builder.recv(wrap(rank + have, runs.world()), slice_of(Buffer::output, run));
  }
}

}  // namespace

// In place in output. At most 4 ceil(log2 N) - 2 messages, 2 ceil(log2 N) for ranks whose runs pass no end; 2S(N-1)/N
// elements when N divides S.
// What was sent is not touched again until the all-gather overwrites it: write after read, so it waits for that send.
Schedule butterfly_all_reduce(const Request& request) {
  const std::int32_t world = request.world;
  const std::int64_t rank = request.rank;
  const auto shard = [&](std::int32_t index) { return shard_of(request.count, world, index); };
  const Runs runs(world, shard);
  const std::vector<std::int32_t> reaches = reaches_of(world);
  ScheduleBuilder builder;
  for (std::size_t i = 1; i < reaches.size(); ++i) {
    const std::int32_t keep = reaches[i];
    const std::int32_t give = reaches[i - 1] - keep;
    for (const Range& run : runs.of(rank + keep, give))
      builder.send(wrap(rank + keep, world), slice_of(Buffer::output, run));
    for (const Range& run : runs.of(rank, give))
      builder.recv_reduce(wrap(rank - keep, world), slice_of(Buffer::output, run), slice_of(Buffer::output, run));
  }
  builder.finish(slice_of(Buffer::output, shard(request.rank)));
  gather_all(builder, runs, rank);
  return builder.take();
}

// The first half, out of place: partial sums live in scratch, in the order of the run, so only the messages of the
// first round, which read input, may be two. At most ceil(log2 N) + 1 messages; S - block(r) elements.
// With N odd the first round leaves the last block of the run unsummed: it is copied. Scratch: ceil(N/2) blocks.
// In place: input's own block is read in the first round only, and what writes output depends on that sum (or is it).
Schedule butterfly_reduce_scatter(const Request& request) {
  const std::int32_t world = request.world;
  const std::int64_t rank = request.rank;
  const std::vector<Range> blocks = ranges_of(request.blocks);
  const Slice output{Buffer::output, 0, blocks[request.rank].count};
  ScheduleBuilder builder;
  if (world == 1) {
    builder.copy(slice_of(Buffer::input, blocks[0]), output);
    builder.finish(output);
    return builder.take();
  }
  const Runs runs(world, [&](std::int32_t index) { return blocks[index]; });
  const std::vector<std::int32_t> reaches = reaches_of(world);
  std::vector<std::uint64_t> place = {0};  // in scratch, of the i-th block of the run
  for (std::int32_t i = 0; i < reaches[1]; ++i) place.push_back(place.back() + blocks[wrap(rank + i, world)].count);
  const auto partial = [&](std::int32_t first, std::int32_t end) {
    return Slice{Buffer::scratch, place[first], place[end] - place[first]};
  };
  builder.lend_scratch(world == 2 ? 0 : place.back());
  if (world % 2 == 1) {
    const std::int32_t last = reaches[1] - 1;
    builder.copy(slice_of(Buffer::input, blocks[wrap(rank + last, world)]), partial(last, last + 1));
  }
  for (std::size_t i = 1; i < reaches.size(); ++i) {
    const std::int32_t keep = reaches[i];
    const std::int32_t give = reaches[i - 1] - keep;
    const std::int32_t to = wrap(rank + keep, world);
    const std::int32_t from = wrap(rank - keep, world);
    if (i > 1) {
      builder.send(to, partial(keep, keep + give));
      builder.recv_reduce(from, partial(0, give), keep == 1 ? output : partial(0, give));
      continue;
    }
    for (const Range& run : runs.of(rank + keep, give)) builder.send(to, slice_of(Buffer::input, run));
    std::uint64_t at = 0;
    for (const Range& run : runs.of(rank, give)) {
      builder.recv_reduce(from, slice_of(Buffer::input, run),
                          keep == 1 ? output : Slice{Buffer::scratch, at, run.count});
      at += run.count;
    }
  }
  builder.finish(output);
  return builder.take();
}

// The second half. At most 2 ceil(log2 N) - 1 messages; S less the blocks that come last, (N-1) blocks when even.
// In place: the copy is the only step that reads input (sends read output), so input may be output's own block.
Schedule butterfly_all_gather(const Request& request) {
  const std::vector<Range> blocks = ranges_of(request.blocks);
  const Slice own = slice_of(Buffer::output, blocks[request.rank]);
  ScheduleBuilder builder;
  builder.copy({Buffer::input, 0, own.count}, own);
  gather_all(builder, Runs(request.world, [&](std::int32_t index) { return blocks[index]; }), request.rank);
  return builder.take();
}

}  // namespace torch_iroh::collective
