// Numbers that no other process will draw: names of groups, proofs of who owns a piece of shared memory.
#pragma once

#include <cstdint>
#include <random>

namespace torch_iroh {

inline std::uint64_t random_number() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

}  // namespace torch_iroh
