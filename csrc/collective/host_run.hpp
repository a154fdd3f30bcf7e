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
  // It waits until that rank has come this far.
  struct Blocked {
    int rank = -1;
    std::uint64_t phase = 0;
  };

  // `description` is compared with that of every rank that something is taken from. A turn is one round of one call:
  // they are counted through all calls of a group, alike on all ranks.
  HostRun(transport::HostTeam& team, const Request& request, const Work& work, std::string description,
          std::uint64_t first_turn);

  // Goes on as far as it can. nullopt: finished. Throws Error (mismatch, peer_gone).
  std::optional<Blocked> step();

  std::uint64_t turns() const { return rounds_; }  // once it has finished
  const std::string& description() const { return description_; }
  // Ranks that have not come as far as this rank needs, and those among them that have not begun this call.
  std::vector<int> waiting_for() const;
  bool has_begun(int rank) const;

 private:
  enum class Moment : std::uint8_t { enter, take, sums, done, over };

  std::uint64_t phase_of(std::uint64_t turn, std::uint64_t moment) const { return turn * 4 + moment; }
  std::optional<Blocked> need(int rank, std::uint64_t phase) const;
  std::optional<Blocked> need_all(std::uint64_t phase);
  void begin_round();
  void show();
  void check_call(int rank) const;
  void check_amounts(int rank) const;
  void agree_on_rounds();
  bool takes_from(int rank) const;
  void take(const HostRound::Take& one);
  void reduce_terms();
  void check_sources() const;

  std::byte* at(const Slice& slice, std::uint64_t element = 0) const;
  const std::byte* shown(const Shown& from, std::uint64_t element, std::uint64_t count, std::byte* buffer) const;
  std::uint64_t address_of(const Shown& from, std::uint64_t element) const;

  transport::HostTeam& team_;
  const Request request_;
  const Work work_;
  const std::string description_;
  const std::size_t element_;
  const std::uint64_t first_turn_;
  HostCut cut_;
  bool direct_ = false;
  std::uint64_t rounds_ = 1;
  std::uint64_t round_ = 0;
  HostRound plan_;
  Moment moment_ = Moment::enter;
  int next_rank_ = 0;  // up to here every rank is known to have come as far as the moment needs
  std::unique_ptr<std::byte[]> scratch_;
  std::unique_ptr<std::byte[]> scaled_;
  std::unique_ptr<std::byte[]> buffer_;  // for terms read from other processes
  std::unique_ptr<float[]> wide_;
};

}  // namespace torch_iroh::collective
