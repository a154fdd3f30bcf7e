#include "collective/chooser.hpp"

#include "collective/planner.hpp"

namespace torch_iroh::collective {

void Chooser::choose(CollectiveCall& call) const {
  const std::size_t element_bytes = size_of(call.work.dtype);
  const Pin pin = pin_for(pins_, call.request, element_bytes);
  call.chunk_bytes = pin.chunk_bytes > 0 ? pin.chunk_bytes : chunk_bytes_;
  const bool priced = costs_ && !call.request.members;  // what is known is known of the whole group
  call.request.algorithm = priced && !pin.algorithm ? costs_->best(call.request, element_bytes, call.chunk_bytes)
                                                    : choose_algorithm(call.request, element_bytes, pin.algorithm);
  if (priced) call.predicted_ns = costs_->of(call.request.algorithm, call.request, element_bytes, call.chunk_bytes);
}

}  // namespace torch_iroh::collective
