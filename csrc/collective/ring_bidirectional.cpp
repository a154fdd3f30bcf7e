// Algorithm::ring_bidirectional: two rings with half of the data each, one in either direction. Each rank sends to both
// neighbours and receives from both, so links that carry both directions at once (all of ours: full duplex, and one
// connection per direction) move the same bytes in half the time. Messages are twice as many and half as long.
//
// Words: as in ring.cpp. The *right* ring runs as in ring.cpp, r to r+1; the *left* ring is its mirror image, r to r-1.
// A half is the first (right) or last (left) part of a tensor or block; the right half is longer by an odd element.
//
// Source of the ring: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", JPDC 69(2), 2009.
#include <algorithm>
#include <array>

#include "collective/builder.hpp"

namespace torch_iroh::collective {

namespace {

constexpr std::array<std::int32_t, 2> kDirections = {1, -1};  // right, left

Range half_of(Range range, std::int32_t direction) {
  const Range half = shard_of(range.count, 2, direction > 0 ? 0 : 1);
  return {range.offset + half.offset, half.count};
}

}  // namespace

// In place in output. Left ring of 4 ranks, all indices mod 4 (right: see ring.cpp):
//   reduce-scatter  r0: 0,1,2   r1: 1,2,3   r2: 2,3,0   r3: 3,0,1       (shards of the left half, sent to r-1)
//   then shard r-1 is whole at rank r alone, which finishes it
//   all-gather      r0: 3,0,1   r1: 0,1,2   r2: 1,2,3   r3: 2,3,0
// 4(N-1) messages; 2S(N-1)/N elements when 2N divides S, half of them to either side.
Schedule bidirectional_all_reduce(const Request& request) {
  const std::int32_t world = request.world;
  const std::int64_t rank = request.rank;
  const auto shard = [&](std::int32_t direction, std::int64_t index) {
    const Range half = half_of({0, request.count}, direction);
    const Range part = shard_of(half.count, world, wrap(index, world));
    return Slice{Buffer::output, half.offset + part.offset, part.count};
  };
  ScheduleBuilder builder;
  for (std::int32_t round = 0; round < world - 1; ++round) {
    for (const std::int32_t d : kDirections) {
      const Slice sum = shard(d, rank - d * (round + 1));
      builder.send(wrap(rank + d, world), shard(d, rank - d * round));
      builder.recv_reduce(wrap(rank - d, world), sum, sum);
      if (round == world - 2) builder.finish(sum);  // right behind its last addition: see Execution::keep_sums_wide
    }
  }
  if (world == 1) builder.finish({Buffer::output, 0, request.count});
  for (std::int32_t round = 0; round < world - 1; ++round) {
    for (const std::int32_t d : kDirections) {
      builder.send(wrap(rank + d, world), shard(d, rank + d * (1 - round)));
      builder.recv(wrap(rank - d, world), shard(d, rank - d * round));
    }
  }
  return builder.take();
}

// 4 ranks: r copies its own block to its place, then in round s sends the right half of block r-s to r+1 and the left
// half of block r+s to r-1.
//       right   r0: 0,3,2   r1: 1,0,3   r2: 2,1,0   r3: 3,2,1
//       left    r0: 0,1,2   r1: 1,2,3   r2: 2,3,0   r3: 3,0,1
// 2(N-1) messages; S - right half of block(r+1) - left half of block(r-1) elements.
// In place: the copy is the only step that reads input, so input may be output's own block.
Schedule bidirectional_all_gather(const Request& request) {
  const std::int32_t world = request.world;
  const std::int64_t rank = request.rank;
  const std::vector<Range> ranges = ranges_of(request.blocks);
  const auto half = [&](std::int32_t direction, std::int64_t index) {
    return slice_of(Buffer::output, half_of(ranges[wrap(index, world)], direction));
  };
  const Slice own = slice_of(Buffer::output, ranges[request.rank]);
  ScheduleBuilder builder;
  builder.copy({Buffer::input, 0, own.count}, own);
  for (std::int32_t round = 0; round < world - 1; ++round) {
    for (const std::int32_t d : kDirections) {
      builder.send(wrap(rank + d, world), half(d, rank - d * round));
      builder.recv(wrap(rank - d, world), half(d, rank - d * (round + 1)));
    }
  }
  return builder.take();
}

// 4 ranks: in round s rank r sends the partial sum of the right half of block r-s-1 to r+1 and adds its own input to
// that of block r-s-2; left likewise.
//       right   r0: 3,2,1   r1: 0,3,2   r2: 1,0,3   r3: 2,1,0
//       left    r0: 1,2,3   r1: 2,3,0   r2: 3,0,1   r3: 0,1,2
// 2(N-1) messages; S - block(r) elements. Scratch: min(N-2, 2) times the longest block, a half of it per ring.
// In place: input's own block is read by the last two receives only, the steps that write output, half by half.
Schedule bidirectional_reduce_scatter(const Request& request) {
  const std::int32_t world = request.world;
  const std::int64_t rank = request.rank;
  const std::vector<Range> ranges = ranges_of(request.blocks);
  const auto half = [&](std::int32_t direction, std::int64_t index) {
    return slice_of(Buffer::input, half_of(ranges[wrap(index, world)], direction));
  };
  const Range own{0, request.blocks[request.rank]};
  ScheduleBuilder builder;
  if (world == 1) {
    builder.copy(slice_of(Buffer::input, own), slice_of(Buffer::output, own));
    builder.finish(slice_of(Buffer::output, own));
    return builder.take();
  }
  const std::uint64_t longest = *std::max_element(request.blocks.begin(), request.blocks.end());
  builder.lend_scratch(longest * static_cast<std::uint64_t>(std::min(world - 2, 2)));
  std::array<Slice, 2> partial = {half(1, rank - 1), half(-1, rank + 1)};
  for (std::int32_t round = 0; round < world - 1; ++round) {
    for (std::size_t ring = 0; ring < 2; ++ring) {
      const std::int32_t d = kDirections[ring];
      const Slice part = half(d, rank - d * (round + 2));
      const std::uint64_t place = longest * static_cast<std::uint64_t>(round % 2) + half_of({0, longest}, d).offset;
      const bool last = round == world - 2;
      const Slice sum = last ? slice_of(Buffer::output, half_of(own, d)) : Slice{Buffer::scratch, place, part.count};
      builder.send(wrap(rank + d, world), partial[ring]);
      builder.recv_reduce(wrap(rank - d, world), part, sum);
      if (last) builder.finish(sum);
      partial[ring] = sum;
    }
  }
  return builder.take();
}

}  // namespace torch_iroh::collective
