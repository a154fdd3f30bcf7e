// Chooses how a group runs each collective: what its user fixed, else what costs least on its
// links, else, where those are not known, what the planner's rules say.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "collective/call.hpp"
#include "collective/costs.hpp"
#include "collective/pins.hpp"

namespace torch_iroh::collective {

// What nobody has asked for otherwise. Where the links are known, a call may have other chunks instead.
inline constexpr std::size_t kDefaultChunkBytes = 256 << 10;

class Chooser {
 public:
  // `costs`: of this group's links; none: nothing is known of them. `chunk_bytes`: of the group; the same on all ranks.
  Chooser(Pins pins, std::shared_ptr<const Costs> costs, std::size_t chunk_bytes)
      : pins_(std::move(pins)), costs_(std::move(costs)), chunk_bytes_(chunk_bytes) {}

  // Fills in the algorithm and the chunk. Thread-safe; all ranks choose alike.
  void choose(CollectiveCall& call) const;

 private:
  struct Choice {
    Algorithm algorithm = Algorithm::direct;
    std::size_t chunk_bytes = 0;
    std::uint64_t nanoseconds = 0;
  };
  Choice cheapest(const Request& request, std::size_t element_bytes, const Pin& pin) const;

  const Pins pins_;
  const std::shared_ptr<const Costs> costs_;
  const std::size_t chunk_bytes_;
};

}  // namespace torch_iroh::collective
