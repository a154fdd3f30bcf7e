// Algorithm::hierarchical: any algorithm inside every group, level by level, so that slow links between groups carry
// the bytes of one participant per group and no rank has more than a few peers whatever the world is.
//
// Words: levels, units and groups as in hierarchy.hpp; column and owner as in levels.hpp. N ranks; S elements in all.
// A group's *leader* is its first member, or the one that leads to the root where the operation has one. A *part* is a
// whole small collective of one group, made by the maker of that group's algorithm. Steps are O(parts), never O(N).
//
// all_reduce, 2 hosts of 2 ranks (0 1 | 2 3), the tensor in halves a, b:
//       inside      reduce-scatter   0: a of 0+1    1: b of 0+1    2: a of 2+3    3: b of 2+3
//       across      all_reduce       0 and 2: a     1 and 3: b                                (columns)
//       inside      all-gather       0, 1, 2, 3: a b
// The link between hosts carries S elements each way, as between 2 ranks; a flat ring's 4 ranks carry 3S/2.
// With groups of unequal sizes, as many ranks own parts as the smallest group of the level has; the others contribute
// and receive. A single owner is a leader: the two inner halves are then a reduce and a broadcast.
//
// Peers: below the bound of hierarchy.hpp in every level, whatever runs there. With the defaults (direct up to 4
// members, butterfly or tree above) at most 10 per level of 32: at most 30 for 32,768 ranks and 40 for a million.
//
// In place: a part's output is its own block of its input, or the same range, as schedule.hpp's rules for a collective
// in place permit; parts over the same range are ordered like steps.
//
// Source: the composition is that of N. T. Karonis et al., "Exploiting hierarchy in parallel computer networks to
// optimize collective operation performance", IPDPS 2000, with several leaders per group instead of one.
#include "collective/levels.hpp"

namespace torch_iroh::collective {

namespace {

// The ranks of this rank's column in its group of `level`.
std::vector<std::int32_t> column_of(const Way& way, std::size_t level) {
  std::vector<std::int32_t> members;
  for (std::int32_t i = 0; i < way.size(level); ++i) members.push_back(way.in_column(level, way.member(level, i)));
  return members;
}

}  // namespace

// In place in output. A rank works at level l on the part that it owns of level l-1.
// Across the top level of G groups: every column's all_reduce among G ranks, together S elements per group (times what
// the algorithm takes for G ranks).
Schedule hierarchical_all_reduce(const Request& request) {
  const Way way(*request.hierarchy, request.rank);
  LevelBuilder builder(*request.hierarchy);
  Range range{0, request.count};
  if (way.depth() == 0) builder.finish(slice_of(Buffer::output, range));
  std::vector<std::pair<Part, Part>> inner;  // what brings the sums together, and its answer
  const std::size_t reach = way.reach();
  for (std::size_t level = 0; level < way.depth() && level <= reach; ++level) {
    const Slice all = slice_of(Buffer::output, range);
    Part part{.level = level, .members = column_of(way, level), .index = way.index(level), .count = range.count};
    part.input = part.output = all;
    if (way.is_top(level)) {
      part.op = Op::all_reduce, part.finishes = true;
      builder.add(part);
      continue;
    }
    if (way.size(level) == 1) continue;
    const std::int32_t owners = way.owners(level);
    Part answer = part;
    if (owners == 1) {
      part.op = Op::reduce, answer.op = Op::broadcast;
    } else {
      part.op = Op::reduce_scatter, answer.op = Op::all_gather;
      part.blocks.assign(part.members.size(), 0);
      for (std::int32_t i = 0; i < owners; ++i)
        part.blocks[static_cast<std::size_t>(i)] = shard_of(range.count, owners, i).count;
      answer.blocks = part.blocks;
      const Range own = level < reach ? shard_of(range.count, owners, way.index(level)) : Range{};
      range = {range.offset + own.offset, own.count};
      part.output = answer.input = slice_of(Buffer::output, range);
    }
    builder.add(part);
    inner.emplace_back(part, answer);
  }
  for (; !inner.empty(); inner.pop_back()) builder.add(inner.back().second);
  return builder.take();
}

// Down the levels: the root to the leaders of its top-level units, each leader to those of its own unit, and so on.
// S elements into every group, once. Chunks flow through all levels at once.
Schedule hierarchical_broadcast(const Request& request) {
  LevelBuilder builder(*request.hierarchy);
  if (request.hierarchy->depth() == 0) return builder.take();
  const Leaders leaders(request, request.root);
  for (std::size_t level = leaders.highest() + 1; level-- > 0;) {
    Part part = leaders.part(Op::broadcast, level, request.count);
    part.output = {Buffer::output, 0, request.count};
    builder.add(part);
  }
  return builder.take();
}

// The broadcast backwards. Scratch: S for each level where this rank leads below the top.
// In place: the root reads its input at the lowest level where its group has others, and what writes output depends on
// that sum (or is it).
Schedule hierarchical_reduce(const Request& request) {
  LevelBuilder builder(*request.hierarchy);
  const Slice input{Buffer::input, 0, request.count};
  const Slice output{Buffer::output, 0, request.count};
  if (request.hierarchy->depth() == 0) {
    builder.copy(input, output);
    builder.finish(output);
    return builder.take();
  }
  const Leaders leaders(request, request.root);
  Slice sum = input;
  for (std::size_t level = 0; level <= leaders.highest(); ++level) {
    if (leaders.way.size(level) == 1) continue;
    Part part = leaders.part(Op::reduce, level, request.count);
    part.finishes = leaders.way.is_top(level);
    part.input = sum;
    if (part.index == part.root) sum = part.finishes ? output : builder.scratch(request.count);
    part.output = sum;
    builder.add(part);
  }
  return builder.take();
}

// Tokens go up to the leaders and from the first rank down again: N-1 messages each way in all, at most bound-1 per
// level at a rank. Only two of the messages per group pass between groups, where dissemination would cross in most
// rounds.
// Order comes from the tokens' places, as in barrier.cpp: what comes up lands in scratch[0], from where it goes on up;
// what comes down lands in scratch[1].
Schedule hierarchical_barrier(const Request& request) {
  LevelBuilder builder(*request.hierarchy);
  if (request.hierarchy->depth() == 0) return builder.take();
  const Leaders leaders(request, 0);
  const Slice up = builder.scratch(1);
  const Slice down = builder.scratch(1);
  const bool first = request.rank == 0;
  std::vector<std::int32_t> below;
  for (std::size_t level = 0; level <= leaders.highest(); ++level) {
    const Part part = leaders.part(Op::barrier, level, 0);
    const std::int32_t leader = part.members[static_cast<std::size_t>(part.root)];
    if (leader != request.rank) {
      builder.send(leader, up);
      builder.recv(leader, down);
      break;
    }
    for (const std::int32_t member : part.members) {
      if (member == request.rank) continue;
      builder.recv(member, up);
      below.push_back(member);
    }
  }
  for (auto member = below.rbegin(); member != below.rend(); ++member) builder.send(*member, first ? up : down);
  return builder.take();
}

}  // namespace torch_iroh::collective
