// What a group is asked to do: one collective with its memory, its deadline and whom to tell.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/error.hpp"
#include "base/time.hpp"
#include "collective/execution.hpp"
#include "collective/schedule.hpp"

namespace torch_iroh::collective {

// Runs once; nullptr = done. On a worker thread, or in the caller's own call when the caller drives. It must be short
// and must not block.
using Done = std::function<void(const Error*)>;

struct CollectiveCall {
  Request request;  // rank, world and algorithm are filled in by the group
  Work work;
  std::string shape;  // of this rank's tensor, equal on all ranks; empty where it may differ
  // "all_reduce(sum, float32[7]", of a larger operation that this is a part of: what ranks compare and errors name.
  std::string part_of{};
  Duration timeout = kNever - TimePoint{};
  Done done;
  std::size_t chunk_bytes = 0;     // filled in by the group
  std::uint64_t predicted_ns = 0;  // likewise; 0: nobody knows the links
  bool held = false;               // its memory is not ready: it begins, in its turn, after release() of its number
  // The caller waits for it anyway: where ranks share memory it does the work on its own thread, inside submit().
  bool drives = false;
  // Runs when its turn comes: fills in what only the operations before it could tell.
  std::function<void(CollectiveCall&)> prepare{};
};

}  // namespace torch_iroh::collective
