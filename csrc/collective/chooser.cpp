#include "collective/chooser.hpp"

#include "collective/planner.hpp"

namespace torch_iroh::collective {

namespace {

constexpr std::size_t kOtherChunkBytes[] = {64 << 10, 1 << 20};

}  // namespace

void Chooser::choose(CollectiveCall& call) const {
  const std::size_t element_bytes = size_of(call.work.dtype);
  const Pin pin = pin_for(pins_, call.request, element_bytes);
  // What is known is known of the whole group, and for sizes that all ranks know alike.
  if (!costs_ || call.request.members) {
    call.chunk_bytes = pin.chunk_bytes > 0 ? pin.chunk_bytes : chunk_bytes_;
    call.request.algorithm = choose_algorithm(call.request, element_bytes, pin.algorithm);
    return;
  }
  const Choice choice = cheapest(call.request, element_bytes, pin);
  call.request.algorithm = choice.algorithm;
  call.chunk_bytes = choice.chunk_bytes;
  // Ranks do not know the size of an all_to_all alike, so its price is that of nothing.
  if (known_bytes(call.request, element_bytes)) call.predicted_ns = choice.nanoseconds;
}

Chooser::Choice Chooser::cheapest(const Request& request, std::size_t element_bytes, const Pin& pin) const {
  const auto with = [&](std::size_t chunk_bytes) {
    const Algorithm algorithm = pin.algorithm ? choose_algorithm(request, element_bytes, pin.algorithm)
                                              : costs_->best(request, element_bytes, chunk_bytes);
    return Choice{algorithm, chunk_bytes, costs_->of(algorithm, request, element_bytes, chunk_bytes)};
  };
  Choice choice = with(pin.chunk_bytes > 0 ? pin.chunk_bytes : chunk_bytes_);
  const bool free = pin.chunk_bytes == 0 && chunk_bytes_ == kDefaultChunkBytes;
  if (!free || !known_bytes(request, element_bytes)) return choice;
  for (const std::size_t chunk_bytes : kOtherChunkBytes) {
    const Choice other = with(chunk_bytes);
    // The formulas are not better than that.
    if (other.nanoseconds < choice.nanoseconds - choice.nanoseconds / 20) choice = other;
  }
  return choice;
}

}  // namespace torch_iroh::collective
