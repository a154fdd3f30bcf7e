// Names, the balanced split, the checks of a request, and the order of steps. Knows no algorithm (makers.cpp says which
// there are) and executes nothing.
#include "collective/schedule.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "collective/builder.hpp"
#include "collective/hierarchy.hpp"

namespace torch_iroh::collective {

std::string_view name_of(Op op) {
  switch (op) {
    case Op::all_reduce: return "all_reduce";
    case Op::reduce: return "reduce";
    case Op::broadcast: return "broadcast";
    case Op::all_gather: return "all_gather";
    case Op::reduce_scatter: return "reduce_scatter";
    case Op::gather: return "gather";
    case Op::scatter: return "scatter";
    case Op::all_to_all: return "all_to_all";
    case Op::barrier: return "barrier";
  }
  return "?";
}

std::string_view name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::ring: return "ring";
    case Algorithm::direct: return "direct";
    case Algorithm::ring_bidirectional: return "ring_bidirectional";
    case Algorithm::tree: return "tree";
    case Algorithm::butterfly: return "butterfly";
    case Algorithm::bruck: return "bruck";
    case Algorithm::hierarchical: return "hierarchical";
  }
  return "?";
}

Range shard_of(std::uint64_t count, std::int32_t world, std::int32_t index) {
  const auto parts = static_cast<std::uint64_t>(world);
  const auto place = static_cast<std::uint64_t>(index);
  const std::uint64_t base = count / parts;
  const std::uint64_t longer = count % parts;
  return {place * base + std::min(place, longer), base + (place < longer ? 1 : 0)};
}

namespace {

[[noreturn]] void refuse(const Request& request, const std::string& fact) {
  throw std::invalid_argument("make_schedule(" + std::string(name_of(request.op)) + "): " + fact);
}

void check_blocks(const Request& request, const char* name, const std::vector<std::uint64_t>& blocks) {
  if (blocks.size() == static_cast<std::size_t>(request.world)) return;
  refuse(request, std::string(name) + " has " + std::to_string(blocks.size()) + " entries, the world has " +
                      std::to_string(request.world) + " ranks");
}

// Only the fields that `request.op` uses are judged.
void check(const Request& request) {
  const std::string world = std::to_string(request.world);
  if (request.world < 1) refuse(request, "world " + world + " is below 1");
  if (request.rank < 0 || request.rank >= request.world)
    refuse(request, "rank " + std::to_string(request.rank) + " is outside 0.." + std::to_string(request.world - 1));
  switch (request.op) {
    case Op::reduce:
    case Op::broadcast:
    case Op::gather:
    case Op::scatter:
      if (request.root < 0 || request.root >= request.world)
        refuse(request, "root " + std::to_string(request.root) + " is outside 0.." + std::to_string(request.world - 1));
      break;
    default: break;
  }
  if (request.hierarchy && request.hierarchy->world() != request.world)
    refuse(request, "the hierarchy has " + std::to_string(request.hierarchy->world()) + " ranks, the world " + world);
  switch (request.op) {
    case Op::all_gather:
    case Op::reduce_scatter:
    case Op::gather:
    case Op::scatter: check_blocks(request, "blocks", request.blocks); break;
    case Op::all_to_all: {
      check_blocks(request, "blocks", request.blocks);
      check_blocks(request, "send_blocks", request.send_blocks);
      const auto own = static_cast<std::size_t>(request.rank);
      if (request.blocks[own] != request.send_blocks[own])
        refuse(request, "rank " + std::to_string(request.rank) + " sends itself " +
                            std::to_string(request.send_blocks[own]) + " elements but receives " +
                            std::to_string(request.blocks[own]));
      const auto differs = [&](std::uint64_t block) { return block != request.blocks[own]; };
      if (request.even && (std::any_of(request.blocks.begin(), request.blocks.end(), differs) ||
                           std::any_of(request.send_blocks.begin(), request.send_blocks.end(), differs)))
        refuse(request, "blocks that are said to be even differ");
      break;
    }
    default: break;
  }
}

// The accesses so far to one buffer: disjoint pieces in order of offset, each with its last writer and everyone who
// has read it since. Older writers and readers need no edge of their own: the last writer touched every element of
// the piece and already waits for them, element by element and therefore chunk by chunk.
class AccessMap {
 public:
  void read(std::uint32_t step, const Slice& slice, std::vector<std::uint32_t>& before) {
    const std::uint64_t end = slice.offset + slice.count;
    auto piece = cut(slice.offset, end);
    for (std::uint64_t at = slice.offset; at < end;) {
      if (piece == pieces_.end() || piece->first > at) {  // nobody was here before
        const std::uint64_t until = piece == pieces_.end() ? end : std::min(end, piece->first);
        piece = pieces_.emplace_hint(piece, at, Piece{until, kNobody, {}});
      }
      if (piece->second.writer != kNobody) before.push_back(piece->second.writer);
      piece->second.readers.push_back(step);
      at = piece->second.end;
      ++piece;
    }
  }

  void write(std::uint32_t step, const Slice& slice, std::vector<std::uint32_t>& before) {
    const std::uint64_t end = slice.offset + slice.count;
    auto piece = cut(slice.offset, end);
    while (piece != pieces_.end() && piece->first < end) {
      if (piece->second.writer != kNobody) before.push_back(piece->second.writer);
      before.insert(before.end(), piece->second.readers.begin(), piece->second.readers.end());
      piece = pieces_.erase(piece);
    }
    pieces_.emplace_hint(piece, slice.offset, Piece{end, step, {}});
  }

 private:
  struct Piece {
    std::uint64_t end;
    std::uint32_t writer;
    std::vector<std::uint32_t> readers;
  };
  using Pieces = std::map<std::uint64_t, Piece>;
  static constexpr std::uint32_t kNobody = std::numeric_limits<std::uint32_t>::max();

  // Makes piece borders at `begin` and `end`; returns the first piece at or after `begin`. Ranges that repeat, as
  // nearly all do, find their borders in place.
  Pieces::iterator cut(std::uint64_t begin, std::uint64_t end) {
    cut_at(end);
    return cut_at(begin);
  }

  Pieces::iterator cut_at(std::uint64_t place) {
    auto next = pieces_.lower_bound(place);
    if (next == pieces_.begin() || (next != pieces_.end() && next->first == place)) return next;
    auto& before = std::prev(next)->second;
    if (before.end <= place) return next;
    Piece tail = before;
    before.end = place;
    return pieces_.emplace_hint(next, place, std::move(tail));
  }

  Pieces pieces_;
};

struct Access {
  const Slice* slice;
  bool writes;
};

// What a step touches, reads first.
std::pair<std::array<Access, 2>, std::size_t> accesses_of(const Step& step) {
  switch (step.kind) {
    case StepKind::send: return {{{{&step.from, false}, {}}}, 1};
    case StepKind::recv: return {{{{&step.to, true}, {}}}, 1};
    case StepKind::finish: return {{{{&step.to, true}, {}}}, 1};  // reads and writes one range: writing covers both
    case StepKind::recv_reduce:
    case StepKind::copy: return {{{{&step.from, false}, {&step.to, true}}}, 2};
  }
  return {};
}

// True when every conflict between the two steps is over one and the same range.
bool meet_exactly(const Step& a, const Step& b) {
  const auto [of_a, count_a] = accesses_of(a);
  const auto [of_b, count_b] = accesses_of(b);
  for (std::size_t i = 0; i < count_a; ++i) {
    for (std::size_t j = 0; j < count_b; ++j) {
      const Slice& x = *of_a[i].slice;
      const Slice& y = *of_b[j].slice;
      const bool conflict = x.buffer == y.buffer && (of_a[i].writes || of_b[j].writes) &&
                            x.offset < y.offset + y.count && y.offset < x.offset + x.count;
      if (conflict && x != y) return false;
    }
  }
  return true;
}

}  // namespace

std::vector<std::vector<Dependency>> dependencies_of(const Schedule& schedule) {
  std::vector<std::vector<Dependency>> result(schedule.steps.size());
  std::array<AccessMap, 3> buffers;
  std::vector<std::uint32_t> before;
  for (std::uint32_t index = 0; index < schedule.steps.size(); ++index) {
    const Step& step = schedule.steps[index];
    before.clear();
    const auto [accesses, count] = accesses_of(step);
    for (std::size_t i = 0; i < count; ++i) {
      const Slice& slice = *accesses[i].slice;
      if (slice.count == 0) continue;
      AccessMap& buffer = buffers[static_cast<std::size_t>(slice.buffer)];
      accesses[i].writes ? buffer.write(index, slice, before) : buffer.read(index, slice, before);
    }
    std::sort(before.begin(), before.end());
    before.erase(std::unique(before.begin(), before.end()), before.end());
    for (const std::uint32_t on : before)
      if (on != index) result[index].push_back({on, meet_exactly(schedule.steps[on], step)});
  }
  return result;
}

namespace {

// What a world of the members alone would do, with its ranks named as they are in this one.
Schedule among_members(const Request& request) {
  const auto& members = *request.members;
  const auto index_of = [&](const char* what, std::int32_t rank) {
    const auto place = std::find(members.begin(), members.end(), rank);
    if (place == members.end()) refuse(request, std::string(what) + " " + std::to_string(rank) + " is not a member");
    return static_cast<std::int32_t>(place - members.begin());
  };
  for (const std::int32_t member : members) {
    if (member < 0 || member >= request.world) refuse(request, "member " + std::to_string(member) + " is no rank");
  }
  Request among = request;
  among.members = nullptr;
  among.hierarchy = nullptr;
  among.world = participants(request);
  among.rank = index_of("rank", request.rank);
  const bool rooted =
      request.op == Op::reduce || request.op == Op::broadcast || request.op == Op::gather || request.op == Op::scatter;
  if (rooted) among.root = index_of("root", request.root);
  Schedule schedule = make_schedule(among);
  for (Step& step : schedule.steps) {
    if (step.peer >= 0) step.peer = members[static_cast<std::size_t>(step.peer)];
  }
  return schedule;
}

}  // namespace

Schedule make_schedule(const Request& request) {
  if (request.members) return among_members(request);
  check(request);
  return make_checked(request);
}

}  // namespace torch_iroh::collective
