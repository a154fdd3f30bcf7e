#include "transport/host_team.hpp"

#include <unistd.h>

#include <algorithm>
#include <new>

#include "base/bytes.hpp"
#include "base/random.hpp"

namespace torch_iroh::transport {
namespace {

constexpr std::uint64_t kMagic = 0x33786f4272495400;  // "\0TIrBox3"
constexpr std::size_t kPage = 4096;

std::size_t whole_pages(std::size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

// A rank and the phase that it is to reach, in one number.
constexpr int kPhaseBits = 48;

std::uint64_t pack(int rank, std::uint64_t phase) {
  return static_cast<std::uint64_t>(static_cast<std::uint16_t>(rank)) << kPhaseBits | phase;
}

struct Awaited {
  int rank;
  std::uint64_t phase;

  explicit Awaited(std::uint64_t packed)
      : rank(static_cast<std::int16_t>(packed >> kPhaseBits)), phase(packed & ((std::uint64_t{1} << kPhaseBits) - 1)) {}
};

}  // namespace

// At the start of a rank's memory; behind it a line for each rank, the amounts of two turns, the windows of two turns.
struct HostTeam::Mailbox {
  std::uint64_t magic;
  std::uint64_t nonce;
  std::uint64_t address;  // of this very struct in its own process
  std::int32_t rank;
  std::int32_t world;
  alignas(64) std::atomic<std::uint64_t> phase;
  alignas(64) std::atomic<std::uint64_t> awaited;  // see `Awaited`
  alignas(64) std::atomic<Standing> standing;
  std::atomic<std::uint32_t> parted;
  Text reason;
  alignas(64) Call calls[2];
};

void HostTeam::Text::set(const std::string& given) {
  bytes = static_cast<std::uint16_t>(std::min(given.size(), kMostBytes));
  std::copy_n(given.data(), bytes, characters);
}

std::string HostTeam::Text::get() const {
  return printable({characters, std::min<std::size_t>(bytes, kMostBytes)});
}

HostTeam::HostTeam(int rank, int world)
    : rank_(rank),
      world_(world),
      host_identity_(host_identity()),
      own_(SharedMemory::make("torch-iroh-group", memory_bytes())) {
  static_assert(std::atomic<Standing>::is_always_lock_free, "processes share it");
  auto* box = new (own_.data()) Mailbox{};
  box->magic = kMagic;
  box->nonce = random_number();
  box->address = reinterpret_cast<std::uint64_t>(own_.data());
  box->rank = rank;
  box->world = world;
  box->awaited = pack(kNobody, 0);
  for (int i = 0; i < world; ++i) new (&line(i)) HostLine{};
  Doorbell::own();
}

HostTeam::~HostTeam() = default;

std::size_t HostTeam::lines_offset() const {
  return whole_pages(sizeof(Mailbox));
}

std::size_t HostTeam::amounts_offset() const {
  return lines_offset() + whole_pages(static_cast<std::size_t>(world_) * sizeof(HostLine));
}

std::size_t HostTeam::windows_offset() const {
  return amounts_offset() + whole_pages(2 * static_cast<std::size_t>(world_) * sizeof(Amount));
}

std::size_t HostTeam::memory_bytes() const {
  return windows_offset() + 2 * kWindowBytes;
}

HostTeam::Mailbox& HostTeam::mailbox(const SharedMemory& memory) {
  return *std::launder(reinterpret_cast<Mailbox*>(memory.data()));
}

HostTeam::Mailbox& HostTeam::mailbox(int rank) const {
  return mailbox(rank == rank_ ? own_ : peers_[static_cast<std::size_t>(rank)].memory);
}

HostIntroduction HostTeam::introduction() const {
  HostIntroduction mine;
  mine.host = host_identity_;
  mine.pid = getpid();
  mine.memory = own_.descriptor();
  mine.nonce = mailbox(own_).nonce;
  mine.bell = Doorbell::own().descriptor();
  mine.bell_nonce = Doorbell::own().nonce();
  return mine;
}

void HostTeam::attach(const std::vector<HostIntroduction>& ranks) {
  peers_.resize(ranks.size());
  can_read_ = true;
  for (int rank = 0; rank < world_; ++rank) {
    const HostIntroduction& theirs = ranks[static_cast<std::size_t>(rank)];
    if (rank == rank_ || theirs.host != host_identity_) continue;
    neighbours_.push_back(rank);
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    // The handle comes first: what is proved below is proved of the process that it names.
    peer.process = ProcessHandle(theirs.pid);
    peer.memory = SharedMemory::open_of(theirs.pid, theirs.memory, memory_bytes(), SharedMemory::Access::read);
    const Mailbox& box = mailbox(peer.memory);
    if (box.magic != kMagic || box.nonce != theirs.nonce || box.rank != rank || box.world != world_) {
      throw Error(ErrorKind::protocol,
                  "process " + std::to_string(theirs.pid) + " is not rank " + std::to_string(rank) + " of this group");
    }
    peer.bell.emplace(Doorbell::of(theirs.pid, theirs.bell, theirs.bell_nonce));
    try {
      std::uint64_t head[2] = {};
      peer.process.read(box.address, reinterpret_cast<std::byte*>(head), sizeof head);
      if (head[0] != kMagic || head[1] != theirs.nonce) can_read_ = false;
    } catch (const Error&) {
      can_read_ = false;  // the kernel does not permit it (ptrace_scope, a container): windows do
    }
  }
}

void HostTeam::settle(bool direct) {
  direct_ = direct;
  own_.close_descriptor();
}

std::uint64_t HostTeam::phase(int rank) const {
  return mailbox(rank).phase.load(std::memory_order_seq_cst);
}

void HostTeam::advance_to(std::uint64_t phase) {
  mailbox(own_).phase.store(phase, std::memory_order_seq_cst);
  for (const int rank : neighbours_) {
    // Whoever announced after this store that it waits looks at the phases once more, and sees it.
    if (completes(rank)) ring(rank, News::steps);
  }
}

bool HostTeam::completes(int waiter) const {
  const Awaited awaited(mailbox(waiter).awaited.load(std::memory_order_seq_cst));
  if (awaited.rank != rank_ && awaited.rank != kEveryone) return false;
  if (phase(rank_) < awaited.phase) return false;
  // Of two that come last at the same time, at least one sees both.
  return awaited.rank == rank_ || std::all_of(neighbours_.begin(), neighbours_.end(),
                                              [&](int rank) { return rank == waiter || phase(rank) >= awaited.phase; });
}

void HostTeam::ring(int rank, News news) {
  peers_[static_cast<std::size_t>(rank)].bell->ring(news);
}

void HostTeam::ring_all(News news) {
  for (const int rank : neighbours_) ring(rank, news);
}

HostTeam::Call& HostTeam::call(std::uint64_t turn) {
  return mailbox(own_).calls[turn % 2];
}

const HostTeam::Call& HostTeam::call_of(int rank, std::uint64_t turn) const {
  return mailbox(rank).calls[turn % 2];
}

std::span<HostTeam::Amount> HostTeam::amounts(std::uint64_t turn) {
  const auto world = static_cast<std::size_t>(world_);
  auto* first = reinterpret_cast<Amount*>(own_.data() + amounts_offset());
  return {first + turn % 2 * world, world};
}

std::span<const HostTeam::Amount> HostTeam::amounts_of(int rank, std::uint64_t turn) const {
  const auto world = static_cast<std::size_t>(world_);
  const auto& memory = peers_[static_cast<std::size_t>(rank)].memory;
  const auto* first = reinterpret_cast<const Amount*>(memory.data() + amounts_offset());
  return {first + turn % 2 * world, world};
}

std::byte* HostTeam::window(std::uint64_t turn) {
  return own_.data() + windows_offset() + turn % 2 * kWindowBytes;
}

const std::byte* HostTeam::window_of(int rank, std::uint64_t turn) const {
  const auto& memory = rank == rank_ ? own_ : peers_[static_cast<std::size_t>(rank)].memory;
  return memory.data() + windows_offset() + turn % 2 * kWindowBytes;
}

void HostTeam::read(int rank, std::uint64_t address, std::byte* to, std::size_t bytes) const {
  try {
    peers_[static_cast<std::size_t>(rank)].process.read(address, to, bytes);
  } catch (const Error& error) {
    throw Error(error.kind(), "rank " + std::to_string(rank) + " is gone: " + error.what());
  }
}

void HostTeam::await(int rank, std::uint64_t phase) {
  mailbox(own_).awaited.store(pack(rank, phase), std::memory_order_seq_cst);
}

bool HostTeam::has_come(int rank, std::uint64_t phase) const {
  if (rank != kEveryone) return this->phase(rank) >= phase;
  return std::all_of(neighbours_.begin(), neighbours_.end(), [&](int one) { return this->phase(one) >= phase; });
}

HostTeam::Standing HostTeam::standing(int rank) const {
  return mailbox(rank).standing.load(std::memory_order_seq_cst);
}

std::string HostTeam::reason_of(int rank) const {
  return mailbox(rank).reason.get();
}

bool HostTeam::ended(int rank) const {
  return peers_[static_cast<std::size_t>(rank)].process.ended();
}

bool HostTeam::stopped(int rank) const {
  return peers_[static_cast<std::size_t>(rank)].process.stopped();
}

pid_t HostTeam::pid_of(int rank) const {
  return peers_[static_cast<std::size_t>(rank)].process.pid();
}

void HostTeam::fail(const std::string& reason) {
  Mailbox& box = mailbox(own_);
  if (box.standing.load() != Standing::present) return;
  box.reason.set(reason);
  box.standing.store(Standing::failed, std::memory_order_seq_cst);
  ring_all(News::steps);
}

void HostTeam::leave() {
  Mailbox& box = mailbox(own_);
  if (box.standing.load() != Standing::present) return;
  box.standing.store(Standing::left, std::memory_order_seq_cst);
  ring_all(News::steps);
}

HostLine& HostTeam::line(int rank) {
  return reinterpret_cast<HostLine*>(own_.data() + lines_offset())[rank];
}

const HostLine& HostTeam::line_of(int rank) const {
  const auto& memory = peers_[static_cast<std::size_t>(rank)].memory;
  return reinterpret_cast<const HostLine*>(memory.data() + lines_offset())[rank_];
}

void HostTeam::part() {
  mailbox(own_).parted.store(1, std::memory_order_seq_cst);
  ring_all(News::messages);
}

bool HostTeam::parted(int rank) const {
  return mailbox(rank).parted.load(std::memory_order_seq_cst) != 0;
}

}  // namespace torch_iroh::transport
