#include "collective/host_plan.hpp"

#include <algorithm>

#include "collective/builder.hpp"

namespace torch_iroh::collective {
namespace {

// The window of a scattering operation has a place for every rank, else all of it is for one range.
bool has_places(Op op) {
  return op == Op::reduce_scatter || op == Op::scatter || op == Op::all_to_all;
}

std::uint64_t longest_range(const Request& request) {
  const auto longest = [](const std::vector<std::uint64_t>& blocks) {
    return blocks.empty() ? 0 : *std::max_element(blocks.begin(), blocks.end());
  };
  if (request.op == Op::all_to_all) return longest(request.send_blocks);
  return std::max(request.count, longest(request.blocks));
}

// The part of a range of `count` elements that belongs to a round.
Range part_of(std::uint64_t count, const HostCut& cut, std::uint64_t round) {
  if (cut.whole) return {0, count};
  const std::uint64_t begin = std::min(count, round * cut.step);
  return {begin, std::min(cut.step, count - begin)};
}

class RoundMaker {
 public:
  RoundMaker(const Request& request, const HostCut& cut, std::uint64_t round)
      : request_(request), cut_(cut), number_(round), rank_(request.rank), world_(request.world) {}

  HostRound make() {
    switch (request_.op) {
      case Op::all_reduce: cut_.redundant ? reduce_everywhere() : reduce_by_shards(Buffer::output); break;
      case Op::reduce: reduce_by_shards(Buffer::input); break;
      case Op::broadcast: broadcast(); break;
      case Op::all_gather: gather(true); break;
      case Op::gather: gather(rank_ == request_.root); break;
      case Op::scatter: scatter(); break;
      case Op::reduce_scatter: reduce_scatter(); break;
      case Op::all_to_all: all_to_all(); break;
      case Op::barrier: made_.waits_for_all = true; break;
    }
    return std::move(made_);
  }

 private:
  template <typename Visit>
  void each_peer(const Visit& visit) const {  // the next rank first, so that no rank is everyone's first
    for (std::int32_t i = 1; i < world_; ++i) visit(wrap(std::int64_t{rank_} + i, world_));
  }
  void show(Slice from, std::uint64_t in_window) {
    if (from.count > 0) made_.shows.push_back({from, in_window});
  }
  void copy(Slice from, Slice to) {
    if (to.count > 0) made_.copies.push_back({from, to});
  }
  void take(Shown from, Slice to) {
    if (to.count > 0) made_.takes.push_back({from, to});
  }
  // This round's part of a rank's block, where the blocks of all ranks lie.
  Slice part_in(Buffer buffer, const std::vector<Range>& ranges, std::int32_t rank) const {
    const Range block = ranges[static_cast<std::size_t>(rank)];
    const Range part = part_of(block.count, cut_, number_);
    return {buffer, block.offset + part.offset, part.count};
  }
  std::uint64_t place(std::int32_t rank) const { return static_cast<std::uint64_t>(rank) * cut_.step; }

  void reduce_everywhere() {
    const Range part = part_of(request_.count, cut_, number_);
    show({Buffer::output, part.offset, part.count}, 0);
    for (std::int32_t rank = 0; rank < world_; ++rank) made_.terms.push_back({rank, Buffer::output, part.offset, 0});
    made_.sum = {Buffer::output, part.offset, part.count};
  }

  // The owner of shard r adds r+1's part to its own, then r+2's, ...; the shards go to all, or to the root.
  void reduce_by_shards(Buffer from) {
    const Range part = part_of(request_.count, cut_, number_);
    const bool to_all = request_.op == Op::all_reduce;
    const bool root = to_all || rank_ == request_.root;
    const auto shard = [&](std::int32_t rank) { return shard_of(part.count, world_, rank); };
    const Range mine = shard(rank_);
    const std::uint64_t behind = mine.offset + mine.count;
    show({from, part.offset, mine.offset}, 0);
    show({from, part.offset + behind, part.count - behind}, behind);
    made_.is_taken_from = world_ > 1 && part.count > 0;
    made_.own = {from, part.offset + mine.offset, mine.count};
    made_.own_term = 0;
    made_.terms.push_back({rank_, from, made_.own.offset, mine.offset});
    each_peer([&](std::int32_t peer) { made_.terms.push_back({peer, from, made_.own.offset, mine.offset}); });
    if (root) {
      made_.sum = {Buffer::output, part.offset + mine.offset, mine.count};
    } else {
      made_.sum = {Buffer::scratch, 0, mine.count};
      made_.scratch_count = mine.count;
    }
    made_.shows_sum = to_all || !root;
    made_.sum_in_window = mine.offset;
    if (!root) return;
    each_peer([&](std::int32_t peer) {
      const Range theirs = shard(peer);
      if (theirs.count == 0) return;
      const Buffer lies = to_all ? Buffer::output : Buffer::scratch;
      const std::uint64_t offset = to_all ? part.offset + theirs.offset : 0;
      made_.takes_of_sums.push_back(
          {{peer, lies, offset, theirs.offset}, {Buffer::output, part.offset + theirs.offset, theirs.count}});
    });
  }

  void broadcast() {
    const Range part = part_of(request_.count, cut_, number_);
    const Slice all{Buffer::output, part.offset, part.count};
    if (rank_ == request_.root) {
      show(all, 0);
      made_.is_taken_from = true;
    } else {
      take({request_.root, Buffer::output, part.offset, 0}, all);
    }
  }

  void gather(bool takes) {
    const Range own = part_of(request_.blocks[static_cast<std::size_t>(rank_)], cut_, number_);
    const Slice from{Buffer::input, own.offset, own.count};
    if (request_.op == Op::all_gather || !takes) {
      show(from, 0);
      made_.is_taken_from = own.count > 0;
    }
    if (!takes) return;
    const auto ranges = ranges_of(request_.blocks);
    const auto place_of = [&](std::int32_t rank) { return part_in(Buffer::output, ranges, rank); };
    copy(from, place_of(rank_));
    each_peer([&](std::int32_t peer) { take({peer, Buffer::input, round_begin(), 0}, place_of(peer)); });
    made_.waits_for_all = true;  // an empty block is a call too
  }

  void scatter() {
    const auto ranges = ranges_of(request_.blocks);
    const auto part_for = [&](std::int32_t rank) { return part_in(Buffer::input, ranges, rank); };
    const Slice mine = part_for(rank_);
    const Slice to{Buffer::output, std::min(request_.blocks[static_cast<std::size_t>(rank_)], round_begin()),
                   mine.count};
    if (rank_ != request_.root) return take({request_.root, Buffer::input, mine.offset, place(rank_)}, to);
    each_peer([&](std::int32_t peer) { show(part_for(peer), place(peer)); });
    made_.is_taken_from = world_ > 1;
    copy(mine, to);
  }

  void reduce_scatter() {
    const auto ranges = ranges_of(request_.blocks);
    const auto part_for = [&](std::int32_t rank) { return part_in(Buffer::input, ranges, rank); };
    each_peer([&](std::int32_t peer) { show(part_for(peer), place(peer)); });
    made_.is_taken_from = world_ > 1;
    made_.own = part_for(rank_);
    made_.own_term = 0;
    made_.terms.push_back({rank_, Buffer::input, made_.own.offset, place(rank_)});
    each_peer([&](std::int32_t peer) { made_.terms.push_back({peer, Buffer::input, made_.own.offset, place(rank_)}); });
    const std::uint64_t begin = std::min(request_.blocks[static_cast<std::size_t>(rank_)], round_begin());
    made_.sum = {Buffer::output, begin, made_.own.count};
    made_.waits_for_all = true;
  }

  void all_to_all() {
    const auto out_of = ranges_of(request_.send_blocks);
    const auto into = ranges_of(request_.blocks);
    each_peer([&](std::int32_t peer) {
      const auto index = static_cast<std::size_t>(peer);
      const Range out = part_of(out_of[index].count, cut_, number_);
      show({Buffer::input, out_of[index].offset + out.offset, out.count}, place(peer));
      const Range in = part_of(into[index].count, cut_, number_);
      take({peer, Buffer::input, in.offset, place(rank_)}, {Buffer::output, into[index].offset + in.offset, in.count});
    });
    made_.is_taken_from = world_ > 1;
    const auto index = static_cast<std::size_t>(rank_);
    const Range own = part_of(into[index].count, cut_, number_);
    copy({Buffer::input, out_of[index].offset + own.offset, own.count},
         {Buffer::output, into[index].offset + own.offset, own.count});
    made_.waits_for_all = true;
  }

  std::uint64_t round_begin() const { return number_ * cut_.step; }

  const Request& request_;
  const HostCut& cut_;
  const std::uint64_t number_;
  const std::int32_t rank_;
  const std::int32_t world_;
  HostRound made_;
};

}  // namespace

HostCut cut_for_windows(const Request& request, std::uint64_t window_elements, std::uint64_t most_redundant_elements) {
  HostCut cut;
  const std::uint64_t places = has_places(request.op) ? static_cast<std::uint64_t>(request.world) : 1;
  cut.step = std::max<std::uint64_t>(1, window_elements / places);
  cut.rounds = std::max<std::uint64_t>(1, (longest_range(request) + cut.step - 1) / cut.step);
  cut.redundant = request.op == Op::all_reduce && request.count <= most_redundant_elements;
  return cut;
}

std::uint64_t most_shown_elements(const Request& request) {
  return longest_range(request) * (has_places(request.op) ? static_cast<std::uint64_t>(request.world) : 1);
}

HostCut cut_for_direct(const HostCut& for_windows) {
  return {for_windows.step, 1, true, for_windows.redundant};
}

HostRound plan_round(const Request& request, const HostCut& cut, std::uint64_t round) {
  return RoundMaker(request, cut, round).make();
}

}  // namespace torch_iroh::collective
