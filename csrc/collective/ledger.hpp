// What a group's collectives were predicted to take and took, by operation, size and algorithm. Says it once in the
// log.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "base/time.hpp"
#include "collective/schedule.hpp"

namespace torch_iroh::collective {

// One collective as it was chosen.
struct Choice {
  Op op = Op::barrier;
  Algorithm algorithm = Algorithm::direct;
  std::uint64_t bytes = 0;         // of the whole
  std::uint64_t predicted_ns = 0;  // 0: nobody knew its links
};

struct ChoiceStats {
  Choice choice;            // `bytes`: the power of two that holds them; predicted: of the last one
  std::uint64_t count = 0;  // finished
  double mean_seconds = 0;  // on this rank, without the first, which may have had to connect; none but it: that
};

class Ledger {
 public:
  void add(const Choice& choice, Duration took);
  std::vector<ChoiceStats> all() const;

 private:
  struct Line {
    std::uint64_t count = 0;
    std::uint64_t predicted_ns = 0;
    Duration first{};
    Duration others{};
  };
  using Key = std::tuple<Op, std::uint64_t, Algorithm>;

  mutable std::mutex mutex_;
  std::map<Key, Line> lines_;  // at most one for each operation, power of two and algorithm
};

}  // namespace torch_iroh::collective
