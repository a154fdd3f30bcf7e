// Requests for tests of schedules: every operation with even or uneven blocks, and their words for messages.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "collective/schedule.hpp"

namespace torch_iroh::testing {

using collective::Algorithm;
using collective::Op;
using collective::Request;
using Blocks = std::vector<std::uint64_t>;

inline const std::vector<Op> kOps = {Op::all_reduce, Op::reduce,  Op::broadcast,  Op::all_gather, Op::reduce_scatter,
                                     Op::gather,     Op::scatter, Op::all_to_all, Op::barrier};

inline bool has_root(Op op) {
  return op == Op::reduce || op == Op::broadcast || op == Op::gather || op == Op::scatter;
}
inline bool has_blocks(Op op) {
  return op == Op::all_gather || op == Op::reduce_scatter || op == Op::gather || op == Op::scatter;
}

inline Blocks even(std::int32_t world, std::uint64_t count) {
  return Blocks(static_cast<std::size_t>(world), count);
}
inline Blocks uneven(std::int32_t world, std::uint64_t count) {
  Blocks blocks;
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(world); ++i)
    blocks.push_back(i % 3 == 1 ? 0 : count * (i % 4 + 1) / 2);
  return blocks;
}

inline Request request_of(Op op, Algorithm algorithm, std::int32_t world, std::uint64_t count, std::int32_t root = 0) {
  Request request;
  request.op = op;
  request.algorithm = algorithm;
  request.world = world;
  request.root = root;
  request.count = count;
  if (has_blocks(op) || op == Op::all_to_all) request.blocks = even(world, count);
  if (op == Op::all_to_all) request.send_blocks = even(world, count), request.even = true;
  return request;
}

inline std::string text_of(const Request& request) {
  std::string text = std::string(name_of(request.op)) + " by " + std::string(name_of(request.algorithm)) + ", world " +
                     std::to_string(request.world) + ", root " + std::to_string(request.root) + ", count " +
                     std::to_string(request.count) + ", blocks";
  for (const std::uint64_t block : request.blocks) text += " " + std::to_string(block);
  return text + ": ";
}

// What one rank sends in all.
struct Sent {
  std::uint64_t messages = 0;
  std::uint64_t elements = 0;
  std::set<std::int32_t> peers;
};
inline Sent sent_by(Request request, std::int32_t rank) {
  request.rank = rank;
  Sent sent;
  for (const auto& step : collective::make_schedule(request).steps) {
    if (step.kind != collective::StepKind::send) continue;
    ++sent.messages;
    sent.elements += step.from.count;
    sent.peers.insert(step.peer);
  }
  return sent;
}

}  // namespace torch_iroh::testing
