// Chooses how a group runs each collective: what its user fixed, else what the planner says.
#pragma once

#include <cstddef>

#include "collective/call.hpp"
#include "collective/pins.hpp"

namespace torch_iroh::collective {

class Chooser {
 public:
  Chooser(Pins pins, std::size_t chunk_bytes) : pins_(std::move(pins)), chunk_bytes_(chunk_bytes) {}

  // Fills in the algorithm and the chunk. Thread-safe; all ranks choose alike.
  void choose(CollectiveCall& call) const;

 private:
  const Pins pins_;
  const std::size_t chunk_bytes_;
};

}  // namespace torch_iroh::collective
