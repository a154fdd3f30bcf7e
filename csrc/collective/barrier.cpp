// Barrier by dissemination: nobody leaves before everyone has come, in ceil(log2 N) rounds.
//
// Source: D. Hensgen, R. Finkel and U. Manber, "Two algorithms for barrier synchronization", IJPP 17(1), 1988.
#include "collective/builder.hpp"

namespace torch_iroh::collective {

// 4 ranks, round k: r sends a token to r+2^k, waits for one from r-2^k (mod 4).
//       round 0   0->1 1->2 2->3 3->0        round 1   0->2 1->3 2->0 3->1
// ceil(log2 N) messages of one element, whose value means nothing: what a token says is that it came.
//
// Order comes from the tokens' places alone. Every token lands in scratch[0] and is copied from there to scratch[k+2],
// from which round k+1 sends: so that send follows the receives of rounds 0..k. A receive waits for the copy of the
// round before, never for this rank's own send: a round costs half a round trip even where a send completes only when
// it is acknowledged, and cannot deadlock even where it completes only when the peer receives.
// scratch[1] is sent as it is lent.
Schedule dissemination_barrier(const Request& request) {
  const std::int64_t world = request.world;
  const auto token = [](std::uint64_t place) { return Slice{Buffer::scratch, place, 1}; };
  ScheduleBuilder builder;
  std::uint64_t place = 1;
  for (std::int64_t distance = 1; distance < world; distance *= 2, ++place) {
    if (place > 1) builder.copy(token(0), token(place));
    builder.send(wrap(request.rank + distance, request.world), token(place));
    builder.recv(wrap(request.rank - distance, request.world), token(0));
  }
  if (world > 1) builder.lend_scratch(place);
  return builder.take();
}

}  // namespace torch_iroh::collective
