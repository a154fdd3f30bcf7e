#include "c10d/work.hpp"

#include <c10/util/Exception.h>

#include "base/fork.hpp"
#include "base/patient_workers.hpp"

namespace torch_iroh::c10d_backend {
namespace {

constexpr auto kExplanation = std::chrono::milliseconds(1000);

// Apart from the threads that move data: a callback may wait for the GIL, or for another operation (PowerSGD's do).
PatientWorkers& completions() {
  static PerProcess<PatientWorkers> shared([] { return std::make_unique<PatientWorkers>(64); });
  return shared.get();
}

// Copies results to where they belong. Not on the threads above: callbacks that wait for these may hold all of them.
Workers& copiers() {
  static PerProcess<Workers> shared([] { return std::make_unique<Workers>(1); });
  return shared.get();
}

}  // namespace

std::shared_ptr<void> released_with_futures(std::shared_ptr<void> kept) {
  void* const address = kept.get();
  return {address, [kept = std::move(kept)](void*) mutable { completions().post([kept = std::move(kept)] {}); }};
}

bool finish_callbacks(std::chrono::milliseconds limit) {
  return completions().wait_until_idle(limit);
}

std::exception_ptr to_torch(const Error& error) {
  const c10::SourceLocation where{__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)};
  if (error.kind() == ErrorKind::invalid) return std::make_exception_ptr(c10::ValueError(where, error.what()));
  return std::make_exception_ptr(c10::DistBackendError(where, error.what()));
}

IrohWork::IrohWork(int rank, Description description)
    : ::c10d::Work(rank, description.type, description.title, description.inputs),
      description_(std::move(description)) {
  if (!description_.value_type) {
    description_.value_type = c10::ListType::create(c10::TensorType::get());
    description_.value = c10::IValue(description_.outputs);
  }
  std::vector<c10::Device> devices;
  if (description_.staging) devices.push_back(description_.staging->device());
  future_ = c10::make_intrusive<c10::ivalue::Future>(description_.value_type, devices);
  result_ = c10::make_intrusive<c10::ivalue::Future>(c10::AnyEnumType::get());
}

void IrohWork::finish(c10::intrusive_ptr<IrohWork> work, const Error* error, int source) {
  work->source_ = source;
  if (error != nullptr) {
    work->outcome_ = error->kind() == ErrorKind::timeout ? ::c10d::WorkResult::TIMEOUT : ::c10d::WorkResult::COMM_ERROR;
  }
  const std::exception_ptr failed = error == nullptr ? nullptr : to_torch(*error);
  const auto end = [](c10::intrusive_ptr<IrohWork> done, const std::exception_ptr& outcome) {
    bool unasked = false;
    {
      const std::lock_guard lock(done->futures_mutex_);
      unasked = done->description_.waited_for && !done->futures_wanted_;
      if (unasked) done->unasked_ = outcome;
    }
    done->Work::finish(outcome);
    if (unasked) {
      // Its caller may have let go of all else by now. What frees a tensor may wait for the GIL.
      if (std::this_thread::get_id() != done->caller_) completions().post([done = std::move(done)] {});
      return;
    }
    completions().post([done = std::move(done), outcome] { done->complete_futures(outcome); });
  };
  if (failed || !work->description_.after) return end(std::move(work), failed);
  copiers().post([work = std::move(work), end]() mutable {
    const std::exception_ptr outcome = work->copy_back();
    end(std::move(work), outcome);
  });
}

std::exception_ptr IrohWork::copy_back() {
  try {
    if (description_.staging) {
      description_.staging->write_back(description_.after);
    } else {
      description_.after();
    }
    return nullptr;
  } catch (...) {
    outcome_ = ::c10d::WorkResult::COMM_ERROR;
    return std::current_exception();
  }
}

void IrohWork::complete_futures(const std::exception_ptr& failed) {
  {
    // A future of device tensors is complete when the current stream is: torch makes its waiters' streams follow.
    std::optional<Staging::StreamScope> scope;
    if (description_.staging) scope.emplace(*description_.staging);
    if (failed) {
      future_->setError(failed);
    } else {
      future_->markCompleted(description_.value);
    }
  }
  result_->markCompleted(c10::IValue(static_cast<std::int64_t>(outcome_)));
  description_.after = nullptr;
  description_.inputs.clear();
}

c10::intrusive_ptr<c10::ivalue::Future> IrohWork::getFuture() {
  want_futures();
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> IrohWork::getFutureResult() {
  want_futures();
  return result_;
}

void IrohWork::want_futures() {
  std::optional<std::exception_ptr> outcome;
  {
    const std::lock_guard lock(futures_mutex_);
    futures_wanted_ = true;
    outcome.swap(unasked_);
  }
  if (outcome) complete_futures(*outcome);
}

bool IrohWork::wait(std::chrono::milliseconds timeout) {
  if (description_.on_wait && !isCompleted()) description_.on_wait();
  {
    std::unique_lock lock(mutex_);
    const auto done = [this] { return completed_; };
    if (timeout == kNoTimeout) {
      cv_.wait(lock, done);  // the core ends every operation by its own deadline
    } else if (!cv_.wait_for(lock, timeout, done)) {
      lock.unlock();
      const std::string text = "wait(" + to_text(timeout) + ") timed out on rank " + std::to_string(rank_);
      description_.give_up(text);
      lock.lock();
      // The group knows whom it was waiting for, and says so in the error with which it ends this work.
      cv_.wait_for(lock, kExplanation, done);
      if (exception_) std::rethrow_exception(exception_);
      std::rethrow_exception(to_torch(Error(ErrorKind::timeout, text)));
    }
    if (exception_) std::rethrow_exception(exception_);
  }
  synchronize();
  return true;
}

void IrohWork::synchronize() {
  if (description_.staging) description_.staging->block_current_stream();
}

void IrohWork::abort() {
  description_.give_up("an operation was aborted on rank " + std::to_string(rank_));
}

std::vector<at::Tensor> IrohWork::result() {
  return description_.outputs;
}

int IrohWork::sourceRank() const {
  return source_;
}

}  // namespace torch_iroh::c10d_backend
