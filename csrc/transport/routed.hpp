// Each rank by its best road: those of this host through shared memory, all others over iroh.
#pragma once

#include <memory>

#include "transport/host_road.hpp"
#include "transport/transport.hpp"

namespace torch_iroh::transport {

// `host`: knows some ranks of the group. `network`: knows all.
std::shared_ptr<Transport> make_routed(std::shared_ptr<Transport> network, std::shared_ptr<HostTeam> team,
                                       Duration peer_timeout);

}  // namespace torch_iroh::transport
