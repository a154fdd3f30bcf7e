// The handle that torch gives to whoever issued an operation. Finished by the core on a worker thread; futures and
// callbacks (which may need the GIL) run on one thread of their own.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/error.hpp"
#include "base/time.hpp"
#include "base/workers.hpp"
#include "c10d/staging.hpp"

namespace torch_iroh::c10d_backend {

using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

// Keeps `kept` alive, and lets go of it on the thread for futures: freeing a tensor may wait for the GIL, which the
// threads that move data and heartbeats must never do.
std::shared_ptr<void> released_with_futures(std::shared_ptr<void> kept);

// Waits until no future is being completed and no callback runs. False: some still do after `limit`.
bool finish_callbacks(std::chrono::milliseconds limit);

// The exception torch users expect for a failure of the core.
std::exception_ptr to_torch(const Error& error);

class IrohWork final : public ::c10d::Work {
 public:
  struct Description {
    ::c10d::OpType type = ::c10d::OpType::UNKNOWN;
    const char* title = nullptr;      // "iroh:all_reduce"
    std::vector<at::Tensor> inputs;   // for the profiler
    std::vector<at::Tensor> outputs;  // result()
    c10::IValue value;                // of the future; default: the outputs
    c10::TypePtr value_type;          // default: list of tensors
    std::uint64_t sequence = 0;
    std::chrono::milliseconds timeout{};
    std::shared_ptr<Staging> staging;                 // device tensors: their road to host memory and back
    std::function<void()> after;                      // copies flat memory back before anyone sees the result
    std::function<void(const std::string&)> give_up;  // breaks the group
    std::function<void()> on_wait;                    // the caller is about to block for it
    bool waited_for = false;                          // by its caller, before anything else is done with it
  };

  IrohWork(int rank, Description description);

  void set_sequence(std::uint64_t sequence) { description_.sequence = sequence; }
  // Once, from a worker thread, which gives up its reference.
  static void finish(c10::intrusive_ptr<IrohWork> work, const Error* error, int source = -1);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  void blockCurrentStream() override { wait(); }
  void abort() override;
  std::vector<at::Tensor> result() override;
  int sourceRank() const override;
  std::uint64_t getSequencenumber() const override { return description_.sequence; }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14  // 2.13 does not ask
  std::chrono::milliseconds getTimeout() const override { return description_.timeout; }
#endif
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;

 private:
  std::exception_ptr copy_back();
  void complete_futures(const std::exception_ptr& failed);
  void want_futures();

  Description description_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::intrusive_ptr<c10::ivalue::Future> result_;  // a WorkResult; never an error
  ::c10d::WorkResult outcome_ = ::c10d::WorkResult::SUCCESS;
  int source_ = -1;
  const std::thread::id caller_ = std::this_thread::get_id();
  // Most callers that wait never ask for a future, and completing one costs them another thread's turn.
  std::mutex futures_mutex_;
  bool futures_wanted_ = false;
  std::optional<std::exception_ptr> unasked_;  // the outcome, when it came before anyone asked
};

}  // namespace torch_iroh::c10d_backend
