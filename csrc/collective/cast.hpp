// Who is simulated in a world's place: everyone, one period of a world that looks the same from every period, or one
// host for each kind of host. Knows schedules and the places of ranks; knows no time.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

#include "collective/link_model.hpp"
#include "collective/schedule.hpp"

namespace torch_iroh::collective {

// More than a stated bound; the text names it.
class TooLarge : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

inline constexpr std::uint64_t kMostPieces = 32'000'000;         // chunks of steps, of all ranks that are simulated
inline constexpr std::uint64_t kMostSteps = 16'000'000;          // of the same
inline constexpr std::uint64_t kMostScannedSteps = 200'000'000;  // of all ranks of a world that is cast by kinds
inline constexpr int kMostRounds = 64;                           // of telling kinds apart

struct Player {
  std::int32_t rank = 0;
  std::uint64_t stands_for = 1;  // ranks, itself included
};

// A send: of `player`, either its step number `step`, or (step < 0) its message `message` to `peer`.
struct Origin {
  std::uint32_t player = 0;
  std::int64_t step = -1;
  std::int32_t peer = 0;
  std::uint32_t message = 0;
};

struct Cast {
  Request request;              // `rank` does not matter
  std::vector<Player> players;  // whole hosts, in rank order
  // What feeds the receive of `message` from `peer` at `receiver`.
  std::function<Origin(std::int32_t receiver, std::int32_t peer, std::uint32_t message)> origin_of;
};

Request for_rank(Request request, std::int32_t rank);
std::uint64_t elements_of(const Step& step);

struct Size {
  std::uint64_t steps = 0;
  std::uint64_t pieces = 0;  // chunks of steps
  bool within(const Size& most) const { return steps <= most.steps && pieces <= most.pieces; }
};
inline constexpr Size kMost{kMostSteps, kMostPieces};

Size size_of(const Schedule& schedule, std::uint64_t chunk_elements);
// Of all players; stops counting above `most`.
Size size_of(const Request& request, const std::vector<Player>& players, std::uint64_t chunk_elements,
             const Size& most);
// Of the whole world if all ranks were as the median of a few: tells what is far too large without counting it.
Size rough_size_of(const Request& request, std::uint64_t chunk_elements);

Cast cast_everyone(const Request& request);

// One period of ranks, in a world that a rotation by that period (or an exclusive or) maps onto itself: everything
// happens to every period at the same time, so one is enough and the result is exact. The period follows from the
// model: 1 where all links are equal, else a host's or a site's ranks. That schedules are alike is checked on a sample
// of the ranks, the property being one of a maker's formula. False when they are not, or when there is jitter.
bool cast_period(const Request& request, const LinkModel& model, Cast& cast);

// What tells hosts apart, and the messages by which they were told apart.
struct Kinds {
  std::vector<std::uint64_t> of_host;  // a number that only equal kinds share
  std::vector<std::int32_t> peers;     // of every rank's sends and receives, in order; a send's has its bits inverted
  std::vector<std::uint64_t> first;    // in `peers`, by rank, and one more
};

// Hosts are of one kind when their ranks run the same
// steps, of sizes within 5 %, over links of the same levels, and when the same holds for those they talk to, for those
// these talk to, and so on: as far as tells more hosts apart, or until there would be more than `most_players` ranks of
// different kinds. A world with less symmetry than that is approximated. Reads every rank's schedule once.
Kinds kinds_of(const Request& request, const LinkModel& model, std::uint64_t most_players);

// One host for each kind. Ranks of one kind may still differ in their turn at a shared peer, so which host stands for
// its kind can matter: the first (`last` false) or the last. `kinds` must outlive the cast.
Cast cast_kinds(const Request& request, const LinkModel& model, const Kinds& kinds, bool last);

}  // namespace torch_iroh::collective
