// Where the kept values of a sparse frame are: strictly increasing positions as gaps in a Rice code, whose length is
// bounded by how many there are among how many, and is always filled up to that bound.
//
// A gap g (values left out since the last kept one) is g >> b zero bits, a one, and the b low bits of g, from the least
// significant bit of each byte on. All gaps together are at most count - kept, so that
//   kept * (b + 1) + ((count - kept) >> b)
// bits always suffice; b is what makes this least. At a density of 1 % that is 8.55 bits a position; the entropy
// is 8.08.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace torch_iroh::codec {

unsigned rice_parameter(std::uint64_t kept, std::uint64_t count);
std::uint64_t position_bits(std::uint64_t kept, std::uint64_t count);
std::size_t position_bytes(std::uint64_t kept, std::uint64_t count);

// `out` has position_bytes().
void write_positions(std::span<const std::uint32_t> positions, std::uint64_t count, std::span<std::byte> out);

// Throws Error(protocol) unless these are positions.size() increasing positions below `count`.
void read_positions(std::span<const std::byte> in, std::uint64_t count, std::span<std::uint32_t> positions);

}  // namespace torch_iroh::codec
