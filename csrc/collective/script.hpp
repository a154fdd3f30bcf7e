// What the players of a cast do, before any time passes: their steps in chunks, what each waits for, and which receives
// each message reaches. The virtual clock that runs it is simulator.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "collective/cast.hpp"
#include "collective/link_model.hpp"

namespace torch_iroh::collective {

inline constexpr std::uint32_t kByChunk = 1U << 31;

struct StepState {
  std::uint64_t count = 0;  // elements
  std::uint32_t player = 0;
  std::uint32_t first_chunk = 0;
  std::uint32_t first_dependent = 0;
  std::uint32_t waits = 0;  // whole steps
  std::uint32_t chunks_left = 0;
  std::uint32_t depth = 0;
  StepKind kind = StepKind::copy;
  Level level = Level::host;
};

struct ChunkState {
  std::uint32_t waits : 30 = 0;  // by chunk
  std::uint32_t arrived : 1 = 0;
  std::uint32_t begun : 1 = 0;
};

struct Script {
  std::uint64_t chunk_elements = 1;
  std::vector<StepState> steps;
  std::vector<ChunkState> chunks;
  std::vector<std::uint32_t> dependents;  // by step: steps, with kByChunk
  std::vector<std::uint32_t> first_fed;   // by step, and one more
  std::vector<std::uint32_t> fed;         // the receives that a send's message reaches
  // Most of any player; of what it sends:
  std::uint64_t messages = 0;
  std::uint64_t elements = 0;
  std::uint64_t fan_out = 0;  // peers

  std::uint64_t chunks_of(const StepState& step) const { return (step.count + chunk_elements - 1) / chunk_elements; }
};

// Throws TooLarge above kMost.
Script script_of(const Cast& cast, std::uint64_t chunk_elements, const LinkModel& model);

}  // namespace torch_iroh::collective
