#include "c10d/compression.hpp"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

#include "base/log.hpp"
#include "c10d/tensors.hpp"
#include "collective/compressed.hpp"
#include "collective/planner.hpp"

namespace torch_iroh::c10d_backend {
namespace {

using collective::Op;

struct ThreadChoice {
  std::string text;
  codec::Codec codec;
};

std::optional<ThreadChoice>& thread_choice() {
  thread_local std::optional<ThreadChoice> choice;
  return choice;
}

// "all_reduce(sum, float32[7], int8": what ranks compare.
std::string title_for(const collective::CollectiveCall& call, const codec::Codec& codec) {
  std::string text = collective::describe(call, codec::to_string(codec));
  text.pop_back();
  return text;
}

}  // namespace

std::optional<std::string> set_thread_compression(const std::optional<std::string>& text) {
  std::optional<std::string> before;
  if (thread_choice()) before = thread_choice()->text;
  thread_choice() = text ? std::optional(ThreadChoice{*text, codec::parse(*text)}) : std::nullopt;
  return before;
}

Compressor::Compressor(codec::Codec chosen, collective::Hosts sites, int rank, int world)
    : chosen_(chosen), sites_(std::move(sites)), rank_(rank), world_(world) {
  if (chosen.kind == codec::Kind::none || sites_.all().size() > 1) return;
  log_once(LogLevel::info, "compression " + codec::to_string(chosen),
           "compression " + codec::to_string(chosen) + ": all ranks are of one site, so nothing is compressed");
}

codec::Codec Compressor::current() const {
  return thread_choice() ? thread_choice()->codec : chosen_;
}

bool Compressor::covers(Op op, const at::Tensor& like, const ::c10d::ReduceOp& reduce) {
  if (current().kind == codec::Kind::none || sites_.all().size() < 2) return false;
  if (like.scalar_type() != at::kFloat && like.scalar_type() != at::kDouble && like.scalar_type() != at::kHalf &&
      like.scalar_type() != at::kBFloat16) {
    return false;
  }
  const DType dtype = dtype_of(like, "compression");
  return collective::is_compressible(
      op, dtype, collective::reduces(op) ? reduce_op_of(reduce, dtype, "compression") : ReduceOp::sum);
}

bool Compressor::would(const codec::Codec& codec, const at::Tensor& like) const {
  const DType dtype = dtype_of(like, "compression");
  return collective::is_compressible(Op::all_reduce, dtype, ReduceOp::avg) &&
         collective::is_worth_it(codec, sites_, Op::all_reduce, static_cast<std::uint64_t>(like.numel()), dtype);
}

bool Compressor::expand(const codec::Codec& codec, float* residual, Operation::Part& part,
                        std::vector<Operation::Part>& parts) {
  const collective::CollectiveCall& call = part.call;
  const collective::Request& request = call.request;
  const auto& blocks = request.blocks;
  // Who has a part yet to prepare does not know its size.
  if (call.prepare || !collective::is_compressible(request.op, call.work.dtype, call.work.reduce)) return false;
  if (std::adjacent_find(blocks.begin(), blocks.end(), std::not_equal_to<>()) != blocks.end()) return false;
  const std::uint64_t count = request.op == Op::all_reduce ? request.count : blocks.front();
  if (!collective::is_worth_it(codec, sites_, request.op, count, call.work.dtype)) return false;

  collective::Compression how{codec, sites_, title_for(call, codec), 0, residual};
  how.seed = calls_.fetch_add(1) * static_cast<std::uint64_t>(world_) + static_cast<std::uint64_t>(rank_);
  auto made = request.op == Op::all_reduce   ? collective::compressed_all_reduce(how, call.work, count, world_)
              : request.op == Op::all_gather ? collective::compressed_all_gather(how, call.work, count, world_)
                                             : collective::compressed_reduce_scatter(how, call.work, count, world_);
  for (collective::CollectiveCall& one : made) parts.emplace_back().call = std::move(one);
  parts.back().after = std::move(part.after);
  return true;
}

void Compressor::apply(Operation& operation) {
  const codec::Codec codec = current();
  if (codec.kind == codec::Kind::none || sites_.all().size() < 2) return;
  std::vector<Operation::Part> parts;
  for (Operation::Part& part : operation.parts) {
    if (!expand(codec, nullptr, part, parts)) parts.push_back(std::move(part));
  }
  operation.parts = std::move(parts);
}

void Compressor::apply(Operation& operation, const codec::Codec& codec, const at::Tensor& residual) {
  float* const left_out = residual.defined() ? residual.mutable_data_ptr<float>() : nullptr;
  std::vector<Operation::Part> parts;
  if (!expand(codec, left_out, operation.parts.front(), parts)) return;
  operation.parts = std::move(parts);
  std::function<void()>& last = operation.parts.back().after;
  last = [residual, then = std::move(last)] {  // holds it until the end
    if (then) then();
  };
}

}  // namespace torch_iroh::c10d_backend
