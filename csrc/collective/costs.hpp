// What each algorithm would take on the links of a group, by formulas in whole nanoseconds: the same on every machine,
// and soon enough to ask for each call. An estimate to choose by; the simulator is what it is checked against
// (tests/cpp/test_costs.cpp says how near).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "collective/schedule.hpp"
#include "collective/shape.hpp"
#include "transport/network.hpp"

namespace torch_iroh::collective {

class Costs {
 public:
  // `hierarchy`: of the same world; none: it is flat.
  Costs(transport::Network network, std::shared_ptr<const Hierarchy> hierarchy);

  const transport::Network& network() const { return network_; }

  // Nanoseconds until the last rank is done. `algorithm` must support `request`, whose own does not matter.
  std::uint64_t of(Algorithm algorithm, const Request& request, std::size_t element_bytes,
                   std::size_t chunk_bytes) const;

  // The one that takes least; of equals the last. barrier, and what only direct can do: direct, which above
  // kDirectWorld ranks stands for nothing else (what a connection costs is in no formula).
  Algorithm best(const Request& request, std::size_t element_bytes, std::size_t chunk_bytes) const;

 private:
  struct Stage {  // one level of the hierarchy, as its groups' members see it
    Shape shape;
    std::int32_t owners = 1;
  };

  const transport::Network network_;
  const std::shared_ptr<const Hierarchy> hierarchy_;
  const Shape shape_;
  std::vector<Stage> stages_;
};

}  // namespace torch_iroh::collective
