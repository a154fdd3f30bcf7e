#include "iroh/future.hpp"

#include <algorithm>
#include <cstdlib>

#include "base/fork.hpp"
#include "iroh/call.hpp"

namespace torch_iroh::iroh {

Workers& pollers() {
  static PerProcess<Workers> shared([] {
    const char* text = std::getenv("TORCH_IROH_POLL_THREADS");
    return std::make_unique<Workers>(std::clamp(text == nullptr ? 2 : std::atoi(text), 1, 64));
  });
  return shared.get();
}

void PollLoop::run() {
  for (;;) {
    state_.store(State::polling, std::memory_order_relaxed);
    poll(&PollLoop::on_poll, reinterpret_cast<std::uint64_t>(this));
    State seen = State::polling;
    // Once parked, the callback may finish and destroy this at any moment.
    if (state_.compare_exchange_strong(seen, State::parked, std::memory_order_acq_rel)) return;
    if (seen == State::ready) {
      finish();
      return;
    }
  }
}

void PollLoop::on_poll(std::uint64_t data, std::int8_t code) {
  // iroh holds a lock while it calls this, so nothing of iroh may be called from here.
  auto* loop = reinterpret_cast<PollLoop*>(data);
  const State next = code == abi::kPollReady ? State::ready : State::again;
  if (loop->state_.exchange(next, std::memory_order_acq_rel) != State::parked) return;
  if (next == State::ready) {
    pollers().post([loop] { loop->finish(); });
  } else {
    pollers().post([loop] { loop->run(); });
  }
}

}  // namespace torch_iroh::iroh
