// Which way of simulating answers a question soon enough, and the answer.
#include <algorithm>
#include <string>

#include "collective/simulator.hpp"

namespace torch_iroh::collective {
namespace {

// Up to here everyone is simulated without looking for a cheaper way: under a second.
constexpr Size kFew{400'000, 400'000};

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
  const auto everyone_within = [&](const Size& most) {
    return size_of(request, all.players, chunk_elements, most).within(most);
  };
  const auto everyone = [&] {
    return prediction_of(simulate(all, element_bytes, model), Method::everyone, all.players.size());
  };
  Request whole = request;
  const auto world = static_cast<std::uint64_t>(request.world);
  whole.count = (request.count + world - 1) / world * world;
  if (everyone_within(kFew)) return everyone();
  Cast cast;
  if (cast_period(whole, model, cast)) {
    return prediction_of(simulate(cast, element_bytes, model), Method::period, cast.players.size());
  }
  if (everyone_within(kMost)) return everyone();
  Prediction worst;
  for (const bool last : {false, true}) {
    const Cast kinds = cast_kinds(whole, model, last);
    const Prediction one = prediction_of(simulate(kinds, element_bytes, model), Method::kinds, kinds.players.size());
    if (one.seconds >= worst.seconds) worst = one;
  }
  return worst;
}

}  // namespace torch_iroh::collective
