#include "c10d/held.hpp"

#include <optional>
#include <string>
#include <utility>

#include "base/fork.hpp"

namespace torch_iroh::c10d_backend {
namespace {

// Threads that wait for devices, one operation each: those that move bytes must never do that.
Workers& device_waiters() {
  static PerProcess<Workers> shared([] { return std::make_unique<Workers>(4); });
  return shared.get();
}

}  // namespace

void release_when_loaded(const std::shared_ptr<collective::Group>& group, const std::shared_ptr<Staging>& staging,
                         std::vector<std::uint64_t> sequences) {
  device_waiters().post([staging, sequences = std::move(sequences), weak = std::weak_ptr(group)] {
    std::optional<Error> failed;
    try {
      staging->wait_until_loaded();
    } catch (const std::exception& error) {
      failed.emplace(ErrorKind::aborted,
                     "the device failed before an operation could begin: " + std::string(error.what()));
    }
    const auto alive = weak.lock();
    if (!alive) return;
    if (failed) return alive->abort(*failed);
    for (const std::uint64_t sequence : sequences) alive->release(sequence);
  });
}

}  // namespace torch_iroh::c10d_backend
