// What the verifier computes with instead of numbers: the terms that memory elements stand for, and where the buffers
// of a request lie in a rank's symbolic memory. Internal to verifier.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "collective/verifier.hpp"

namespace torch_iroh::collective::symbolic {

using Bits = std::vector<std::uint64_t>;
inline void set_bit(Bits& bits, std::uint64_t i) {
  bits[i / 64] |= std::uint64_t{1} << (i % 64);
}
inline bool has_bit(const Bits& bits, std::uint64_t i) {
  return (bits[i / 64] >> (i % 64)) & 1;
}
inline void unite(Bits& into, const Bits& from) {
  for (std::size_t i = 0; i < into.size(); ++i) into[i] |= from[i];
}

struct Fault {  // the first one ends the verification
  std::string why;
};
[[noreturn]] inline void fault(const std::string& why) {
  throw Fault{why};
}

inline std::uint64_t total(const std::vector<std::uint64_t>& blocks) {
  return std::accumulate(blocks.begin(), blocks.end(), std::uint64_t{0});
}

// Where a request's buffers lie in one rank's memory: [input | output | scratch], or overlapping when in place.
struct Layout {
  std::uint64_t start[3] = {0, 0, 0};
  std::uint64_t length[3] = {0, 0, 0};
  std::uint64_t size = 0;

  Layout(const Program& program, bool in_place) {
    const Request& q = program.request;
    const std::uint64_t own = q.blocks.empty() ? 0 : q.blocks[q.rank];
    const std::uint64_t before =
        q.blocks.empty() ? 0 : std::accumulate(q.blocks.begin(), q.blocks.begin() + q.rank, std::uint64_t{0});
    const bool root = q.rank == q.root;
    std::uint64_t& input = length[0];
    std::uint64_t& output = length[1];
    std::uint64_t shared_in = 0, shared_out = 0;  // in place: input[shared_in] is output[shared_out]
    bool alias = in_place;
    switch (q.op) {
      case Op::all_reduce:
      case Op::broadcast: output = q.count, alias = false; break;
      case Op::reduce: input = q.count, output = root ? q.count : 0; break;
      case Op::all_gather: input = own, output = total(q.blocks), shared_out = before; break;
      case Op::reduce_scatter: input = total(q.blocks), output = own, shared_in = before; break;
      case Op::gather: input = own, output = root ? total(q.blocks) : 0, shared_out = root ? before : 0; break;
      case Op::scatter: input = root ? total(q.blocks) : 0, output = own, shared_in = root ? before : 0; break;
      case Op::all_to_all: input = total(q.send_blocks), output = total(q.blocks), alias = false; break;
      case Op::barrier: alias = false; break;
    }
    if (input == 0 || output == 0) alias = false;
    start[0] = alias ? shared_out : 0;
    start[1] = alias ? shared_in : input;
    length[2] = program.schedule.scratch_count;
    start[2] = std::max(start[0] + input, start[1] + output);
    size = start[2] + length[2];
  }

  std::uint64_t at(const Slice& slice) const { return start[static_cast<int>(slice.buffer)] + slice.offset; }
};

// What an element of memory means, as a number that is the same in every run: 0 = nothing was written; an element that
// some rank had at the start; a sum of two terms; a finished sum. Equal numbers mean equal bits, whatever the dtype.
class Terms {
 public:
  using Id = std::uint32_t;

  explicit Terms(std::size_t world) : words_((world + 63) / 64), terms_(1) {}

  Id source(std::uint32_t rank, std::uint64_t index) { return intern({1, rank, index}, {rank, index, {}, false}); }

  Id sum(Id a, Id b) {
    if (a == 0 || b == 0) fault("adds an element that was never written");
    if (terms_[a].finished || terms_[b].finished) fault("adds to a finished sum");
    if (terms_[a].index != terms_[b].index) fault("adds element " + name(b) + " to element " + name(a));
    Bits parts = parts_of(a);
    const Bits other = parts_of(b);
    for (std::size_t i = 0; i < words_; ++i)
      if (parts[i] & other[i]) fault("adds a contribution twice: " + name(a) + " and " + name(b));
    unite(parts, other);
    return intern({2, a, b}, {0, terms_[a].index, parts, false});
  }

  Id finish(Id a) {
    if (a == 0) fault("finishes an element that was never written");
    if (terms_[a].finished) fault("finishes " + name(a) + " twice");
    return intern({3, a, 0}, {0, terms_[a].index, parts_of(a), true});
  }

  bool is_source(Id id, std::uint32_t rank, std::uint64_t index) const {
    return id != 0 && terms_[id].parts.empty() && terms_[id].rank == rank && terms_[id].index == index;
  }
  bool is_whole(Id id, std::uint64_t index, std::size_t world) const {
    if (id == 0 || !terms_[id].finished || terms_[id].index != index) return false;
    for (std::size_t rank = 0; rank < world; ++rank)
      if (!has_bit(terms_[id].parts, rank)) return false;
    return true;
  }
  std::uint64_t index_of(Id id) const { return terms_[id].index; }

  std::string name(Id id) const {
    if (id == 0) return "nothing";
    const Term& term = terms_[id];
    if (term.parts.empty()) return std::to_string(term.rank) + "[" + std::to_string(term.index) + "]";
    std::string text = term.finished ? "finished sum of" : "sum of";
    for (std::size_t rank = 0; rank < words_ * 64; ++rank)
      if (has_bit(term.parts, rank)) text += " " + std::to_string(rank);
    return text + " [" + std::to_string(term.index) + "]";
  }

 private:
  struct Term {
    std::uint32_t rank = 0;
    std::uint64_t index = 0;
    Bits parts;  // the ranks inside a sum; empty for a source element
    bool finished = false;
  };
  struct Key {
    int kind;
    std::uint64_t a, b;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const { return (key.a * 3 + key.kind) * 0x9e3779b97f4a7c15u + key.b; }
  };

  Id intern(Key key, Term term) {
    const auto [found, is_new] = ids_.try_emplace(key, static_cast<Id>(terms_.size()));
    if (is_new) terms_.push_back(std::move(term));
    return found->second;
  }
  Bits parts_of(Id id) const {
    if (!terms_[id].parts.empty()) return terms_[id].parts;
    Bits parts(words_);
    set_bit(parts, terms_[id].rank);
    return parts;
  }

  std::size_t words_;
  std::vector<Term> terms_;
  std::unordered_map<Key, Id, Hash> ids_;
};

}  // namespace torch_iroh::collective::symbolic
