#include "c10d/group_maker.hpp"

#include <utility>

#include "base/rank_text.hpp"
#include "collective/hierarchy.hpp"
#include "transport/in_process.hpp"
#include "transport/probe.hpp"
#include "transport/routed.hpp"

namespace torch_iroh::c10d_backend {
namespace {

using collective::Hosts;

std::function<void(bool)>& group_preparer() {
  static std::function<void(bool)> preparer;
  return preparer;
}

// None where the world is flat (one host, or one rank on every host and no sites), unless somebody asks for levels:
// then they are those of its bounded fan-out.
std::shared_ptr<const collective::Hierarchy> hierarchy_of(
    int world, const std::vector<std::vector<std::vector<std::int32_t>>>& levels, bool asked) {
  std::vector<std::vector<std::vector<std::int32_t>>> telling;
  for (const auto& groups : levels) {
    const auto size = static_cast<int>(groups.size());
    if (size == 1 || size == world || (!telling.empty() && telling.back().size() == groups.size())) continue;
    telling.push_back(groups);
  }
  if (telling.empty() && !asked) return nullptr;
  return std::make_shared<const collective::Hierarchy>(collective::Hierarchy::of_groups(world, telling));
}

std::shared_ptr<transport::Transport> best_roads(const transport::Joined& joined, Duration peer_timeout) {
  if (!joined.team) return joined.transport;
  return transport::make_routed(joined.transport, joined.team, peer_timeout);
}

// Who asks for an algorithm or a plan means one between ranks that send to each other.
bool shares_collectives(const transport::Joined& joined, const collective::GroupOptions& options) {
  return joined.team && joined.team->is_whole() && options.pins.empty();
}

// Ranks of a host that share no memory pay for their bytes as those of different hosts do, unless a site is named.
std::vector<Hosts::Ranks> sites_of(const transport::Joined& joined, int world) {
  if (joined.hosts_share || joined.names_sites) return joined.levels.back();
  std::vector<Hosts::Ranks> alone;
  for (std::int32_t rank = 0; rank < world; ++rank) alone.push_back({rank});
  return alone;
}

}  // namespace

void set_group_preparer(std::function<void(bool network)> preparer) {
  group_preparer() = std::move(preparer);
}

MadeGroup make_group(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size, const IrohOptions& options) {
  MadeGroup made;
  collective::GroupOptions group_options;
  group_options.name = options.group_name;
  group_options.chunk_bytes = options.resolved_chunk_bytes();
  group_options.pins = options.resolved_pins();
  const bool eager = options.resolved_eager();
  const link::NodeOptions node_options = options.resolved_node_options();
  group_preparer()(size > 1);
  if (size == 1) {
    made.group = collective::Group::make(transport::make_in_process(1).front(), group_options);
    made.sites = {{0}};
    return made;
  }

  StoreAdapter adapter(store);
  transport::JoinRequest request;
  request.rank = rank;
  request.world = size;
  request.chunk_bytes = options.resolved_chunk_bytes();
  request.members = numbers_text(options.global_ranks_in_group);
  request.timeout = options.timeout;
  request.sharing = options.resolved_shared_memory();
  request.site = options.resolved_site();
  request.plan = group_options.pins.text();
  request.compression = codec::to_string(options.resolved_compression());
  request.probe = options.resolved_probe();
  const auto node = link::Node::shared(node_options);
  auto joined = transport::join_group(adapter, node, request);
  made.hosts = joined.levels.front();
  made.prefix = joined.meeting.prefix;
  group_options.chunk_bytes = joined.chunk_bytes;
  const auto network = joined.probe ? transport::probe_network(adapter, node, request, joined) : std::nullopt;
  if (network) joined.levels.back() = transport::grouped(network->site_of);
  made.sites = sites_of(joined, size);
  group_options.hierarchy =
      hierarchy_of(size, joined.levels, group_options.pins.names(collective::Algorithm::hierarchical));
  if (network) group_options.costs = std::make_shared<const collective::Costs>(*network, group_options.hierarchy);
  group_options.peer_timeout = node_options.link.peer_timeout;
  made.group = collective::Group::make(best_roads(joined, group_options.peer_timeout), group_options,
                                       shares_collectives(joined, group_options) ? joined.team : nullptr);
  if (eager) made.group->connect_all();
  return made;
}

}  // namespace torch_iroh::c10d_backend
