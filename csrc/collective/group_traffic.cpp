// What a group sends and receives: announcements and what follows from them, chunks that may go and chunks that wait.
#include <algorithm>
#include <utility>

#include "collective/failure_text.hpp"
#include "collective/group.hpp"

namespace torch_iroh::collective {
namespace {

// What one rank may send to another ahead of its announcement: enough for small operations to need no round trip.
constexpr std::uint64_t kAllowance = 1 << 20;
// Chunks of a foreign operation overtake its announcement by less than this, or something else is wrong.
constexpr Duration kNameFollows = milliseconds(1000);
// A rank gets ahead of another by operations that need nothing of it; each counts as this many bytes at least.
constexpr std::uint64_t kLeastCharge = 256;
constexpr std::size_t kMostCallsAhead = 8192;

}  // namespace

std::uint64_t charge_of(std::size_t bytes) {
  return std::max<std::uint64_t>(bytes, kLeastCharge);
}

std::vector<std::uint64_t> amounts_by_rank(const Request& request, const std::vector<std::uint64_t>& blocks) {
  if (!request.members) return blocks;
  std::vector<std::uint64_t> amounts(static_cast<std::size_t>(request.world));
  for (std::size_t i = 0; i < blocks.size(); ++i) amounts[static_cast<std::size_t>((*request.members)[i])] = blocks[i];
  return amounts;
}

void Group::announce(std::uint64_t sequence, const Request& request, const std::string& description,
                     const Execution& execution) {
  std::vector<bool> needed(static_cast<std::size_t>(world_));
  for (const int peer : execution.peers()) needed[static_cast<std::size_t>(peer)] = true;
  // Two ranks of an all_to_all that have nothing for each other must agree on that too.
  std::vector<bool> must_agree(static_cast<std::size_t>(world_));
  std::vector<std::uint64_t> amounts;
  if (request.op == Op::all_to_all) {
    amounts = amounts_by_rank(request, request.send_blocks);
    must_agree.assign(must_agree.size(), !request.members);
    for (std::int32_t i = 0; request.members && i < participants(request); ++i) {
      must_agree[static_cast<std::size_t>((*request.members)[static_cast<std::size_t>(i)])] = true;
    }
  }
  Message announcement{.kind = MessageKind::call};
  announcement.sequence = sequence;
  announcement.text = description;
  for (int peer = 0; peer < world_; ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    const Peer& entry = peers_[index];
    // A rank that said goodbye may have sent already all that this operation needs of it.
    if (needed[index] && entry.lost && (!entry.left || execution.sends_to(peer))) throw gone(peer);
    if (peer == rank_ || entry.lost || !(needed[index] || must_agree[index])) continue;
    if (must_agree[index]) announcement.bytes = amounts[index];
    transport_->send_control(peer, encode(announcement));
  }
}

void Group::send_chunk(int peer, const transport::Tag& tag, std::span<const std::byte> bytes,
                       std::function<void()> sent) {
  // `sent` holds the execution, and with it the memory, until the transport has let go of it.
  auto done = [weak = weak_from_this(), peer, sent = std::move(sent)](Result<Nothing> result) mutable {
    const auto self = weak.lock();
    if (!self) return;
    self->post([self = self.get(), peer, ok = result.ok(), sent = std::move(sent)] {
      // Cut off by the road's end: a peer that said goodbye had all it needed, so also this; on_lost tells.
      Peer& entry = self->peers_[static_cast<std::size_t>(peer)];
      if (!ok && !(entry.lost && entry.left)) {
        entry.unsure.push_back(sent);
        return;
      }
      self->run(sent);
      self->advance();
    });
  };
  Peer& entry = peers_[static_cast<std::size_t>(peer)];
  const bool waits = !entry.held.empty() && tag.sequence >= entry.announced;
  if (waits || !may_send(entry, tag.sequence, bytes.size())) {
    entry.held.push_back({tag, bytes, std::move(done)});
    return;
  }
  transmit(peer, tag, bytes, std::move(done));
}

bool Group::may_send(Peer& peer, std::uint64_t sequence, std::size_t bytes) const {
  if (sequence < peer.announced) return true;
  const std::uint64_t charge = charge_of(bytes);
  if (peer.allowance_used + charge > kAllowance) return false;
  peer.allowance_used += charge;
  peer.ahead[sequence] += charge;
  return true;
}

void Group::transmit(int peer, const transport::Tag& tag, std::span<const std::byte> bytes, transport::SendDone done) {
  transport_->send(peer, tag, bytes, std::move(done));
}

void Group::release_held(int peer) {
  Peer& entry = peers_[static_cast<std::size_t>(peer)];
  while (!entry.held.empty() && may_send(entry, entry.held.front().tag.sequence, entry.held.front().bytes.size())) {
    Held held = std::move(entry.held.front());
    entry.held.pop_front();
    transmit(peer, held.tag, held.bytes, std::move(held.done));
  }
}

void Group::on_data(int from, const transport::Tag& tag, Payload payload) {
  const std::size_t bytes = payload.size();
  if (!inbox_.enter(bytes)) return;
  post([this, from, tag, payload = std::move(payload), bytes]() mutable {
    inbox_.leave(bytes);
    if (failure()) return;
    run([&] { handle_data(from, tag, std::move(payload)); });
    advance();
  });
}

void Group::handle_data(int from, const transport::Tag& tag, Payload payload) {
  if ((tag.sequence & kPointToPointBit) != 0) return point_to_point_->on_data(from, tag, std::move(payload));
  const std::uint64_t next = current_ ? current_->sequence : finished_;
  if (!current_ || tag.sequence > next) {
    if (tag.sequence < next) return;
    auto& early = early_[tag.sequence];
    auto& bytes = peers_[static_cast<std::size_t>(from)].early_bytes;
    bytes += charge_of(payload.size());
    if (bytes > 2 * kAllowance) {
      throw Error(ErrorKind::protocol, "rank " + std::to_string(from) + " sends far ahead of what it may");
    }
    early.push_back({from, tag, std::move(payload)});
    return;
  }
  if (tag.sequence < next) return;
  if (tag.signature != current_->signature) {
    // The announcement of that call comes on another lane, with its name.
    if (mismatch_until_ == kNever) {
      mismatch_until_ = after(Clock::now(), kNameFollows);
      mismatch_from_ = from;
      watch_deadlines();
    }
    return;
  }
  try {
    current_->execution->on_data(from, tag, std::move(payload));
  } catch (const Error& error) {
    throw Error(error.kind(), "rank " + std::to_string(from) + ": " + error.what());
  }
}

void Group::on_control(int from, Payload payload) {
  const std::size_t bytes = payload.size();
  if (!inbox_.enter(bytes)) return;
  post([this, from, payload = std::move(payload), bytes] {
    inbox_.leave(bytes);
    run([&] {
      try {
        handle_message(from, decode_message(payload.bytes()));
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::protocol) throw;
        throw Error(error.kind(), "rank " + std::to_string(from) + " sent a bad message: " + error.what());
      }
    });
    advance();
  });
}

void Group::handle_message(int from, const Message& message) {
  if (const auto failed = failure()) {
    // Whoever still turns to this rank has not heard of it.
    const bool asks =
        message.kind == MessageKind::call || message.kind == MessageKind::offer || message.kind == MessageKind::arrive;
    if (asks && !closed_) tell_failure(from, *failed);
    return;
  }
  switch (message.kind) {
    case MessageKind::call: return handle_call(from, message);
    case MessageKind::abort:
      // Each rank passes the news on once, so it reaches ranks that have no link to the one who saw it.
      return fail(Error(ErrorKind::peer_gone, message.text + " (reported by rank " + std::to_string(from) + ")"), true);
    case MessageKind::offer: return point_to_point_->on_offer(from, message);
    case MessageKind::grant: return point_to_point_->on_grant(from, message);
    case MessageKind::arrive: return monitored_barrier_->on_arrive(from, message);
    case MessageKind::verdict: return monitored_barrier_->on_verdict(from, message);
  }
}

void Group::handle_call(int from, const Message& message) {
  Peer& entry = peers_[static_cast<std::size_t>(from)];
  entry.announced = std::max(entry.announced, message.sequence + 1);
  // What was sent ahead for this operation is expected now; what is ahead of it still counts.
  for (auto one = entry.ahead.begin(); one != entry.ahead.end() && one->first < entry.announced;) {
    entry.allowance_used -= one->second;
    one = entry.ahead.erase(one);
  }
  const Announced announced{message.text, message.bytes};
  const std::uint64_t next = current_ ? current_->sequence : finished_;
  if (current_ && message.sequence == next) {
    compare(from, next, current_->call, announced);
  } else if (message.sequence >= next) {
    if (entry.calls.size() >= kMostCallsAhead) {
      throw Error(ErrorKind::protocol, "rank " + std::to_string(from) + " announces far ahead of what it may");
    }
    entry.calls.emplace(message.sequence, announced);
  } else if (const auto past = history_.find(message.sequence); past != history_.end()) {
    // This rank had nothing to wait for, so it was done before the other's word came.
    compare(from, message.sequence, past->second, announced);
  }
  if (!failure()) release_held(from);
}

void Group::compare(int from, std::uint64_t sequence, const Past& mine, const Announced& theirs) const {
  const auto number = "#" + std::to_string(sequence);
  const auto us = "rank " + std::to_string(rank_);
  const auto them = "rank " + std::to_string(from);
  if (theirs.text != mine.description) {
    throw Error(ErrorKind::mismatch, "the ranks disagree about collective " + number + ": " + us + " called " +
                                         mine.description + ", " + them + " called " + theirs.text);
  }
  const std::uint64_t expected = mine.amounts.empty() ? 0 : mine.amounts[static_cast<std::size_t>(from)];
  if (theirs.amount == expected) return;
  throw Error(ErrorKind::mismatch, "the ranks disagree about " + title_of(sequence, mine.description) + ": " + them +
                                       " sends " + std::to_string(theirs.amount) + " elements to " + us +
                                       ", which expects " + std::to_string(expected));
}

}  // namespace torch_iroh::collective
