// Which values a sparse codec keeps: those of the largest magnitude, exactly so many, the same on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace torch_iroh::codec {

// The positions, in order, of the `kept` (at least 1) values of largest magnitude. Any NaN is larger than infinity; of
// equal ones the first are kept. values.size() is below 2^32.
std::vector<std::uint32_t> select_largest(std::span<const float> values, std::size_t kept);

}  // namespace torch_iroh::codec
