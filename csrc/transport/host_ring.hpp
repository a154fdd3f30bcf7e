// Messages from one rank to another of its host, through memory that the sender owns: a ring of entries, and slots for
// what does not fit into one. Each side writes its own counters only. No waiting and no locks: who has to wait for room
// or for news says so, and is rung for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/payload.hpp"
#include "transport/shared_memory.hpp"
#include "transport/transport.hpp"

namespace torch_iroh::transport {

inline constexpr std::size_t kRingSlots = 8;
inline constexpr std::size_t kRingSlotBytes = 256 << 10;  // the usual chunk

// What one rank tells another about both directions between them; in the memory of the one who tells.
struct HostLine {
  // What it has sent:
  alignas(64) std::atomic<std::int32_t> ring;  // descriptor of its memory, plus one; 0: none yet
  std::atomic<std::uint64_t> put;              // entries
  std::atomic<std::uint32_t> starved;          // it waits for room
  std::atomic<std::uint32_t> wanted;           // it exchanges messages with the other, or waits for some
  // What it has received:
  alignas(64) std::atomic<std::uint32_t> opened;  // it has mapped the other's ring
  std::atomic<std::uint64_t> taken;               // entries
  std::atomic<std::uint64_t> returned;            // slots
  std::uint8_t slots[kRingSlots];                 // which these were, the n-th at n modulo kRingSlots
};

enum class RingKind : std::uint8_t { data = 1, control = 2 };

// The sender's side. One thread at a time.
class RingWriter {
 public:
  // Makes the ring and tells the reader of it. Throws Error.
  RingWriter(HostLine& own, const HostLine& readers);

  // Copies a message in, or the next part of it from `done` on, which it moves forward: true when all of it is in.
  bool put(RingKind kind, const Tag& tag, std::span<const std::byte> bytes, std::size_t& done);
  // After `put` said false. True: there is room again; false: the reader rings when there is.
  bool regained_room();
  // Nothing can be lost any more when this side goes away.
  bool is_opened() const { return readers_.opened.load() != 0; }
  // When it is opened, nobody else need be able to.
  void close_descriptor();

 private:
  std::optional<std::uint8_t> free_slot();
  bool has_entry() const;

  HostLine& own_;
  const HostLine& readers_;
  SharedMemory memory_;
  std::uint64_t put_ = 0;
  std::uint64_t regained_ = 0;  // returned slots that are free again
  std::uint8_t free_[kRingSlots];
  std::size_t free_count_ = kRingSlots;
};

// The receiver's side. One thread at a time; what it hands out may be let go of on any.
class RingReader : public std::enable_shared_from_this<RingReader> {
 public:
  using Ring = std::function<void()>;
  // `sender`: where the ring is. `ring` rings the sender. `keep` holds both lines. Throws Error.
  RingReader(pid_t sender, HostLine& own, const HostLine& senders, Ring ring, std::shared_ptr<const void> keep);

  struct Message {
    RingKind kind = RingKind::data;
    Tag tag{};
    Payload payload;
  };
  // The next whole message, if there is one. Throws Error(protocol).
  std::optional<Message> next();

 private:
  Payload take_slot(std::uint8_t slot, std::size_t bytes);
  void give_back(std::uint8_t slot);
  void tell_starved() const;

  HostLine& own_;
  const HostLine& senders_;
  const Ring ring_;
  const std::shared_ptr<const void> keep_;
  SharedMemory memory_;
  std::uint64_t taken_ = 0;
  std::vector<std::byte> partial_;
  std::mutex slots_mutex_;
  std::uint64_t returned_ = 0;
  std::size_t lent_ = 0;  // slots
};

}  // namespace torch_iroh::transport
