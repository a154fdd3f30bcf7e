// Many ranks in one process, with real data and no network: for tests, and for programs that run ranks as threads. A
// chunk is handed over by reference; the sender's memory is lent until the receiver has let go of it.
#pragma once

#include <memory>
#include <vector>

#include "transport/transport.hpp"

namespace torch_iroh::transport {

// The ends of one group of `world` ranks; index = rank.
std::vector<std::shared_ptr<Transport>> make_in_process(int world);

// Ends a rank as a killed process would: the others hear that it is gone, and nothing of it is delivered any more.
void sever(Transport& in_process, const std::string& why);

}  // namespace torch_iroh::transport
