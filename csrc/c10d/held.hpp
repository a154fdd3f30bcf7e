// Operations of a group whose memory is still on its way from a device.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "c10d/staging.hpp"
#include "collective/group.hpp"

namespace torch_iroh::c10d_backend {

// Lets the operations of these numbers begin when everything that was loaded has arrived. Returns at once.
void release_when_loaded(const std::shared_ptr<collective::Group>& group, const std::shared_ptr<Staging>& staging,
                         std::vector<std::uint64_t> sequences);

}  // namespace torch_iroh::c10d_backend
