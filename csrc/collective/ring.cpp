// Algorithm::ring: rank r only ever sends to r+1 and receives from r-1 (mod N), so bandwidth is optimal and latency
// grows with N. Best for large tensors on even links.
//
// Words: N ranks; S elements in all; a shard is shard_of(S, N, i), a block is what the request says; "messages" and
// "elements" are what one rank sends. Empty shards and blocks send nothing.
//
// Source of the ring: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", JPDC 69(2), 2009.
#include <algorithm>

#include "collective/builder.hpp"

namespace torch_iroh::collective {

// In place in output. 4 ranks, all indices mod 4; round s of each half:
//   reduce-scatter  r sends shard r-s to r+1, adds what r-1 sends to shard r-s-1
//       r0: 0,3,2   r1: 1,0,3   r2: 2,1,0   r3: 3,2,1       (sent in rounds 0, 1, 2)
//   then shard r+1 is whole at rank r alone, which finishes it
//   all-gather      r sends shard r+1-s to r+1, stores what r-1 sends as shard r-s
//       r0: 1,0,3   r1: 2,1,0   r2: 3,2,1   r3: 0,3,2
// 2(N-1) messages; 2S - shard(r+1) - shard(r+2) elements, 2S(N-1)/N when N divides S.
Schedule ring_all_reduce(const Request& request) {
  const std::int32_t world = request.world;
  const std::int64_t rank = request.rank;
  const std::int32_t next = wrap(rank + 1, world);
  const std::int32_t previous = wrap(rank - 1, world);
  const auto shard = [&](std::int64_t index) {
    return slice_of(Buffer::output, shard_of(request.count, world, wrap(index, world)));
  };
  ScheduleBuilder builder;
  for (std::int32_t round = 0; round < world - 1; ++round) {
    builder.send(next, shard(rank - round));
    builder.recv_reduce(previous, shard(rank - round - 1), shard(rank - round - 1));
  }
  builder.finish(shard(rank + 1));
  for (std::int32_t round = 0; round < world - 1; ++round) {
    builder.send(next, shard(rank + 1 - round));
    builder.recv(previous, shard(rank - round));
  }
  return builder.take();
}

// 4 ranks: r copies its own block to its place, then in round s sends block r-s to r+1, stores block r-s-1 from r-1.
//       r0: 0,3,2   r1: 1,0,3   r2: 2,1,0   r3: 3,2,1
// N-1 messages; S - block(r+1) elements.
// In place: the copy is the only step that reads input, so input may be output's own block.
Schedule ring_all_gather(const Request& request) {
  const std::int32_t world = request.world;
  const std::int64_t rank = request.rank;
  const std::vector<Range> ranges = ranges_of(request.blocks);
  const auto block = [&](std::int64_t index) { return slice_of(Buffer::output, ranges[wrap(index, world)]); };
  ScheduleBuilder builder;
  builder.copy({Buffer::input, 0, block(rank).count}, block(rank));
  for (std::int32_t round = 0; round < world - 1; ++round) {
    builder.send(wrap(rank + 1, world), block(rank - round));
    builder.recv(wrap(rank - 1, world), block(rank - round - 1));
  }
  return builder.take();
}

// 4 ranks: in round s rank r sends the partial sum of block r-s-1 to r+1 and adds its own input to block r-s-2 from
// r-1. The partial sum of the last round is block r, which lands in output and is finished there.
//       r0: 3,2,1   r1: 0,3,2   r2: 1,0,3   r3: 2,1,0
// N-1 messages; S - block(r) elements. Partial sums take turns in two places of scratch, so a round's receive
// need not wait for the same round's send, only for the one before. Scratch: min(N-2, 2) times the longest block.
// In place: input's own block is read by the last receive only, the step that writes output.
Schedule ring_reduce_scatter(const Request& request) {
  const std::int32_t world = request.world;
  const std::int64_t rank = request.rank;
  const std::vector<Range> ranges = ranges_of(request.blocks);
  const auto block = [&](std::int64_t index) { return slice_of(Buffer::input, ranges[wrap(index, world)]); };
  const Slice output{Buffer::output, 0, block(rank).count};
  ScheduleBuilder builder;
  if (world == 1) {
    builder.copy(block(rank), output);
    builder.finish(output);
    return builder.take();
  }
  const std::uint64_t longest = *std::max_element(request.blocks.begin(), request.blocks.end());
  builder.lend_scratch(longest * static_cast<std::uint64_t>(std::min(world - 2, 2)));
  Slice partial = block(rank - 1);
  for (std::int32_t round = 0; round < world - 1; ++round) {
    const Slice own = block(rank - round - 2);
    const std::uint64_t place = longest * static_cast<std::uint64_t>(round % 2);
    const Slice sum = round == world - 2 ? output : Slice{Buffer::scratch, place, own.count};
    builder.send(wrap(rank + 1, world), partial);
    builder.recv_reduce(wrap(rank - 1, world), own, sum);
    partial = sum;
  }
  builder.finish(output);
  return builder.take();
}

// 4 ranks, root 1:   1 -> 2 -> 3 -> 0. The whole range is one step; the executor's chunks make it a pipeline.
// 1 message of S elements, none from the last rank.
// Source: J. Watts and R. van de Geijn, "A pipelined broadcast for multidimensional meshes", PPL 5(2), 1995.
Schedule chain_broadcast(const Request& request) {
  const std::int32_t world = request.world;
  const std::int64_t rank = request.rank;
  const std::int32_t place = wrap(rank - request.root, world);
  const Slice all{Buffer::output, 0, request.count};
  ScheduleBuilder builder;
  if (place > 0) builder.recv(wrap(rank - 1, world), all);
  if (place < world - 1) builder.send(wrap(rank + 1, world), all);
  return builder.take();
}

// 4 ranks, root 1:   2 -> 3 -> 0 -> 1, the broadcast backwards: each rank adds its input to the partial sum that
// passes. 1 message of S elements, none from the root. Scratch: S at ranks with someone on both sides. In place: the
// root reads its input only in the step that writes output.
Schedule chain_reduce(const Request& request) {
  const std::int32_t world = request.world;
  const std::int64_t rank = request.rank;
  const std::int32_t place = wrap(rank - request.root, world);
  const Slice input{Buffer::input, 0, request.count};
  const Slice output{Buffer::output, 0, request.count};
  const Slice partial{Buffer::scratch, 0, request.count};
  const std::int32_t previous = wrap(rank - 1, world);
  const std::int32_t next = wrap(rank + 1, world);
  ScheduleBuilder builder;
  if (world == 1) {
    builder.copy(input, output);
    builder.finish(output);
  } else if (place == 0) {
    builder.recv_reduce(previous, input, output);
    builder.finish(output);
  } else if (place == 1) {
    builder.send(next, input);
  } else {
    builder.lend_scratch(request.count);
    builder.recv_reduce(previous, input, partial);
    builder.send(next, partial);
  }
  return builder.take();
}

}  // namespace torch_iroh::collective
