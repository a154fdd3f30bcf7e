// Collectives in parts: a backend of torch (NCCL, gloo) among the ranks of one host, the group itself between hosts.
// What the parts of each operation are is in inner_collectives.cpp; this runs them, one operation after the other, on a
// thread of its own, and never blocks in the inner backend: it waits for the group's failure as well.
//
// One operation takes two numbers of the group: an agreement among the ranks of the host, so that no rank enters the
// inner backend with another operation than its neighbours, and the part between hosts, which is held until the part
// inside is done. So deadlines, first causes and names of ranks are the group's.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/inner_choice.hpp"
#include "c10d/operation.hpp"
#include "collective/group.hpp"
#include "collective/hosts.hpp"

namespace torch_iroh::c10d_backend {

using collective::Hosts;

class Inner;

// What is asked for, as all ranks know it alike. `outputs` and `inputs` may be one tensor for all ranks' blocks.
struct Asked {
  collective::Op kind = collective::Op::all_reduce;
  Tensors outputs;
  Tensors inputs;
  ::c10d::ReduceOp reduce{};
  int root = 0;
};

// One operation in parts. `before` and `afterwards` run on the conductor, below autograd, on the operation's stream.
struct Parts {
  std::string title;                       // "all_reduce(sum, float32[7]": compared, and in error texts
  collective::CollectiveCall between;      // among hosts
  std::function<void(Inner&)> before;      // inside the host, until the memory of `between` is filled
  std::function<void(Inner&)> afterwards;  // inside the host, from the memory of `between` to the tensors
};

class Inner : public std::enable_shared_from_this<Inner> {
 public:
  // `patience`: how long the group may take to find out who died.
  static std::shared_ptr<Inner> make(InnerBackend inner, Hosts hosts, const std::shared_ptr<collective::Group>& group,
                                     Duration patience);
  ~Inner();

  // Depends only on what all ranks know alike.
  bool covers(const Asked& asked) const;
  // `operation.description` is complete. Returns at once.
  WorkPtr submit(Operation operation, const Asked& asked);

  // For operations of the group alone, which must not begin before what runs in parts has ended: `then` runs on the
  // conductor after all that was submitted, or here and now when there is nothing.
  bool busy() const;
  void after_what_runs(std::function<void()> then);

  std::uint64_t agreements() const;  // how many numbers of the group were agreements
  void finish_for(Duration grace);   // returns early when nothing is in flight
  void close(bool orderly);          // after the group has ended; joins the conductor

  // For the parts, on the conductor:
  const Hosts& hosts() const { return hosts_; }
  const std::string& name() const { return inner_.name; }
  ::c10d::Backend& backend() const { return *inner_.backend; }
  // For a call of the inner backend: more than the operation has, so that the operation's deadline comes first.
  std::chrono::milliseconds time_to_give() const;
  // Until it is done, or, on a device, until the current stream will see it done. Throws when it fails, when the group
  // does, or at the operation's deadline.
  void await(const WorkPtr& work);

 private:
  struct Pulse;   // what the group's strand and the inner backend's threads tell the conductor
  struct Signal;  // the end of one operation of the group
  struct Job;

  Inner(InnerBackend inner, Hosts hosts, const std::shared_ptr<collective::Group>& group, Duration patience);
  std::int64_t world() const;
  void conduct();
  std::optional<Error> run(Job& job);
  std::optional<Error> wait_for(const Signal& signal);
  Error broken(const std::string& why);  // breaks the group, unless it breaks by itself and knows better
  Parts parts_of(const Operation& operation, const Asked& given) const;
  void abort_backend();

  InnerBackend inner_;
  const Hosts hosts_;
  const std::weak_ptr<collective::Group> group_;
  const int rank_;
  const Duration patience_;
  const std::shared_ptr<Pulse> pulse_;
  const Hosts::Members neighbours_;  // the ranks of this host

  std::mutex submit_mutex_;           // numbers and queues in one step
  Job* running_ = nullptr;            // the conductor's own
  std::atomic<bool> aborted_{false};  // likewise
  std::thread conductor_;
};

}  // namespace torch_iroh::c10d_backend
