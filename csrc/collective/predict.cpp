// Which way of simulating answers a question soon enough, and the answer.
#include <algorithm>
#include <string>

#include "collective/simulator.hpp"

namespace torch_iroh::collective {
namespace {

// Up to here everyone is simulated without looking for a cheaper way: under a second.
constexpr Size kFew{400'000, 400'000};
// A sample is at most this part of what could be simulated: reading the world's schedules takes time too.
constexpr double kSampled = 0.35;
constexpr std::size_t kCoarsest = 64;  // times the chunk that was asked for

Prediction prediction_of(const Simulation& simulation, Method method, std::size_t players) {
  Prediction prediction;
  prediction.seconds = simulation.seconds;
  prediction.median_seconds = simulation.median_seconds;
  prediction.messages = simulation.messages;
  prediction.bytes = simulation.bytes;
  prediction.fan_out = simulation.fan_out;
  prediction.depth = simulation.depth;
  prediction.method = method;
  prediction.simulated_ranks = players;
  return prediction;
}

}  // namespace

std::string_view name_of(Method method) {
  switch (method) {
    case Method::everyone: return "everyone";
    case Method::period: return "period";
    case Method::kinds: return "kinds";
  }
  return "?";
}

Prediction predict(const Request& request, std::size_t element_bytes, const LinkModel& model) {
  const std::uint64_t chunk_elements = std::max<std::uint64_t>(1, model.chunk_bytes / element_bytes);
  const Cast all = cast_everyone(request);
  const Size rough = rough_size_of(request, chunk_elements);
  const auto everyone_within = [&](const Size& most) {
    if (!rough.within({2 * most.steps, 2 * most.pieces})) return false;
    return size_of(request, all.players, chunk_elements, most).within(most);
  };
  const auto everyone = [&] {
    return prediction_of(simulate(all, element_bytes, model), Method::everyone, all.players.size());
  };
  Request whole = request;
  const auto world = static_cast<std::uint64_t>(request.world);
  whole.count = (request.count + world - 1) / world * world;
  if (everyone_within(kFew)) return everyone();
  Cast period;
  if (cast_period(whole, model, period)) {
    return prediction_of(simulate(period, element_bytes, model), Method::period, period.players.size());
  }
  if (everyone_within(kMost)) return everyone();
  // Chunks in a sample may be larger than asked for: they pipeline less, and there are fewer.
  LinkModel coarse = model;
  const auto players_within = [&](std::size_t chunk_bytes) {
    const Size size = rough_size_of(whole, std::max<std::uint64_t>(1, chunk_bytes / element_bytes));
    const double share = std::min(static_cast<double>(kMostSteps) / static_cast<double>(size.steps + 1),
                                  static_cast<double>(kMostPieces) / static_cast<double>(size.pieces + 1));
    return static_cast<std::uint64_t>(kSampled * share * static_cast<double>(request.world));
  };
  const std::size_t coarsest = model.chunk_bytes * kCoarsest;
  const Kinds kinds = kinds_of(whole, model, players_within(coarsest));
  const Cast cast = cast_kinds(whole, model, kinds, true);
  while (coarse.chunk_bytes < coarsest && players_within(coarse.chunk_bytes) < cast.players.size()) {
    coarse.chunk_bytes *= 2;
  }
  Prediction sample = prediction_of(simulate(cast, element_bytes, coarse), Method::kinds, cast.players.size());
  sample.chunk_bytes = coarse.chunk_bytes;
  return sample;
}

}  // namespace torch_iroh::collective
