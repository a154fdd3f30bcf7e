// From a torch store and the options to the group of the core, and where its ranks are.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "c10d/options.hpp"
#include "collective/group.hpp"
#include "collective/hosts.hpp"
#include "transport/membership.hpp"

namespace torch_iroh::c10d_backend {

// c10d's store behind the few functions that the core knows. Any Store has these.
class StoreAdapter final : public transport::KeyValueStore {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<::c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::vector<std::uint8_t>& value) override { store_->set(key, value); }
  std::vector<std::uint8_t> get(const std::string& key) override { return store_->get(key); }
  bool has(const std::string& key) override { return store_->check({key}); }
  std::int64_t add_one(const std::string& key) override { return store_->add(key, 1); }

  bool wait(const std::vector<std::string>& keys, Duration timeout) override {
    const auto budget = std::chrono::duration_cast<std::chrono::milliseconds>(timeout);
    try {
      store_->wait(keys, std::max(budget, std::chrono::milliseconds(1)));
      return true;
    } catch (const std::exception&) {
      // A time-out, or a broken store: asking once more tells which, because a broken one throws again.
      return store_->check(keys);
    }
  }

 private:
  const c10::intrusive_ptr<::c10d::Store> store_;
};

// Runs before the first group is made, `network`: of more than one rank: opens the iroh library.
void set_group_preparer(std::function<void(bool network)> preparer);

struct MadeGroup {
  std::shared_ptr<collective::Group> group;
  std::vector<collective::Hosts::Ranks> hosts;  // none: a group of one rank
  std::vector<collective::Hosts::Ranks> sites;  // with cheap bytes between their ranks
  std::string prefix;                           // of the group's keys in the store
};

// Blocks until all ranks have met in `store`. Throws Error.
MadeGroup make_group(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size, const IrohOptions& options);

}  // namespace torch_iroh::c10d_backend
