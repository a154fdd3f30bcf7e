// One word per process, in memory it shares with its neighbours: whoever has news rings, and every thread of that
// process that sleeps for news of this kind looks again. A futex: ringing an awake process costs no system call, and
// nobody spins.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/time.hpp"
#include "transport/shared_memory.hpp"

namespace torch_iroh::transport {

enum class News : std::uint32_t {
  steps = 1,     // of a collective
  messages = 2,  // and room for more of them
  any = 3,
};

class Doorbell {
 public:
  static Doorbell& own();                                              // of this process; a forked child makes its own
  static Doorbell of(pid_t pid, int descriptor, std::uint64_t nonce);  // throws Error

  int descriptor() const { return memory_.descriptor(); }
  std::uint64_t nonce() const;

  // Look at the state that may change between the two: `wait` returns at once when somebody has rung since `heard`.
  std::uint32_t heard() const;
  void wait(std::uint32_t heard, TimePoint until, News news);
  void ring(News news);  // not `any`

  Doorbell(Doorbell&&) = default;
  Doorbell& operator=(Doorbell&&) = default;

 private:
  struct Words;
  explicit Doorbell(SharedMemory memory) : memory_(std::move(memory)) {}
  static std::unique_ptr<Doorbell> make();
  Words& words() const;

  SharedMemory memory_;
};

}  // namespace torch_iroh::transport
