// Which backend serves the ranks of one host, agreed by all ranks of the group, and how it is made. Python makes it, so
// nothing here links against NCCL or gloo.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/time.hpp"
#include "collective/hosts.hpp"
#include "transport/membership.hpp"

namespace torch_iroh::c10d_backend {

using collective::Hosts;

struct InnerFacts {  // about this process
  bool has_nccl = false;
  std::string device;  // the accelerator that it works on; empty: it has chosen none
};

struct InnerMaker {
  std::function<InnerFacts()> facts;
  // A backend named `name` for `size` ranks of a host, which meet in `store` under `prefix`.
  std::function<c10::intrusive_ptr<::c10d::Backend>(
      const std::string& name, const c10::intrusive_ptr<::c10d::Store>& store, const std::string& prefix, int rank,
      int size, std::chrono::milliseconds timeout)>
      make;
};

// Before the first group is made.
void set_inner_maker(InnerMaker maker);

struct InnerRequest {
  std::string asked;  // "auto", "none", "gloo", "nccl"
  int rank = 0;
  int world = 1;
  std::chrono::milliseconds timeout{};
  std::string prefix{};  // of the group's keys in the store
};

struct InnerBackend {
  std::string name;
  c10::intrusive_ptr<::c10d::Backend> backend;  // null: this rank is alone on its host
};

// What the group's hosts use inside, alike on all ranks; none: iroh. Every rank of the group must call it. Throws Error
// when ranks ask for different backends, or for one that cannot be had.
std::optional<InnerBackend> make_inner(const c10::intrusive_ptr<::c10d::Store>& store, transport::KeyValueStore& keys,
                                       const Hosts& hosts, const InnerRequest& request);

}  // namespace torch_iroh::c10d_backend
