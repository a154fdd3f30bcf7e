#include "collective/point_to_point.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace torch_iroh::collective {
namespace {

// What one rank may send to another before a receive is posted there, all messages together.
constexpr std::uint64_t kAllowance = 1 << 20;
constexpr std::size_t kMostOffers = 16384;

}  // namespace

PointToPoint::PointToPoint(int rank, int world, Group group)
    : rank_(rank),
      group_(std::move(group)),
      next_number_(static_cast<std::size_t>(world)),
      allowance_used_(static_cast<std::size_t>(world)),
      early_bytes_(static_cast<std::size_t>(world)) {}

void PointToPoint::send(PointToPointCall call) {
  const auto peer = static_cast<std::size_t>(call.peer);
  const Key key{call.peer, next_number_[peer]++};
  Message offer{.kind = MessageKind::offer};
  offer.sequence = key.second;
  offer.tag = call.tag;
  offer.bytes = call.from.size();
  offer.text = call.what;
  const std::size_t bytes = call.from.size();
  const int to = call.peer;
  Outgoing& outgoing = outgoing_.emplace(key, Outgoing{std::move(call)}).first->second;
  group_.tell(to, offer);
  if (allowance_used_[peer] + bytes <= kAllowance) {
    allowance_used_[peer] += bytes;
    outgoing.counted = true;
    start(key, outgoing);
  }
}

void PointToPoint::start(const Key& key, Outgoing& outgoing) {
  outgoing.started = true;
  const std::span<const std::byte> bytes = outgoing.call.from;
  // An empty message is its offer alone.
  const std::size_t chunks = (bytes.size() + group_.chunk_bytes - 1) / group_.chunk_bytes;
  outgoing.chunks_left = chunks;
  auto sent = [this, key, keep = outgoing.call.keep] {
    const auto found = outgoing_.find(key);
    if (found == outgoing_.end()) return;  // failed meanwhile
    if (found->second.chunks_left > 0 && --found->second.chunks_left > 0) return;
    const auto done = std::move(found->second.call.done);
    if (!found->second.counted) {
      outgoing_.erase(found);
    } else {
      found->second.call = {};  // only the grant is still to come
    }
    if (done) done(nullptr, -1);
  };
  if (chunks == 0) return sent();
  for (std::size_t i = 0; i < chunks; ++i) {
    const std::size_t offset = i * group_.chunk_bytes;
    const transport::Tag tag{kPointToPointBit | key.second, 0, static_cast<std::uint32_t>(i), 0};
    group_.transmit(key.first, tag, bytes.subspan(offset, std::min(group_.chunk_bytes, bytes.size() - offset)), sent);
  }
}

void PointToPoint::on_grant(int from, const Message& grant) {
  const Key key{from, grant.sequence};
  const auto found = outgoing_.find(key);
  if (found == outgoing_.end()) return;
  Outgoing& outgoing = found->second;
  if (!outgoing.started) return start(key, outgoing);
  if (outgoing.counted) {
    outgoing.counted = false;
    allowance_used_[static_cast<std::size_t>(from)] -= grant.bytes;
    if (outgoing.chunks_left == 0) outgoing_.erase(found);
  }
}

void PointToPoint::recv(PointToPointCall call) {
  const auto offer = std::find_if(offers_.begin(), offers_.end(), [&](const auto& one) {
    return (call.peer < 0 || one.first == call.peer) && one.second.tag == call.tag;
  });
  if (offer == offers_.end()) {
    waiting_.push_back(std::move(call));
    return;
  }
  const auto [from, found] = std::move(*offer);
  offers_.erase(offer);
  match(from, found, call);
}

void PointToPoint::on_offer(int from, const Message& message) {
  const Offer offer{message.sequence, message.tag, message.bytes, message.text};
  const auto call = std::find_if(waiting_.begin(), waiting_.end(), [&](const PointToPointCall& one) {
    return (one.peer < 0 || one.peer == from) && one.tag == offer.tag;
  });
  if (call == waiting_.end()) {
    if (offers_.size() >= kMostOffers) {
      return group_.fail(Error(ErrorKind::protocol, "rank " + std::to_string(from) +
                                                        " has offered too many messages (" +
                                                        std::to_string(kMostOffers) + ") that nobody receives"));
    }
    offers_.emplace_back(from, offer);
    return;
  }
  PointToPointCall found = std::move(*call);
  waiting_.erase(call);
  match(from, offer, found);
}

bool PointToPoint::match(int from, const Offer& offer, PointToPointCall& call) {
  if (offer.what != call.what || offer.bytes != call.to.size()) {
    const Error cause(ErrorKind::mismatch, "rank " + std::to_string(from) + " sends (" + offer.what + ") where rank " +
                                               std::to_string(rank_) + " receives (" + call.what + ")");
    waiting_.push_back(std::move(call));  // it fails with the rest
    group_.fail(cause);
    return false;
  }
  const Key key{from, offer.number};
  Message grant{.kind = MessageKind::grant};
  grant.sequence = offer.number;
  grant.bytes = offer.bytes;
  group_.tell(from, grant);
  if (offer.bytes == 0) {
    call.done(nullptr, from);
    return true;
  }
  matched_.emplace(key, Matched{std::move(call), offer.bytes});
  const auto early = early_.extract(key);
  if (!early.empty()) {
    for (const auto& [tag, payload] : early.mapped()) {
      early_bytes_[static_cast<std::size_t>(from)] -= payload.size();
      absorb(key, tag, payload);
    }
  }
  return true;
}

void PointToPoint::on_data(int from, const transport::Tag& tag, Payload payload) {
  const Key key{from, tag.sequence & ~kPointToPointBit};
  if (matched_.contains(key)) return absorb(key, tag, payload);
  auto& bytes = early_bytes_[static_cast<std::size_t>(from)];
  bytes += payload.size();
  if (bytes > 2 * kAllowance) {
    return group_.fail(Error(ErrorKind::protocol, "rank " + std::to_string(from) + " sends ahead of what it may"));
  }
  early_[key].emplace_back(tag, std::move(payload));
}

void PointToPoint::absorb(const Key& key, const transport::Tag& tag, const Payload& payload) {
  const auto found = matched_.find(key);
  if (found == matched_.end()) return;
  Matched& matched = found->second;
  const std::uint64_t offset = std::uint64_t{tag.chunk} * group_.chunk_bytes;
  if (offset + payload.size() > matched.call.to.size() || payload.size() > matched.bytes_left) {
    return group_.fail(Error(ErrorKind::protocol, "rank " + std::to_string(key.first) + " sent more than it offered"));
  }
  std::memcpy(matched.call.to.data() + offset, payload.bytes().data(), payload.size());
  matched.bytes_left -= payload.size();
  if (matched.bytes_left > 0) return;
  const auto done = std::move(matched.call.done);
  matched_.erase(found);
  done(nullptr, key.first);
}

void PointToPoint::fail(const Error& cause) {
  std::vector<PointToPointCall> ended;
  for (auto& [key, outgoing] : outgoing_) ended.push_back(std::move(outgoing.call));
  for (auto& [key, matched] : matched_) ended.push_back(std::move(matched.call));
  for (auto& call : waiting_) ended.push_back(std::move(call));
  outgoing_.clear();
  matched_.clear();
  waiting_.clear();
  offers_.clear();
  early_.clear();
  for (const auto& call : ended) {
    if (call.done) call.done(&cause, -1);
  }
}

bool PointToPoint::waits_for(int rank) const {
  const auto names = [&](const auto& entry) { return entry.first.first == rank; };
  return std::any_of(matched_.begin(), matched_.end(), names) ||
         std::any_of(outgoing_.begin(), outgoing_.end(),
                     [&](const auto& entry) { return names(entry) && entry.second.call.done != nullptr; }) ||
         std::any_of(waiting_.begin(), waiting_.end(), [&](const auto& call) { return call.peer == rank; });
}

TimePoint PointToPoint::next_deadline() const {
  TimePoint next = kNever;
  for (const auto& [key, outgoing] : outgoing_) {
    if (outgoing.call.done) next = std::min(next, outgoing.call.deadline);
  }
  for (const auto& [key, matched] : matched_) next = std::min(next, matched.call.deadline);
  for (const auto& call : waiting_) next = std::min(next, call.deadline);
  return next;
}

std::optional<std::string> PointToPoint::overdue(TimePoint now) const {
  for (const auto& [key, outgoing] : outgoing_) {
    if (outgoing.call.done && outgoing.call.deadline <= now) {
      return "send to rank " + std::to_string(key.first) + " (" + outgoing.call.what + ")";
    }
  }
  for (const auto& [key, matched] : matched_) {
    if (matched.call.deadline <= now) {
      return "recv from rank " + std::to_string(key.first) + " (" + matched.call.what + ")";
    }
  }
  for (const auto& call : waiting_) {
    if (call.deadline > now) continue;
    const std::string peer = call.peer < 0 ? "anyone" : "rank " + std::to_string(call.peer);
    return "recv from " + peer + " (" + call.what + "), which has not sent it";
  }
  return std::nullopt;
}

}  // namespace torch_iroh::collective
