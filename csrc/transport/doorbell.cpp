#include "transport/doorbell.hpp"

#include <algorithm>
#include <climits>
#include <ctime>
#include <new>
#include <utility>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/random.hpp"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace torch_iroh::transport {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::uint64_t kMagic = 0x326c654272495400;  // "\0TIrBel2"

}  // namespace

struct Doorbell::Words {
  std::uint64_t magic;
  std::uint64_t nonce;
  alignas(64) std::atomic<std::uint32_t> rung;
  std::atomic<std::uint32_t> sleepers_for_steps;
  std::atomic<std::uint32_t> sleepers_for_messages;
};

Doorbell::Words& Doorbell::words() const {
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free,
                "processes share these words");
  return *std::launder(reinterpret_cast<Words*>(memory_.data()));
}

std::unique_ptr<Doorbell> Doorbell::make() {
  std::unique_ptr<Doorbell> bell(new Doorbell(SharedMemory::make("torch-iroh-doorbell", kPage)));
  auto* words = new (bell->memory_.data()) Words{};
  words->magic = kMagic;
  words->nonce = random_number();
  return bell;
}

Doorbell& Doorbell::own() {
  static PerProcess<Doorbell> shared([] { return make(); });
  return shared.get();
}

Doorbell Doorbell::of(pid_t pid, int descriptor, std::uint64_t nonce) {
  Doorbell bell(SharedMemory::open_of(pid, descriptor, kPage, SharedMemory::Access::read_and_write));
  if (bell.words().magic != kMagic || bell.words().nonce != nonce) {
    throw Error(ErrorKind::protocol, "process " + std::to_string(pid) + " is not the one that joined");
  }
  return bell;
}

std::uint64_t Doorbell::nonce() const {
  return words().nonce;
}

std::uint32_t Doorbell::heard() const {
  return words().rung.load(std::memory_order_acquire);
}

#ifdef __linux__

void Doorbell::wait(std::uint32_t heard, TimePoint until, News news) {
  Words& shared = words();
  const auto kinds = static_cast<std::uint32_t>(news);
  const auto count = [&](std::uint32_t one) {
    if ((kinds & static_cast<std::uint32_t>(News::steps)) != 0) shared.sleepers_for_steps.fetch_add(one);
    if ((kinds & static_cast<std::uint32_t>(News::messages)) != 0) shared.sleepers_for_messages.fetch_add(one);
  };
  count(1);
  timespec time{};
  const timespec* limit = nullptr;
  if (until != kNever) {
    // FUTEX_WAIT_BITSET takes a time of the monotonic clock, which Clock is on Linux.
    const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(until.time_since_epoch()).count();
    time = {static_cast<time_t>(nanoseconds / 1'000'000'000), static_cast<long>(nanoseconds % 1'000'000'000)};
    limit = &time;
  }
  // Returns at once when the word is not `heard` any more; a signal or a spurious return makes the caller look again.
  syscall(SYS_futex, &shared.rung, FUTEX_WAIT_BITSET, heard, limit, nullptr, kinds);
  count(-1U);
}

void Doorbell::ring(News news) {
  Words& shared = words();
  shared.rung.fetch_add(1, std::memory_order_seq_cst);
  const auto& sleepers = news == News::steps ? shared.sleepers_for_steps : shared.sleepers_for_messages;
  if (sleepers.load(std::memory_order_seq_cst) > 0) {
    syscall(SYS_futex, &shared.rung, FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, static_cast<std::uint32_t>(news));
  }
}

#else

void Doorbell::wait(std::uint32_t, TimePoint, News) {}
void Doorbell::ring(News) {}

#endif

}  // namespace torch_iroh::transport
