// Drives one UniFFI future: poll, park, poll again, complete, free. Private to csrc/iroh.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>

#include "iroh/abi.hpp"
#include "iroh/future.hpp"

namespace torch_iroh::iroh {

// The hand-over between the thread that polls and the thread that is told "ready" or "poll again". Whoever of the two
// comes second goes on, so there is no lock and no lost wake-up.
class PollLoop {
 public:
  virtual ~PollLoop() = default;

 protected:
  void run();  // polls until parked or finished
  virtual void poll(abi::PollCallback callback, std::uint64_t data) = 0;
  virtual void finish() = 0;  // the future is ready; may destroy this

 private:
  enum class State : int { polling, parked, again, ready };
  static void on_poll(std::uint64_t data, std::int8_t code);

  std::atomic<State> state_{State::polling};
};

// Raw: what `complete` returns. T: what `lift` makes of it.
template <typename T, typename Raw>
class Call final : public Pending<T>, private PollLoop, public std::enable_shared_from_this<Call<T, Raw>> {
 public:
  using Done = typename Pending<T>::Done;
  using Lift = std::conditional_t<std::is_void_v<Raw>, std::function<T()>,
                                  std::function<T(std::conditional_t<std::is_void_v<Raw>, int, Raw>)>>;

  Call(abi::Handle future, const abi::FutureFunctions<Raw>& functions, const char* doing, Lift lift)
      : future_(future), functions_(functions), doing_(doing), lift_(std::move(lift)) {}
  ~Call() override { free(); }

  void start(Done done, bool poll_here) override {
    done_ = std::move(done);
    self_ = this->shared_from_this();
    if (poll_here) {
      run();
    } else {
      pollers().post([this] { run(); });
    }
  }

  void cancel() override {
    const std::lock_guard lock(mutex_);
    if (!freed_ && abi::functions_or_null() != nullptr) functions_.cancel(future_);
  }

 private:
  void poll(abi::PollCallback callback, std::uint64_t data) override { functions_.poll(future_, callback, data); }

  void finish() override {
    const auto self = std::move(self_);
    Result<T> result = complete();
    free();
    const Done done = std::move(done_);
    done(std::move(result));
  }

  Result<T> complete() {
    abi::CallStatus status;
    try {
      if constexpr (std::is_void_v<Raw>) {
        functions_.complete(future_, &status);
        abi::check(status, doing_);
        return lift_();
      } else {
        const Raw raw = functions_.complete(future_, &status);
        abi::check(status, doing_);
        return lift_(raw);
      }
    } catch (const Error& error) {
      return error;
    }
  }

  void free() {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(freed_, true) && abi::functions_or_null() != nullptr) functions_.free(future_);
  }

  const abi::Handle future_;
  const abi::FutureFunctions<Raw>& functions_;
  const char* const doing_;
  Lift lift_;
  Done done_;
  std::shared_ptr<Call> self_;  // keeps the call alive while iroh may call back
  std::mutex mutex_;            // orders cancel() against free()
  bool freed_ = false;
};

template <typename T, typename Raw, typename LiftFunction>
Future<T> make_future(abi::Handle future, const abi::FutureFunctions<Raw>& functions, const char* doing,
                      LiftFunction lift) {
  return Future<T>(std::make_shared<Call<T, Raw>>(future, functions, doing, std::move(lift)));
}

}  // namespace torch_iroh::iroh
