// Which collectives of a process group are compressed, and by what: the group's option, or what the calling thread asks
// for just now. Their parts are those of collective/compressed.hpp.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "c10d/operation.hpp"
#include "codec/codec.hpp"
#include "collective/hosts.hpp"

namespace torch_iroh::c10d_backend {

// The calling thread's choice for the operations that it issues from here on; nullopt: each group's own. Returns what
// it was. Throws Error(invalid).
std::optional<std::string> set_thread_compression(const std::optional<std::string>& text);

class Compressor {
 public:
  // `sites`: ranks with cheap bytes between them.
  Compressor(codec::Codec chosen, collective::Hosts sites, int rank, int world);

  // Whether this thread's operation of that kind would be.
  bool covers(collective::Op op, const at::Tensor& like, const ::c10d::ReduceOp& reduce);
  // Whether one all_reduce by `codec` would be, or is exact.
  bool would(const codec::Codec& codec, const at::Tensor& like) const;
  // Puts the parts of a compressed operation in the place of each part that can be one.
  void apply(Operation& operation);
  // For one all_reduce: by `codec`, with error feedback in `residual` (float32, on the CPU, contiguous) if it is
  // defined.
  void apply(Operation& operation, const codec::Codec& codec, const at::Tensor& residual);

 private:
  codec::Codec current() const;
  bool expand(const codec::Codec& codec, float* residual, Operation::Part& part, std::vector<Operation::Part>& parts);

  const codec::Codec chosen_;
  const collective::Hosts sites_;
  const int rank_;
  const int world_;
  std::atomic<std::uint64_t> calls_{0};
};

}  // namespace torch_iroh::c10d_backend
