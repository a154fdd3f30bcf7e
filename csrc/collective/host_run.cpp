#include "collective/host_run.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/error.hpp"
#include "collective/builder.hpp"
#include "collective/failure_text.hpp"
#include "collective/reduce.hpp"

namespace torch_iroh::collective {
namespace {

using transport::HostTeam;

constexpr std::uint64_t kShown = 1, kReduced = 2, kDone = 3;

// Up to here a copy into shared memory costs less than the moment that reading directly needs to be over.
constexpr std::size_t kMostShownBytes = 512 << 10;
// Up to here adding everything up everywhere costs less than waiting for each other twice.
constexpr std::size_t kMostRedundantBytes = 32 << 10;
// Read from another process at once: fits the cache beside what it is added to, and pays for the system call.
constexpr std::size_t kPieceBytes = 256 << 10;

std::size_t shown_bytes(const Request& request, const HostCut& cut, std::size_t element) {
  // In one round nothing is longer than a step.
  return cut.rounds > 1 ? HostTeam::kWindowBytes : most_shown_elements(request) * element;
}

// How many of its own elements this rank lets others take.
std::uint64_t own_shown_elements(const Request& request) {
  const auto sum = [](const std::vector<std::uint64_t>& blocks) {
    return std::accumulate(blocks.begin(), blocks.end(), std::uint64_t{0});
  };
  const bool root = request.rank == request.root;
  switch (request.op) {
    case Op::all_reduce:
    case Op::reduce: return request.count;
    case Op::broadcast: return root ? request.count : 0;
    case Op::all_gather:
    case Op::gather: return request.blocks[static_cast<std::size_t>(request.rank)];
    case Op::reduce_scatter: return sum(request.blocks);
    case Op::scatter: return root ? sum(request.blocks) : 0;
    case Op::all_to_all: return sum(request.send_blocks);
    case Op::barrier: break;
  }
  return 0;
}

}  // namespace

HostRun::HostRun(HostTeam& team, const Request& request, const Work& work, std::string description, Place place)
    : team_(team),
      request_(request),
      work_(work),
      description_(std::move(description)),
      element_(size_of(work.dtype)),
      place_(std::move(place)),
      cut_(cut_for_windows(request, HostTeam::kWindowBytes / element_, kMostRedundantBytes / element_)) {
  if (team.direct()) {
    direct_ = shown_bytes(request, cut_, element_) > kMostShownBytes;
    cut_ = cut_for_direct(cut_);
  }
  rounds_ = cut_.rounds;
  if (work_.reduce == ReduceOp::premul_sum && reduces(request.op)) {
    if (request.op == Op::all_reduce) {
      scale(work_.dtype, work_.output, request.count, work_.premul);
    } else {
      const std::uint64_t count = input_elements(request);
      scaled_ = std::make_unique_for_overwrite<std::byte[]>(count * element_);
      std::memcpy(scaled_.get(), work_.input, count * element_);
      scale(work_.dtype, scaled_.get(), count, work_.premul);
    }
  }
  if (direct_) make_readable();
}

// What others would read directly, if the kernel let them, is shown as a copy.
void HostRun::make_readable() {
  const bool shows_output = request_.op == Op::all_reduce || request_.op == Op::broadcast;
  const std::byte* const shown = shows_output ? work_.output : work_.input;
  const std::size_t bytes = own_shown_elements(request_) * element_;
  if (scaled_ || transport::is_readable_by_others(shown, bytes)) return;
  readable_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
  std::memcpy(readable_.get(), shown, bytes);
  if (!shows_output) {
    work_.input = readable_.get();
  } else {
    callers_output_ = std::exchange(work_.output, readable_.get());
  }
}

std::byte* HostRun::at(const Slice& slice, std::uint64_t element) const {
  const std::uint64_t offset = (slice.offset + element) * element_;
  switch (slice.buffer) {
    // The plan never writes to the input: the const is cast away only to give all buffers one type.
    case Buffer::input: return (scaled_ ? scaled_.get() : const_cast<std::byte*>(work_.input)) + offset;
    case Buffer::output: return work_.output + offset;
    case Buffer::scratch: break;
  }
  return scratch_.get() + offset;
}

std::optional<HostRun::Blocked> HostRun::need(int rank, std::uint64_t phase) const {
  if (team_.phase(rank) >= phase) return std::nullopt;
  return Blocked{rank, phase};
}

std::optional<HostRun::Blocked> HostRun::need_all(std::uint64_t phase) const {
  if (team_.has_come(HostTeam::kEveryone, phase)) return std::nullopt;
  return Blocked{HostTeam::kEveryone, phase};
}

bool HostRun::takes_from(int rank) const {
  if (needs_everyone()) return true;
  return std::any_of(plan_.takes.begin(), plan_.takes.end(), [&](const auto& one) { return one.from.peer == rank; });
}

std::optional<HostRun::Blocked> HostRun::step() {
  for (;;) {
    const std::uint64_t turn = place_.turn + round_;
    switch (moment_) {
      case Moment::enter:
        // The place for this turn's call and window was that of the turn before the last.
        if (turn >= 2) {
          if (auto blocked = need_all(phase_of(turn - 2, kDone))) return blocked;
        }
        begin_round();
        show();
        team_.advance_to(phase_of(turn, kShown));
        plan_transfers();
        moment_ = Moment::take;
        break;
      case Moment::take:
        // Not one by one where all are needed and the bytes are few: each of them would wake this rank.
        if (needs_everyone() && !direct_) {
          if (auto blocked = need_all(phase_of(turn, kShown))) return blocked;
        }
        if (auto blocked = transfer(phase_of(turn, kShown), false)) return blocked;
        if (needs_everyone()) {
          if (auto blocked = need_all(phase_of(turn, kShown))) return blocked;
          for (int rank = 0; rank < request_.world; ++rank) {
            if (rank != request_.rank) check_call(rank);
          }
        }
        if (request_.op == Op::all_to_all && round_ == 0) agree_on_rounds();
        if (!plan_.terms.empty()) reduce_terms();
        if (plan_.shows_sum) {
          check_sources();
          team_.advance_to(phase_of(turn, kReduced));
        }
        transfers_.clear();
        for (const auto& one : plan_.takes_of_sums) transfers_.push_back({.take = &one});
        moment_ = Moment::sums;
        break;
      case Moment::sums:
        if (!transfers_.empty() && !direct_) {
          if (auto blocked = need_all(phase_of(turn, kReduced))) return blocked;
        }
        // What was added up last is still in the cache.
        if (auto blocked = transfer(phase_of(turn, kReduced), true)) return blocked;
        check_sources();
        team_.advance_to(phase_of(turn, kDone));
        moment_ = Moment::done;
        break;
      case Moment::done:
        if (direct_ && plan_.is_taken_from) {
          if (auto blocked = need_all(phase_of(turn, kDone))) return blocked;
        }
        if (++round_ == rounds_) {
          if (callers_output_ != nullptr) std::memcpy(callers_output_, work_.output, request_.count * element_);
          moment_ = Moment::over;
          return std::nullopt;
        }
        moment_ = Moment::enter;
        break;
      case Moment::over: return std::nullopt;
    }
  }
}

void HostRun::begin_round() {
  plan_ = plan_round(request_, cut_, round_);
  checked_.assign(static_cast<std::size_t>(request_.world), false);
  if (plan_.scratch_count > 0 && !scratch_) {
    // No later round has a longer shard.
    scratch_ = std::make_unique_for_overwrite<std::byte[]>(plan_.scratch_count * element_);
  }
}

void HostRun::show() {
  const std::uint64_t turn = place_.turn + round_;
  HostTeam::Call& call = team_.call(turn);
  call.rounds = rounds_;
  call.direct = direct_;
  call.addresses[0] = reinterpret_cast<std::uint64_t>(scaled_ ? scaled_.get() : work_.input);
  call.addresses[1] = reinterpret_cast<std::uint64_t>(work_.output);
  call.addresses[2] = reinterpret_cast<std::uint64_t>(scratch_.get());
  call.history = place_.history;
  call.text.set(description_);
  call.previous.set(place_.previous);
  if (request_.op == Op::all_to_all) {
    const auto amounts = team_.amounts(turn);
    std::uint64_t offset = 0;
    for (std::size_t rank = 0; rank < amounts.size(); ++rank) {
      amounts[rank] = {offset, request_.send_blocks[rank]};
      offset += request_.send_blocks[rank];
    }
  }
  if (!direct_) {
    std::byte* window = team_.window(turn);
    for (const auto& one : plan_.shows) {
      std::memcpy(window + one.in_window * element_, at(one.from), one.from.count * element_);
    }
  }
}

void HostRun::check_call(int rank) {
  if (checked_[static_cast<std::size_t>(rank)]) return;
  const HostTeam::Call& theirs = team_.call_of(rank, place_.turn + round_);
  const auto compare = [&](std::uint64_t sequence, const std::string& full, const HostTeam::Text& other) {
    const std::string mine = full.substr(0, HostTeam::Text::kMostBytes);
    const std::string text = other.get();
    if (text == mine) return;
    throw Error(ErrorKind::mismatch, "the ranks disagree about collective #" + std::to_string(sequence) + ": rank " +
                                         std::to_string(request_.rank) + " called " + mine + ", rank " +
                                         std::to_string(rank) + " called " + text);
  };
  if (theirs.history != place_.history) {
    compare(place_.sequence - 1, place_.previous, theirs.previous);
    throw Error(ErrorKind::mismatch, "rank " + std::to_string(request_.rank) + " and rank " + std::to_string(rank) +
                                         " called different collectives before #" + std::to_string(place_.sequence));
  }
  compare(place_.sequence, description_, theirs.text);
  if (request_.op == Op::all_to_all) check_amounts(rank);
  checked_[static_cast<std::size_t>(rank)] = true;
}

void HostRun::check_amounts(int rank) const {
  const auto amount = team_.amounts_of(rank, place_.turn + round_)[static_cast<std::size_t>(request_.rank)];
  const std::uint64_t expected = request_.blocks[static_cast<std::size_t>(rank)];
  if (amount.count == expected) return;
  throw Error(ErrorKind::mismatch, "the ranks disagree about " + title_of(place_.sequence, description_) + ": rank " +
                                       std::to_string(rank) + " sends " + std::to_string(amount.count) +
                                       " elements to rank " + std::to_string(request_.rank) + ", which expects " +
                                       std::to_string(expected));
}

// An all_to_all has as many rounds as the rank with the longest part for another.
void HostRun::agree_on_rounds() {
  for (int rank = 0; rank < request_.world; ++rank) {
    if (rank != request_.rank) rounds_ = std::max(rounds_, team_.call_of(rank, place_.turn).rounds);
  }
}

std::uint64_t HostRun::address_of(const Shown& from, std::uint64_t element) const {
  const std::uint64_t turn = place_.turn + round_;
  std::uint64_t offset = from.offset + element;
  if (request_.op == Op::all_to_all) {
    offset += team_.amounts_of(from.peer, turn)[static_cast<std::size_t>(request_.rank)].offset;
  }
  return team_.call_of(from.peer, turn).addresses[static_cast<std::size_t>(from.buffer)] + offset * element_;
}

// `count` elements from `element` on: in the peer's window, or read into `buffer`.
const std::byte* HostRun::shown(const Shown& from, std::uint64_t element, std::uint64_t count,
                                std::byte* buffer) const {
  const std::uint64_t turn = place_.turn + round_;
  if (from.peer == request_.rank || !team_.call_of(from.peer, turn).direct) {
    return team_.window_of(from.peer, turn) + (from.in_window + element) * element_;
  }
  try {
    team_.read(from.peer, address_of(from, element), buffer, count * element_);
  } catch (const Error&) {
    check_sources();  // one that gave its memory back has said why
    throw;
  }
  return buffer;
}

void HostRun::plan_transfers() {
  transfers_.clear();
  for (const auto& one : plan_.copies) {
    if (at(one.to) != at(one.from)) transfers_.push_back({.copy = &one, .ready = true});
  }
  for (const auto& one : plan_.takes) transfers_.push_back({.take = &one});
}

std::optional<HostRun::Blocked> HostRun::transfer(std::uint64_t phase, bool backwards) {
  for (;;) {
    Transfer* next = nullptr;
    int missing = -1;
    for (Transfer& one : transfers_) {
      if (one.done == one.to().count) continue;
      if (!one.ready) {
        const int peer = one.take->from.peer;
        if (need(peer, phase)) {
          if (missing < 0) missing = peer;
          continue;
        }
        check_call(peer);
        one.ready = true;
      }
      // All ranks are at about the same place of all ranges, so what one has read another finds in the cache.
      if (next == nullptr || one.done < next->done) next = &one;
    }
    if (next != nullptr) {
      move_piece(*next, backwards);
    } else if (missing >= 0) {
      return Blocked{missing, phase};
    } else {
      return std::nullopt;
    }
  }
}

void HostRun::move_piece(Transfer& one, bool backwards) {
  const std::uint64_t all = one.to().count;
  const std::uint64_t count = std::min(kPieceBytes / element_, all - one.done);
  const std::uint64_t first = backwards ? all - one.done - count : one.done;
  one.done += count;
  std::byte* const to = at(one.to(), first);
  const std::byte* const from =
      one.take != nullptr ? shown(one.take->from, first, count, to) : at(one.copy->from, first);
  if (from != to) std::memcpy(to, from, count * element_);
}

void HostRun::reduce_terms() {
  const bool is_wide = accumulates_wide(work_.reduce, work_.dtype);
  const std::uint64_t piece = kPieceBytes / element_;
  if (!buffer_ && direct_) buffer_ = std::make_unique_for_overwrite<std::byte[]>(kPieceBytes);
  if (!wide_ && is_wide) wide_ = std::make_unique_for_overwrite<float[]>(piece);
  for (std::uint64_t first = 0; first < plan_.sum.count; first += piece) {
    const std::uint64_t count = std::min(piece, plan_.sum.count - first);
    std::byte* const sum = at(plan_.sum, first);
    const auto term = [&](std::size_t index) -> const std::byte* {
      if (static_cast<std::int32_t>(index) == plan_.own_term) return at(plan_.own, first);
      return shown(plan_.terms[index], first, count, buffer_.get());
    };
    const std::byte* const head = term(0);
    for (std::size_t i = 1; i < plan_.terms.size(); ++i) {
      if (!is_wide) {
        reduce(work_.reduce, work_.dtype, i == 1 ? head : sum, term(i), sum, count);
      } else if (i == 1) {
        begin_wide(work_.reduce, work_.dtype, head, term(i), wide_.get(), count);
      } else {
        add_wide(work_.reduce, work_.dtype, wide_.get(), term(i), count);
      }
    }
    if (is_wide) {
      const float divisor = work_.reduce == ReduceOp::avg ? static_cast<float>(request_.world) : 1.0F;
      end_wide(work_.dtype, wide_.get(), divisor, sum, count);
    } else {
      finish(work_.reduce, work_.dtype, sum, count, request_.world);
    }
    if (plan_.shows_sum && !direct_) {
      std::byte* const window = team_.window(place_.turn + round_) + (plan_.sum_in_window + first) * element_;
      std::memcpy(window, sum, count * element_);
    }
  }
}

// A rank that failed may have taken its memory back while it was read.
void HostRun::check_sources() const {
  for (int rank = 0; rank < request_.world; ++rank) {
    if (rank == request_.rank || team_.standing(rank) != HostTeam::Standing::failed) continue;
    throw Error(ErrorKind::peer_gone, team_.reason_of(rank) + " (reported by rank " + std::to_string(rank) + ")");
  }
}

std::vector<int> HostRun::waiting_for() const {
  const std::uint64_t turn = place_.turn + round_;
  std::vector<int> ranks;
  const auto add = [&](int rank, std::uint64_t phase) {
    if (rank != request_.rank && team_.phase(rank) < phase) ranks.push_back(rank);
  };
  for (int rank = 0; rank < request_.world; ++rank) {
    switch (moment_) {
      case Moment::enter: add(rank, turn < 2 ? 0 : phase_of(turn - 2, kDone)); break;
      case Moment::take:
        if (takes_from(rank)) add(rank, phase_of(turn, kShown));
        break;
      case Moment::sums:
        if (!plan_.takes_of_sums.empty()) add(rank, phase_of(turn, kReduced));
        break;
      case Moment::done: add(rank, phase_of(turn, kDone)); break;
      case Moment::over: break;
    }
  }
  return ranks;
}

HostRun::Place HostRun::next_place() const {
  std::uint64_t history = place_.history ^ 0xcbf29ce484222325;  // FNV-1a
  for (const char character : description_) {
    history = (history ^ static_cast<unsigned char>(character)) * 0x100000001b3;
  }
  return {place_.sequence + 1, place_.turn + rounds_, history, description_};
}

bool HostRun::has_begun(int rank) const {
  return team_.phase(rank) >= phase_of(place_.turn, kShown);
}

}  // namespace torch_iroh::collective
