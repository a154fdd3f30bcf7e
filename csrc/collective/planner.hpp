// Which algorithm runs a collective, and what the collective is called in announcements and errors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "collective/group.hpp"
#include "collective/schedule.hpp"

namespace torch_iroh::collective {

// Direct needs one step and every pair of ranks; ring moves the least bytes per link and needs two neighbours. Depends
// only on what all ranks know alike.
Algorithm choose_algorithm(const Request& request, std::size_t element_bytes, std::optional<Algorithm> pinned);

// "all_reduce(sum, float32[3, 4], ring)". Equal on all ranks exactly when they mean the same operation.
std::string describe(const CollectiveCall& call);

}  // namespace torch_iroh::collective
