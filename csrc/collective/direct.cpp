// Algorithm::direct: every element goes straight from who has it to who needs it. Fewest hops, most peers. Best for
// small tensors, small worlds and links that do not share a bottleneck.
//
// Words: N ranks; S elements in all; a shard is shard_of(S, N, i), a block is what the request says; "messages" and
// "elements" are what one rank sends. Empty shards and blocks send nothing.
//
// Peers take turns so that no rank is everyone's first: in round i rank r sends to r+i and receives from r-i (mod N).
// An owner sums in one order whatever arrives first: its own part, then r+1's, r+2's, ...; so parts to be summed are
// sent to r-1 first, then r-2, ..., which is the order in which they are wanted.
//
// Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH",
// IJHPCA 19(1), 2005 (pairwise exchange, long all-to-all).
#include "collective/builder.hpp"

namespace torch_iroh::collective {

namespace {

// `own` plus the parts of r+1, r+2, ..., finished, in `sum`. The first addition reads `own`, so that no copy is needed
// and `own` may be `sum` (in place).
void sum_in_order(ScheduleBuilder& builder, const Request& request, Slice own, Slice sum) {
  if (request.world == 1 && own != sum) builder.copy(own, sum);
  for (std::int64_t i = 1; i < request.world; ++i)
    builder.recv_reduce(wrap(request.rank + i, request.world), i == 1 ? own : sum, sum);
  builder.finish(sum);
}

}  // namespace

// In place in output. 4 ranks:
//   reduce-scatter  r sends shard j to its owner j:   r0: 3,2,1   r1: 0,3,2   r2: 1,0,3   r3: 2,1,0
//   the owner of shard r adds the parts of r+1, r+2, r+3 to its own and finishes it
//   all-gather      r sends shard r to all:           r0: 0,0,0   r1: 1,1,1   r2: 2,2,2   r3: 3,3,3
// 2(N-1) messages; S + (N-2) shard(r) elements, 2S(N-1)/N when N divides S.
// The result of shard j overwrites the part that was sent to j: write after read, so it waits for that send.
Schedule direct_all_reduce(const Request& request) {
  const std::int32_t world = request.world;
  const std::int64_t rank = request.rank;
  const auto shard = [&](std::int32_t index) {
    return slice_of(Buffer::output, shard_of(request.count, world, index));
  };
  const Slice own = shard(request.rank);
  ScheduleBuilder builder;
  for (std::int32_t i = 1; i < world; ++i) {
    const std::int32_t owner = wrap(rank - i, world);
    builder.send(owner, shard(owner));
  }
  sum_in_order(builder, request, own, own);
  for (std::int32_t i = 1; i < world; ++i) {
    const std::int32_t owner = wrap(rank - i, world);
    builder.send(wrap(rank + i, world), own);
    builder.recv(owner, shard(owner));
  }
  return builder.take();
}

// 4 ranks: r copies its own block to its place and sends it to r+1, r+2, r+3.
// N-1 messages; (N-1) block(r) elements.
// In place: the copy is the only step that reads input (sends read output), so input may be output's own block.
Schedule direct_all_gather(const Request& request) {
  const std::int32_t world = request.world;
  const std::int64_t rank = request.rank;
  const std::vector<Range> ranges = ranges_of(request.blocks);
  const Slice own = slice_of(Buffer::output, ranges[request.rank]);
  ScheduleBuilder builder;
  builder.copy({Buffer::input, 0, own.count}, own);
  for (std::int32_t i = 1; i < world; ++i) {
    const std::int32_t from = wrap(rank - i, world);
    builder.send(wrap(rank + i, world), own);
    builder.recv(from, slice_of(Buffer::output, ranges[from]));
  }
  return builder.take();
}

// 4 ranks: r sends block j of its input to j, sums what the others send for block r.
//       r0: 3,2,1   r1: 0,3,2   r2: 1,0,3   r3: 2,1,0
// N-1 messages; S - block(r) elements.
// In place: input's own block is read only by the first addition, the first step that writes output.
Schedule direct_reduce_scatter(const Request& request) {
  const std::int32_t world = request.world;
  const std::vector<Range> ranges = ranges_of(request.blocks);
  const Slice own = slice_of(Buffer::input, ranges[request.rank]);
  ScheduleBuilder builder;
  for (std::int64_t i = 1; i < world; ++i) {
    const std::int32_t owner = wrap(request.rank - i, world);
    builder.send(owner, slice_of(Buffer::input, ranges[owner]));
  }
  sum_in_order(builder, request, own, {Buffer::output, 0, own.count});
  return builder.take();
}

// 4 ranks, root 1:   1 -> 2, 1 -> 3, 1 -> 0.
// Root: N-1 messages, (N-1) S elements. Others: none.
Schedule direct_broadcast(const Request& request) {
  const std::int32_t world = request.world;
  const Slice all{Buffer::output, 0, request.count};
  ScheduleBuilder builder;
  if (request.rank != request.root) {
    builder.recv(request.root, all);
  } else {
    for (std::int64_t i = 1; i < world; ++i) builder.send(wrap(request.rank + i, world), all);
  }
  return builder.take();
}

// 4 ranks, root 1:   2 -> 1, 3 -> 1, 0 -> 1, added in this order.
// Root: no message. Others: 1 message of S elements.
// In place: the root's input is read only by the first addition, the first step that writes output.
Schedule direct_reduce(const Request& request) {
  const Slice input{Buffer::input, 0, request.count};
  ScheduleBuilder builder;
  if (request.rank != request.root) {
    builder.send(request.root, input);
  } else {
    sum_in_order(builder, request, input, {Buffer::output, 0, request.count});
  }
  return builder.take();
}

// 4 ranks, root 1:   2 -> 1, 3 -> 1, 0 -> 1, each to its place.
// Root: no message. Others: 1 message of block(r) elements.
// In place: the root's input is read only by its copy.
Schedule direct_gather(const Request& request) {
  const std::int32_t world = request.world;
  const std::uint64_t own = request.blocks[request.rank];
  ScheduleBuilder builder;
  if (request.rank != request.root) {
    builder.send(request.root, {Buffer::input, 0, own});
    return builder.take();
  }
  const std::vector<Range> ranges = ranges_of(request.blocks);
  builder.copy({Buffer::input, 0, own}, slice_of(Buffer::output, ranges[request.rank]));
  for (std::int64_t i = 1; i < world; ++i) {
    const std::int32_t from = wrap(request.rank + i, world);
    builder.recv(from, slice_of(Buffer::output, ranges[from]));
  }
  return builder.take();
}

// 4 ranks, root 1:   1 -> 2, 1 -> 3, 1 -> 0, to each its block.
// Root: N-1 messages, S - block(root) elements. Others: none.
// In place: the root's own input block is read only by its copy.
Schedule direct_scatter(const Request& request) {
  const std::int32_t world = request.world;
  const Slice output{Buffer::output, 0, request.blocks[request.rank]};
  ScheduleBuilder builder;
  if (request.rank != request.root) {
    builder.recv(request.root, output);
    return builder.take();
  }
  const std::vector<Range> ranges = ranges_of(request.blocks);
  for (std::int64_t i = 1; i < world; ++i) {
    const std::int32_t to = wrap(request.rank + i, world);
    builder.send(to, slice_of(Buffer::input, ranges[to]));
  }
  builder.copy(slice_of(Buffer::input, ranges[request.rank]), output);
  return builder.take();
}

// 4 ranks, round i: r sends its block for r+i, receives from r-i; its own block is copied.
//       r0: 1,2,3   r1: 2,3,0   r2: 3,0,1   r3: 0,1,2
// N-1 messages; the sum of send_blocks less the own one.
Schedule direct_all_to_all(const Request& request) {
  const std::int32_t world = request.world;
  const std::int64_t rank = request.rank;
  const std::vector<Range> out_of = ranges_of(request.send_blocks);
  const std::vector<Range> into = ranges_of(request.blocks);
  ScheduleBuilder builder;
  for (std::int32_t i = 1; i < world; ++i) {
    const std::int32_t to = wrap(rank + i, world);
    const std::int32_t from = wrap(rank - i, world);
    builder.send(to, slice_of(Buffer::input, out_of[to]));
    builder.recv(from, slice_of(Buffer::output, into[from]));
  }
  builder.copy(slice_of(Buffer::input, out_of[request.rank]), slice_of(Buffer::output, into[request.rank]));
  return builder.take();
}

}  // namespace torch_iroh::collective
