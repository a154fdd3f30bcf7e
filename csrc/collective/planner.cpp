#include "collective/planner.hpp"

#include <algorithm>
#include <numeric>

#include "collective/hierarchy.hpp"

namespace torch_iroh::collective {
namespace {

// Up to this many bytes per rank pair one step of small messages beats a ring of them.
constexpr std::size_t kDirectBytes = 64 << 10;

bool has_root(Op op) {
  return op == Op::reduce || op == Op::broadcast || op == Op::gather || op == Op::scatter;
}

}  // namespace

Algorithm choose_algorithm(const Request& request, std::size_t element_bytes, std::optional<Algorithm> pinned) {
  if (pinned) return nearest(*pinned, request);
  const std::int32_t world = participants(request);
  if (world <= 2 || request.op == Op::barrier) return Algorithm::direct;
  const std::uint64_t count = std::accumulate(request.blocks.begin(), request.blocks.end(), request.count);
  if (count * element_bytes > kDirectBytes) {
    // Between hosts each byte goes once for a host, not once for a rank.
    const bool by_levels = supports(Algorithm::hierarchical, request);
    return nearest(by_levels ? Algorithm::hierarchical : Algorithm::ring, request);
  }
  if (world <= kDirectWorld) return Algorithm::direct;
  switch (request.op) {
    case Op::all_gather:
    case Op::all_to_all: return nearest(Algorithm::bruck, request);
    case Op::reduce_scatter: return Algorithm::butterfly;
    case Op::all_reduce:
    case Op::reduce:
    case Op::broadcast: return Algorithm::tree;
    default: return Algorithm::direct;
  }
}

std::string describe(const CollectiveCall& call) {
  const Request& request = call.request;
  std::string how(name_of(request.algorithm));
  // Ranks that see other levels would run other schedules.
  if (request.algorithm == Algorithm::hierarchical && request.hierarchy) how += " " + request.hierarchy->text();
  return describe(call, how);
}

std::string describe(const CollectiveCall& call, std::string_view how) {
  const Request& request = call.request;
  if (!call.part_of.empty()) return call.part_of + ", " + std::string(how) + ")";
  std::string text(name_of(request.op));
  if (request.op == Op::barrier) {
    const bool by_levels = request.algorithm == Algorithm::hierarchical && request.hierarchy;
    return text + "(" + (by_levels ? std::string(how) : "") + ")";
  }
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
  barrier.members = request.members;
  return barrier;
}

}  // namespace torch_iroh::collective
