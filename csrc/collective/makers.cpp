// Which algorithm has a maker for which operation, and what stands in where there is none.
#include <array>
#include <initializer_list>

#include "collective/builder.hpp"
#include "collective/hierarchy.hpp"

namespace torch_iroh::collective {
namespace {

using Maker = Schedule (*)(const Request&);

// By Op: all_reduce, reduce, broadcast, all_gather, reduce_scatter, gather, scatter, all_to_all, barrier.
using Makers = std::array<Maker, 9>;

constexpr Makers kRing = {ring_all_reduce, chain_reduce, chain_broadcast, ring_all_gather, ring_reduce_scatter};
constexpr Makers kDirect = {direct_all_reduce, direct_reduce,         direct_broadcast,
                            direct_all_gather, direct_reduce_scatter, direct_gather,
                            direct_scatter,    direct_all_to_all,     dissemination_barrier};
constexpr Makers kBidirectional = {bidirectional_all_reduce, nullptr, nullptr, bidirectional_all_gather,
                                   bidirectional_reduce_scatter};
constexpr Makers kTree = {tree_all_reduce, tree_reduce, tree_broadcast, nullptr, nullptr, tree_gather, tree_scatter};
constexpr Makers kButterfly = {butterfly_all_reduce, nullptr, nullptr, butterfly_all_gather, butterfly_reduce_scatter};
constexpr Makers kBruck = {nullptr, nullptr, nullptr, bruck_all_gather, nullptr, nullptr, nullptr, bruck_all_to_all};
constexpr Makers kHierarchical = {
    hierarchical_all_reduce,     hierarchical_reduce, hierarchical_broadcast, hierarchical_all_gather,
    hierarchical_reduce_scatter, hierarchical_gather, hierarchical_scatter,   nullptr,
    hierarchical_barrier};

Maker maker_of(Algorithm algorithm, Op op) {
  const auto index = static_cast<std::size_t>(op);
  switch (algorithm) {
    case Algorithm::ring: return kRing.at(index);
    case Algorithm::direct: return kDirect.at(index);
    case Algorithm::ring_bidirectional: return kBidirectional.at(index);
    case Algorithm::tree: return kTree.at(index);
    case Algorithm::butterfly: return kButterfly.at(index);
    case Algorithm::bruck: return kBruck.at(index);
    case Algorithm::hierarchical: return kHierarchical.at(index);
  }
  return nullptr;
}

std::initializer_list<Algorithm> kin_of(Algorithm algorithm) {
  static constexpr std::initializer_list<Algorithm> kRings = {Algorithm::ring};
  static constexpr std::initializer_list<Algorithm> kLogarithmic = {Algorithm::tree, Algorithm::butterfly};
  switch (algorithm) {
    case Algorithm::ring_bidirectional: return kRings;
    case Algorithm::tree:
    case Algorithm::butterfly:
    case Algorithm::bruck: return kLogarithmic;
    default: return {};
  }
}

}  // namespace

bool supports(Algorithm algorithm, const Request& request) {
  if (maker_of(algorithm, request.op) == nullptr) return false;
  if (algorithm == Algorithm::bruck) return request.op != Op::all_to_all || request.even;
  if (algorithm == Algorithm::hierarchical) return request.hierarchy != nullptr;
  return true;
}

Algorithm nearest(Algorithm wanted, const Request& request) {
  if (supports(wanted, request)) return wanted;
  for (const Algorithm kin : kin_of(wanted))
    if (supports(kin, request)) return kin;
  return Algorithm::direct;
}

Schedule make_checked(const Request& request) {
  return maker_of(nearest(request.algorithm, request), request.op)(request);
}

}  // namespace torch_iroh::collective
