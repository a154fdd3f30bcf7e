// What one rank does in a collective among ranks that share memory, as data: nobody sends, each rank shows its bytes
// and takes what it needs from the others. Pure: no pointer, no clock, no memory of anyone.
//
// Words: a *window* is the piece of shared memory into which a rank copies what it shows; *direct* means that the
// others read its buffers where they are. What does not fit into a window goes in *rounds*, each a part of every range.
// A round has three moments: a rank has *shown* its bytes, it has *reduced* its shard, it is *done* with everybody's
// bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "collective/schedule.hpp"

namespace torch_iroh::collective {

// Bytes of another rank, found in its buffer when it shows them directly, else in its window.
struct Shown {
  std::int32_t peer = 0;  // may be this rank: its own window
  Buffer buffer = Buffer::input;
  std::uint64_t offset = 0;     // elements; of an all_to_all: within what the peer has for this rank
  std::uint64_t in_window = 0;  // elements
};

struct HostRound {
  struct Show {  // not done by a rank that shows directly
    Slice from;
    std::uint64_t in_window = 0;
  };
  struct Take {
    Shown from;
    Slice to;
  };
  struct Copy {
    Slice from;
    Slice to;
  };
  std::vector<Show> shows;
  std::vector<Copy> copies;  // of this rank's own, before anything that is taken
  std::vector<Take> takes;   // as soon as the peer has shown
  std::vector<Shown> terms;  // reduced into `sum` in this order; `own` stands for this rank's own term
  std::int32_t own_term =
      -1;  // index of the own term, read from `own`; -1: it is read from the window, like the others
  Slice own;
  Slice sum;
  bool shows_sum = false;  // others take it: after `reduced`
  std::uint64_t sum_in_window = 0;
  std::vector<Take> takes_of_sums;
  std::uint64_t scratch_count = 0;
  bool waits_for_all = false;  // also for ranks that it takes nothing from
  bool is_taken_from = false;  // its buffers must stay until everybody is done
};

// How a call is cut. A reader finds a peer's bytes in its window whether or not it shows its own directly: the places
// in a window depend on the call alone.
struct HostCut {
  std::uint64_t step = 0;  // elements of every range that a window holds
  std::uint64_t rounds = 1;
  bool whole = false;  // one round of whole ranges, whatever a window holds: where ranks may show directly
  // Every rank reduces the whole by itself: one moment to wait for instead of two. all_reduce only.
  bool redundant = false;
};

// `window_elements`: what fits into a window. An all_to_all has the rounds of the rank that needs most; this is the
// number that `request.rank` needs.
HostCut cut_for_windows(const Request& request, std::uint64_t window_elements, std::uint64_t most_redundant_elements);
// What one rank shows at most.
std::uint64_t most_shown_elements(const Request& request);
// A rank whose own bytes fit into its window may take more than that from one that shows directly.
HostCut cut_for_direct(const HostCut& for_windows);

// Round `round` of this rank. Throws std::invalid_argument as make_schedule does.
HostRound plan_round(const Request& request, const HostCut& cut, std::uint64_t round);

}  // namespace torch_iroh::collective
