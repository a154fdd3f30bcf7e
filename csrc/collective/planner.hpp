// Which algorithm runs a collective, and what the collective is called in announcements and errors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "collective/call.hpp"
#include "collective/schedule.hpp"

namespace torch_iroh::collective {

// Direct needs one step and every pair of ranks; ring moves the least bytes per link and needs two neighbours. Depends
// only on what all ranks know alike.
Algorithm choose_algorithm(const Request& request, std::size_t element_bytes, std::optional<Algorithm> pinned);

// "all_reduce(sum, float32[3, 4], ring)". Equal on all ranks exactly when they mean the same operation.
std::string describe(const CollectiveCall& call);
std::string describe(const CollectiveCall& call, std::string_view how);  // `how` in place of the algorithm's name

// Nothing to move on any rank, as every rank knows. Such a call still waits for all: else a rank that meant another
// call would be left alone with it. It runs as a barrier.
bool moves_nothing(const Request& request);
Request barrier_for(const Request& request);

}  // namespace torch_iroh::collective
