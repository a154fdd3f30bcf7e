// Which algorithm runs a collective, and what the collective is called in announcements and errors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "collective/call.hpp"
#include "collective/schedule.hpp"

namespace torch_iroh::collective {

// Above this many ranks, one step of small messages costs its ranks more than the hops of log2 N rounds: each has a
// connection to each other one.
inline constexpr std::int32_t kDirectWorld = 8;

// What runs `request`, whose own `algorithm` does not matter. `pinned`, or where it does not cover the operation, its
// nearest kin (see `nearest`). Else:
//   barrier; up to 2 ranks                         direct
//   more than 64 KiB                               hierarchical, where there are levels; else ring (gather, scatter,
//                                                  all_to_all: direct)
//   up to 8 ranks                                  direct: one hop; needs every pair of ranks
//   all_gather, all_to_all that is known as even   bruck
//   all_reduce, reduce, broadcast                  tree
//   reduce_scatter                                 butterfly
//   gather, scatter                                direct
// Depends only on what all ranks know alike.
Algorithm choose_algorithm(const Request& request, std::size_t element_bytes, std::optional<Algorithm> pinned);

// "all_reduce(sum, float32[3, 4], ring)". Equal on all ranks exactly when they mean the same operation.
std::string describe(const CollectiveCall& call);
std::string describe(const CollectiveCall& call, std::string_view how);  // `how` in place of the algorithm's name

// Nothing to move on any rank, as every rank knows. Such a call still waits for all: else a rank that meant another
// call would be left alone with it. It runs as a barrier.
bool moves_nothing(const Request& request);
Request barrier_for(const Request& request);

}  // namespace torch_iroh::collective
