// The ranks of a group that run on one host, as they see each other through shared memory: how far each has come, what
// it has called, the bytes it shows, and whether it is still there. Every rank writes its own mailbox only. Moves bytes
// and counts; does not know what an operation is. One thread at a time uses what is about phases; the rest: any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "transport/doorbell.hpp"
#include "transport/host_ring.hpp"
#include "transport/shared_memory.hpp"

namespace torch_iroh::transport {

// What a rank publishes, so that the others of its host find its memory.
struct HostIntroduction {
  std::string host;  // host_identity(), empty: not known
  std::int32_t pid = 0;
  std::int32_t memory = -1;  // -1: shares none
  std::uint64_t nonce = 0;
  std::int32_t bell = -1;
  std::uint64_t bell_nonce = 0;
};

class HostTeam {
 public:
  struct Text {  // what does not fit is cut
    static constexpr std::size_t kMostBytes = 1000;
    std::uint16_t bytes = 0;
    char characters[kMostBytes] = {};

    void set(const std::string& given);
    std::string get() const;
  };
  // What a rank shows of one turn. Addresses are of its own process.
  struct Call {
    std::uint64_t rounds = 1;
    std::uint64_t addresses[3] = {};  // input, output, scratch
    bool direct = false;              // readers take its bytes from there; else from its window
    std::uint64_t history = 0;        // what stands for all calls before this one
    Text text{};                      // this call
    Text previous{};                  // the one before, which a rank may have ended without being compared
  };
  struct Amount {  // of what one rank has for another (all_to_all), in elements
    std::uint64_t offset = 0;
    std::uint64_t count = 0;
  };
  enum class Standing : std::uint32_t { present, left, failed };

  static constexpr std::size_t kWindowBytes = 1 << 20;
  static constexpr int kNobody = -1, kEveryone = -2;  // where a rank is awaited

  // Makes this rank's mailbox. Throws Error.
  HostTeam(int rank, int world);
  ~HostTeam();
  HostTeam(const HostTeam&) = delete;
  HostTeam& operator=(const HostTeam&) = delete;

  HostIntroduction introduction() const;
  // Maps the mailboxes of those of `ranks` that are on this host, and proves by what is in them that they are the ranks
  // that joined. `ranks`: of all the group. Throws Error.
  void attach(const std::vector<HostIntroduction>& ranks);
  // Whether the memory of every other rank of this host can be read directly, tried with each.
  bool can_read() const { return can_read_; }
  // Once every rank of the host has attached: nobody else can any more. `direct`: each can read every other.
  void settle(bool direct);
  bool direct() const { return direct_; }

  int rank() const { return rank_; }
  int world() const { return world_; }
  const std::vector<int>& neighbours() const { return neighbours_; }  // the group's other ranks on this host
  bool is_whole() const { return static_cast<int>(neighbours_.size()) + 1 == world_; }

  std::uint64_t phase(int rank) const;
  void advance_to(std::uint64_t phase);  // what was written before is seen by whoever sees the phase
  Call& call(std::uint64_t turn);        // this rank's
  std::span<Amount> amounts(std::uint64_t turn);
  std::byte* window(std::uint64_t turn);
  const Call& call_of(int rank, std::uint64_t turn) const;
  std::span<const Amount> amounts_of(int rank, std::uint64_t turn) const;
  const std::byte* window_of(int rank, std::uint64_t turn) const;
  // Copies from the memory of another rank, which holds it still. Throws Error(peer_gone).
  void read(int rank, std::uint64_t address, std::byte* to, std::size_t bytes) const;

  // Before going to sleep until `rank` has come as far as `phase`: whoever completes that rings this process. Who needs
  // all ranks is woken once, by the last of them.
  void await(int rank, std::uint64_t phase = 0);
  bool has_come(int rank, std::uint64_t phase) const;
  Standing standing(int rank) const;
  std::string reason_of(int rank) const;  // why it failed
  bool ended(int rank) const;             // its process
  bool stopped(int rank) const;           // its process, by a signal or a debugger
  pid_t pid_of(int rank) const;

  void fail(const std::string& reason);
  void leave();

  // Messages between two ranks: what this rank tells `rank`, and what that one tells this.
  HostLine& line(int rank);
  const HostLine& line_of(int rank) const;
  void ring(int rank, News news);
  // No message will be put from here on. Apart from `leave`, which is about collectives.
  void part();
  bool parted(int rank) const;

 private:
  struct Mailbox;
  struct Peer {
    SharedMemory memory;
    std::optional<Doorbell> bell;
    ProcessHandle process;
  };

  std::size_t lines_offset() const;
  std::size_t amounts_offset() const;
  std::size_t windows_offset() const;
  std::size_t memory_bytes() const;
  static Mailbox& mailbox(const SharedMemory& memory);
  Mailbox& mailbox(int rank) const;
  void ring_all(News news);
  bool completes(int waiter) const;

  const int rank_;
  const int world_;
  const std::string host_identity_;
  SharedMemory own_;
  std::vector<Peer> peers_;  // by rank; empty: this rank, and those of other hosts
  std::vector<int> neighbours_;
  bool can_read_ = false;
  bool direct_ = false;
};

}  // namespace torch_iroh::transport
