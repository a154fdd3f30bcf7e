// Collectives whose bytes between sites are frames of a codec, as parts: exact inside a site, compressed between sites.
//
//   all_reduce, reduce_scatter   inside: reduce_scatter (all_reduce of uneven sites: reduce to a leader; reduce_scatter
//   of
//                                uneven sites: nothing). AVG divides by the world here, so that a narrow type holds it
//                                between: all_to_all of frames; the owner of a shard adds its own exact sum and what
//                                came, in float32, in a fixed order
//   all_reduce                   between: all_gather of the sums' frames; the owner keeps what the others decode
//                                inside: all_gather (uneven sites: broadcast)
//   all_gather                   all_gather of frames, which everyone decodes, the owner too
//
// So a value is quantised twice at most, and all ranks hold equal bits. Knows memory and codecs, no tensor.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "codec/codec.hpp"
#include "collective/call.hpp"
#include "collective/hosts.hpp"

namespace torch_iroh::collective {

struct Compression {
  codec::Codec codec;
  Hosts sites;             // ranks with cheap bytes between them; equal on all ranks
  std::string title;       // "all_reduce(sum, float32[7], int8": equal on all ranks
  std::uint64_t seed = 0;  // of stochastic rounding
  // all_reduce and reduce_scatter: float32, one for each value of the input. What earlier calls left out is added to
  // this rank's contribution, and what this one leaves out is there afterwards (error feedback).
  float* residual = nullptr;
};

// Whether a codec has anything to do with it: sums of floats. Equal on all ranks.
bool is_compressible(Op op, DType dtype, ReduceOp reduce);
// Whether a frame is smaller than what it stands for: the part of an all_reduce of `count` values that a rank adds up,
// or a block of `count` values. Equal on all ranks.
bool is_worth_it(const codec::Codec& codec, const Hosts& sites, Op op, std::uint64_t count, DType dtype);

// The parts, to be submitted in this order by every rank; the last one writes the result when its turn comes, so that
// what follows on the same memory finds it. `work` is that of the exact operation: all_reduce in place in
// `work.output`; `world` is what AVG divides by.
std::vector<CollectiveCall> compressed_all_reduce(const Compression& how, const Work& work, std::uint64_t count,
                                                  std::int32_t world);
// `block` elements for each rank, in rank order, in `work.input`.
std::vector<CollectiveCall> compressed_reduce_scatter(const Compression& how, const Work& work, std::uint64_t block,
                                                      std::int32_t world);
std::vector<CollectiveCall> compressed_all_gather(const Compression& how, const Work& work, std::uint64_t block,
                                                  std::int32_t world);

}  // namespace torch_iroh::collective
