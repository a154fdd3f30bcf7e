// The real schedules of many ranks on a virtual clock: how long a collective takes on links and processors that a
// LinkModel describes. Moves sizes, no data; the same call gives the same numbers on every machine.
//
// A chunk's way, each stage busy with one chunk at a time, first come first served:
//   sender's processor (message_cost + bytes x byte_cost), at most one chunk ahead of the port
//   sender's port      (bytes / bandwidth); then the send step's chunk is done
//   the link           (latency + jitter); nothing queues here
//   receiver's port    (bytes / bandwidth, from when the first byte comes: an idle port adds nothing)
//   receiver's processor, as the sender's; then, when the step's dependencies allow, what is done to the data
//   (bytes x local_byte_cost).
// Chunks and dependencies are those of execution.cpp. Not in the model: connection set-up, congestion control and loss,
// announcements, ranks that begin late, ranks of one host that share cores or memory bandwidth.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "collective/cast.hpp"
#include "collective/link_model.hpp"
#include "collective/schedule.hpp"

namespace torch_iroh::collective {

struct Simulation {
  double seconds = 0;          // when the last rank ends
  double median_seconds = 0;   // when half of the ranks have ended
  std::vector<double> finish;  // by player of the cast; cast_everyone: by rank
  // Most of any rank; of what it sends:
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;
  std::uint64_t fan_out = 0;  // peers
  std::uint32_t depth = 0;    // most messages that came one because of the other
  std::uint64_t pieces = 0;   // chunks of steps that were simulated
};

// Throws TooLarge above kMostPieces.
Simulation simulate(const Cast& cast, std::size_t element_bytes, const LinkModel& model);

enum class Method : std::uint8_t { everyone, period, kinds };
std::string_view name_of(Method method);

struct Prediction {
  double seconds = 0;
  double median_seconds = 0;
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;
  std::uint64_t fan_out = 0;
  std::uint32_t depth = 0;
  Method method = Method::everyone;
  std::uint64_t simulated_ranks = 0;
  std::size_t chunk_bytes = 0;  // by kinds: of the simulation, where it is larger than the model's; else 0
};

// By the exact ways while they are cheap, else by kinds, of each the last host. A period or kinds
// exist only where all shards are equal, so for those `request.count` is rounded up to a multiple of the world.
// Throws TooLarge when no way is within its bound.
Prediction predict(const Request& request, std::size_t element_bytes, const LinkModel& model);

}  // namespace torch_iroh::collective
