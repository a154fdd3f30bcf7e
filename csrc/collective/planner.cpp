#include "collective/planner.hpp"

#include <algorithm>
#include <numeric>

namespace torch_iroh::collective {
namespace {

// Up to this many bytes per rank pair one step of small messages beats a ring of them.
constexpr std::size_t kDirectBytes = 64 << 10;

bool only_direct(Op op) {
  return op == Op::gather || op == Op::scatter || op == Op::all_to_all || op == Op::barrier;
}
bool has_root(Op op) {
  return op == Op::reduce || op == Op::broadcast || op == Op::gather || op == Op::scatter;
}

}  // namespace

Algorithm choose_algorithm(const Request& request, std::size_t element_bytes, std::optional<Algorithm> pinned) {
  if (only_direct(request.op)) return Algorithm::direct;
  if (pinned) return *pinned;
  if (request.world <= 2) return Algorithm::direct;
  const std::uint64_t count = std::accumulate(request.blocks.begin(), request.blocks.end(), request.count);
  return count * element_bytes <= kDirectBytes ? Algorithm::direct : Algorithm::ring;
}

std::string describe(const CollectiveCall& call) {
  return describe(call, name_of(call.request.algorithm));
}

std::string describe(const CollectiveCall& call, std::string_view how) {
  const Request& request = call.request;
  std::string text(name_of(request.op));
  if (request.op == Op::barrier) return text + "()";
  text += "(";
  if (reduces(request.op)) text += std::string(name_of(call.work.reduce)) + ", ";
  text += std::string(name_of(call.work.dtype)) + call.shape;
  // Uneven blocks are part of the call, but for all_to_all, where each rank has its own.
  const auto& blocks = request.blocks;
  const bool uneven = std::adjacent_find(blocks.begin(), blocks.end(), std::not_equal_to<>()) != blocks.end();
  if (uneven && request.op != Op::all_to_all) {
    text += ", blocks";
    constexpr std::size_t kMostListed = 32;
    for (std::size_t i = 0; i < std::min(blocks.size(), kMostListed); ++i) text += " " + std::to_string(blocks[i]);
  }
  if (has_root(request.op)) text += ", root " + std::to_string(request.root);
  return text + ", " + std::string(how) + ")";
}

bool moves_nothing(const Request& request) {
  if (request.op == Op::barrier || request.op == Op::all_to_all) return false;
  const auto empty = [](std::uint64_t block) { return block == 0; };
  return request.count == 0 && std::all_of(request.blocks.begin(), request.blocks.end(), empty);
}

Request barrier_for(const Request& request) {
  Request barrier;
  barrier.rank = request.rank;
  barrier.world = request.world;
  return barrier;
}

}  // namespace torch_iroh::collective
