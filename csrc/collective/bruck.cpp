// Algorithm::bruck: one message per round in ceil(log2 N) rounds, for any N, paid for with copies on both sides (and,
// in all_to_all, with forwarding). Best for small blocks, where a message costs more than the bytes in it.
//
// Words: N ranks; S elements in all; a block is what the request says; "messages" and "elements" are what one rank
// sends. Empty messages are not sent.
//
// Source: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal and D. Weathersby, "Efficient algorithms for all-to-all
// communications in multiport message-passing systems", IEEE TPDS 8(11), 1997.
#include <algorithm>

#include "collective/builder.hpp"

namespace torch_iroh::collective {

// 5 ranks; scratch holds blocks r, r+1, r+2, ... (mod 5), as many as have come; each round doubles them:
//   distance 1   r sends block r to r-1, receives block r+1 from r+1
//   distance 2   r sends blocks r, r+1 to r-2, receives r+2, r+3
//   distance 4   r sends block r to r-4, receives r+4: the last round sends what is missing only
//   then scratch is copied to output, from block r to the end and from block 0 to r-1
// ceil(log2 N) messages; S less the blocks that come last, (N-1) blocks when even. Scratch: S. Uneven blocks are fine:
// every rank knows all lengths.
// In place: input is read by the first copy only, and whatever writes output depends on what that copy wrote.
Schedule bruck_all_gather(const Request& request) {
  const std::int32_t world = request.world;
  const std::int64_t rank = request.rank;
  const std::vector<Range> blocks = ranges_of(request.blocks);
  const Slice own = slice_of(Buffer::output, blocks[request.rank]);
  ScheduleBuilder builder;
  if (world == 1) {
    builder.copy({Buffer::input, 0, own.count}, own);
    return builder.take();
  }
  std::vector<std::uint64_t> place = {0};  // in scratch, of block r+i
  for (std::int32_t i = 0; i < world; ++i) place.push_back(place.back() + blocks[wrap(rank + i, world)].count);
  const auto held = [&](std::int32_t first, std::int32_t end) {
    return Slice{Buffer::scratch, place[first], place[end] - place[first]};
  };
  builder.lend_scratch(place.back());
  builder.copy({Buffer::input, 0, own.count}, held(0, 1));
  for (std::int64_t distance = 1; distance < world; distance *= 2) {
    const auto have = static_cast<std::int32_t>(distance);
    const std::int32_t get = std::min(have, world - have);
    builder.send(wrap(rank - distance, world), held(0, get));
    builder.recv(wrap(rank + distance, world), held(have, have + get));
  }
  const std::int32_t to_end = world - request.rank;
  const Slice upper = held(0, to_end);
  const Slice lower = held(to_end, world);
  builder.copy(upper, {Buffer::output, own.offset, upper.count});
  builder.copy(lower, {Buffer::output, 0, lower.count});
  return builder.take();
}

// 5 ranks: item i is the block that has i ranks to go, so at first the own block for r+i. In the round of bit k every
// rank packs the items whose i has that bit, sends them to r+2^k and receives the same items of r-2^k:
//   bit 0   items 1, 3 to r+1        bit 1   items 2, 3 to r+2        bit 2   item 4 to r+4
// At last item i is the block from r-i.
// ceil(log2 N) messages; about N/2 blocks in each. All blocks of all ranks must be equal (Request::even): a rank cannot
// know the lengths of blocks that it only forwards. Scratch: two packs per round, about N log2 N blocks.
Schedule bruck_all_to_all(const Request& request) {
  const std::int32_t world = request.world;
  const std::int64_t rank = request.rank;
  const std::uint64_t block = request.blocks[request.rank];
  const auto at = [&](Buffer buffer, std::int64_t index) {
    return Slice{buffer, static_cast<std::uint64_t>(index) * block, block};
  };
  ScheduleBuilder builder;
  std::vector<Slice> items;  // where item i is now
  for (std::int32_t i = 0; i < world; ++i) items.push_back(at(Buffer::input, wrap(rank + i, world)));
  std::int64_t used = 0;  // blocks of scratch
  for (std::int64_t distance = 1; distance < world; distance *= 2) {
    std::int64_t packed = 0;
    for (std::int64_t i = 0; i < world; ++i)
      if ((i & distance) != 0) builder.copy(items[i], at(Buffer::scratch, used + packed++));
    const auto pack = [&](std::int64_t first) {
      return Slice{Buffer::scratch, static_cast<std::uint64_t>(first) * block,
                   static_cast<std::uint64_t>(packed) * block};
    };
    builder.send(wrap(rank + distance, world), pack(used));
    builder.recv(wrap(rank - distance, world), pack(used + packed));
    std::int64_t unpacked = 0;
    for (std::int64_t i = 0; i < world; ++i)
      if ((i & distance) != 0) items[i] = at(Buffer::scratch, used + packed + unpacked++);
    used += 2 * packed;
  }
  for (std::int32_t i = 0; i < world; ++i) builder.copy(items[i], at(Buffer::output, wrap(rank - i, world)));
  builder.lend_scratch(static_cast<std::uint64_t>(used) * block);
  return builder.take();
}

}  // namespace torch_iroh::collective
