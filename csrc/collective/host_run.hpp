// One collective among ranks that share memory, carried out by this rank: shows its bytes, takes and reduces those of
// the others, and says what it waits for when it cannot go on. Never blocks and never sleeps; whoever drives it does.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/execution.hpp"
#include "collective/host_plan.hpp"
#include "transport/host_team.hpp"

namespace torch_iroh::collective {

class HostRun {
 public:
  // It waits until that rank (HostTeam::kEveryone: all others) has come this far.
  struct Blocked {
    int rank = transport::HostTeam::kNobody;
    std::uint64_t phase = 0;
  };

  // Where a call stands among all calls of its group.
  struct Place {
    std::uint64_t sequence = 0;
    std::uint64_t turn = 0;     // rounds of all calls before, alike on all ranks
    std::uint64_t history = 0;  // what stands for their descriptions
    std::string previous{};     // the last of these
  };

  // `description` and what was called before are compared with those of every rank that something is taken from.
  HostRun(transport::HostTeam& team, const Request& request, const Work& work, std::string description, Place place);

  // Goes on as far as it can. nullopt: finished. Throws Error (mismatch, peer_gone).
  std::optional<Blocked> step();
  Place next_place() const;  // once it has finished
  // Throws what a rank that failed has said.
  void check_sources() const;
  // Ranks that have not come as far as this rank needs, and those among them that have not begun this call.
  std::vector<int> waiting_for() const;
  bool has_begun(int rank) const;

 private:
  enum class Moment : std::uint8_t { enter, take, sums, done, over };

  struct Transfer {
    const HostRound::Take* take = nullptr;  // else `copy`
    const HostRound::Copy* copy = nullptr;  // of this rank's own bytes
    std::uint64_t done = 0;                 // elements
    bool ready = false;

    const Slice& to() const { return take != nullptr ? take->to : copy->to; }
  };

  std::uint64_t phase_of(std::uint64_t turn, std::uint64_t moment) const { return turn * 4 + moment; }
  std::optional<Blocked> need(int rank, std::uint64_t phase) const;
  std::optional<Blocked> need_all(std::uint64_t phase) const;
  void make_readable();
  void begin_round();
  void show();
  void check_call(int rank);
  void check_amounts(int rank) const;
  void agree_on_rounds();
  bool needs_everyone() const { return plan_.waits_for_all || !plan_.terms.empty(); }
  bool takes_from(int rank) const;
  void plan_transfers();
  // Moves what the ranks that have come as far as `phase` show, the range that is furthest behind first.
  std::optional<Blocked> transfer(std::uint64_t phase, bool backwards);
  void move_piece(Transfer& one, bool backwards);
  void reduce_terms();

  std::byte* at(const Slice& slice, std::uint64_t element = 0) const;
  const std::byte* shown(const Shown& from, std::uint64_t element, std::uint64_t count, std::byte* buffer) const;
  std::uint64_t address_of(const Shown& from, std::uint64_t element) const;

  transport::HostTeam& team_;
  const Request request_;
  Work work_;
  const std::string description_;
  const std::size_t element_;
  const Place place_;
  HostCut cut_;
  bool direct_ = false;
  std::uint64_t rounds_ = 1;
  std::uint64_t round_ = 0;
  HostRound plan_;
  Moment moment_ = Moment::enter;
  std::vector<Transfer> transfers_;
  std::vector<bool> checked_;  // by rank: its call of this round is this rank's
  std::unique_ptr<std::byte[]> scratch_;
  std::unique_ptr<std::byte[]> scaled_;
  std::unique_ptr<std::byte[]> readable_;  // stands for the caller's buffer, which others cannot read
  std::byte* callers_output_ = nullptr;    // where the result goes then
  std::unique_ptr<std::byte[]> buffer_;    // for terms read from other processes
  std::unique_ptr<float[]> wide_;
};

}  // namespace torch_iroh::collective
