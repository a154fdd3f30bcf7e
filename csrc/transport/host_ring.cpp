#include "transport/host_ring.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.hpp"

namespace torch_iroh::transport {
namespace {

constexpr std::uint64_t kEntries = 128;
constexpr std::size_t kEntryBytes = 1024;
constexpr std::uint8_t kNoSlot = 0xff;
// The receiver holds back so many slots at most: with the rest, the sender can always go on.
constexpr std::size_t kMostLent = kRingSlots - 2;
// No message of a group is longer (link::kMaxFrameBytes).
constexpr std::size_t kMostMessageBytes = 1 << 20;

struct Entry {
  std::uint8_t kind;
  std::uint8_t slot;  // kNoSlot: the bytes are here
  std::uint8_t more;  // not the last part of its message
  std::uint32_t length;
  Tag tag;
  static constexpr std::size_t kMostBytes = kEntryBytes - 32;
  std::byte bytes[kMostBytes];
};
static_assert(sizeof(Entry) == kEntryBytes);

constexpr std::size_t kRingBytes = kEntries * kEntryBytes + kRingSlots * kRingSlotBytes;

Entry& entry_of(const SharedMemory& memory, std::uint64_t number) {
  return reinterpret_cast<Entry*>(memory.data())[number % kEntries];
}

std::byte* slot_of(const SharedMemory& memory, std::uint8_t slot) {
  return memory.data() + kEntries * kEntryBytes + slot * kRingSlotBytes;
}

}  // namespace

RingWriter::RingWriter(HostLine& own, const HostLine& readers)
    : own_(own), readers_(readers), memory_(SharedMemory::make("torch-iroh-ring", kRingBytes)) {
  for (std::size_t i = 0; i < kRingSlots; ++i) free_[i] = static_cast<std::uint8_t>(kRingSlots - 1 - i);
  own_.ring.store(memory_.descriptor() + 1);
}

bool RingWriter::has_entry() const {
  return put_ - readers_.taken.load(std::memory_order_seq_cst) < kEntries;
}

// The one that was used last: a slow trickle of messages touches little memory.
std::optional<std::uint8_t> RingWriter::free_slot() {
  for (const std::uint64_t returned = readers_.returned.load(std::memory_order_seq_cst); regained_ < returned;) {
    const std::uint8_t slot = readers_.slots[regained_++ % kRingSlots];
    // A reader that returns what it does not have would make this side write where others read.
    if (slot >= kRingSlots || free_count_ == kRingSlots) {
      throw Error(ErrorKind::protocol, "it returned memory that it did not have");
    }
    free_[free_count_++] = slot;
  }
  if (free_count_ == 0) return std::nullopt;
  return free_[free_count_ - 1];
}

bool RingWriter::put(RingKind kind, const Tag& tag, std::span<const std::byte> bytes, std::size_t& done) {
  const std::uint64_t before = put_;
  bool complete = false;
  while (!complete && has_entry()) {
    const std::size_t left = bytes.size() - done;
    const bool here = left <= Entry::kMostBytes;
    const std::size_t length = std::min(left, kRingSlotBytes);
    Entry& entry = entry_of(memory_, put_);
    std::byte* to = entry.bytes;
    entry.slot = kNoSlot;
    if (!here) {
      const auto slot = free_slot();
      if (!slot) break;
      --free_count_;
      entry.slot = *slot;
      to = slot_of(memory_, *slot);
    }
    if (length > 0) std::memcpy(to, bytes.data() + done, length);
    done += length;
    complete = done == bytes.size();
    entry.kind = static_cast<std::uint8_t>(kind);
    entry.more = complete ? 0 : 1;
    entry.length = static_cast<std::uint32_t>(length);
    entry.tag = tag;
    ++put_;
  }
  if (put_ != before) own_.put.store(put_, std::memory_order_seq_cst);
  if (complete) own_.starved.store(0, std::memory_order_seq_cst);
  return complete;
}

bool RingWriter::regained_room() {
  own_.starved.store(1, std::memory_order_seq_cst);
  return has_entry() && free_slot();
}

void RingWriter::close_descriptor() {
  memory_.close_descriptor();
}

RingReader::RingReader(pid_t sender, HostLine& own, const HostLine& senders, Ring ring,
                       std::shared_ptr<const void> keep)
    : own_(own),
      senders_(senders),
      ring_(std::move(ring)),
      keep_(std::move(keep)),
      memory_(SharedMemory::open_of(sender, senders.ring.load() - 1, kRingBytes, SharedMemory::Access::read)) {
  own_.opened.store(1, std::memory_order_seq_cst);
}

std::optional<RingReader::Message> RingReader::next() {
  for (;;) {
    const std::uint64_t ahead = senders_.put.load(std::memory_order_seq_cst) - taken_;
    if (ahead == 0) return std::nullopt;
    const Entry& entry = entry_of(memory_, taken_);
    const std::size_t length = entry.length;
    const std::uint8_t slot = entry.slot;
    const bool more = entry.more != 0;
    const auto kind = static_cast<RingKind>(entry.kind);
    const bool sound = (kind == RingKind::data || kind == RingKind::control) &&
                       (slot == kNoSlot ? length <= Entry::kMostBytes : slot < kRingSlots && length <= kRingSlotBytes);
    if (ahead > kEntries || !sound || partial_.size() + length > kMostMessageBytes) {
      throw Error(ErrorKind::protocol, "what it put into shared memory is no message");
    }
    const bool whole = !more && partial_.empty();
    const std::byte* const from = slot == kNoSlot ? entry.bytes : slot_of(memory_, slot);
    Message message{kind, entry.tag, {}};
    if (whole) {
      message.payload = slot == kNoSlot ? Payload::copy_of({from, length}) : take_slot(slot, length);
    } else {
      partial_.insert(partial_.end(), from, from + length);
      if (slot != kNoSlot) give_back(slot);
    }
    own_.taken.store(++taken_, std::memory_order_seq_cst);
    tell_starved();
    if (more) continue;
    if (!whole) message.payload = Payload::copy_of(std::exchange(partial_, {}));
    return message;
  }
}

// Lent where it lies while enough others are free, else copied: what waits for its turn must not stop what goes first.
Payload RingReader::take_slot(std::uint8_t slot, std::size_t bytes) {
  const std::span<const std::byte> view(slot_of(memory_, slot), bytes);
  {
    const std::lock_guard lock(slots_mutex_);
    if (lent_ < kMostLent) {
      ++lent_;
      return {view, std::shared_ptr<const void>(view.data(), [self = shared_from_this(), slot](const void*) {
                {
                  const std::lock_guard inner(self->slots_mutex_);
                  --self->lent_;
                }
                self->give_back(slot);
                self->tell_starved();
              })};
    }
  }
  Payload copy = Payload::copy_of(view);
  give_back(slot);
  return copy;
}

void RingReader::give_back(std::uint8_t slot) {
  const std::lock_guard lock(slots_mutex_);
  own_.slots[returned_ % kRingSlots] = slot;
  own_.returned.store(++returned_, std::memory_order_seq_cst);
}

void RingReader::tell_starved() const {
  if (senders_.starved.load(std::memory_order_seq_cst) != 0) ring_();
}

}  // namespace torch_iroh::transport
