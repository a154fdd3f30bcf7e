#include "collective/point_to_point.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace torch_iroh::collective {
namespace {

// What one rank may send to another before a receive is posted there, all messages together.
constexpr std::uint64_t kAllowance = 1 << 20;
// Each message counts as this many bytes of it at least.
constexpr std::uint64_t kLeastCharge = 256;
// So many messages may be on offer to one receiver; later ones wait for earlier ones to be received. A receiver bears
// with twice as many.
constexpr std::size_t kMostOffersAhead = 8192;
// Copies of messages whose callers have gone on; one message may be larger by itself.
constexpr std::uint64_t kMostKept = 64 << 20;
constexpr std::uint64_t kLeastKeptCharge = 4096;

std::string title_of_send(const PointToPointCall& call) {
  return "send to rank " + std::to_string(call.peer) + " (" + call.what + ")";
}

std::string title_of_recv(const PointToPointCall& call) {
  const std::string peer = call.peer < 0 ? "anyone" : "rank " + std::to_string(call.peer);
  return "recv from " + peer + " (" + call.what + ")";
}

}  // namespace

PointToPoint::PointToPoint(int rank, int world, Group group)
    : rank_(rank),
      group_(std::move(group)),
      next_number_(static_cast<std::size_t>(world)),
      allowance_used_(static_cast<std::size_t>(world)),
      ungranted_(static_cast<std::size_t>(world)),
      early_bytes_(static_cast<std::size_t>(world)),
      offers_from_(static_cast<std::size_t>(world)) {}

void PointToPoint::send(PointToPointCall call) {
  next_deadline_ = std::min(next_deadline_, call.deadline);
  const int to = call.peer;
  const auto peer = static_cast<std::size_t>(to);
  const Key key{to, next_number_[peer]++};
  Outgoing& outgoing = outgoing_.emplace(key, Outgoing{std::move(call)}).first->second;
  if (ungranted_[peer] < kMostOffersAhead) return offer(key, outgoing);
  unoffered_[to].push_back(key.second);
}

void PointToPoint::caller_waits(int peer, std::uint64_t id) {
  // It is one of the newest, as a rule the last.
  for (auto one = outgoing_.upper_bound(Key{peer, ~std::uint64_t{0}}); one != outgoing_.begin();) {
    --one;
    if (one->first.first != peer) return;
    if (one->second.call.id != id) continue;
    if (one->second.started || !one->second.call.done) return;
    blocked_.push_back(one->first);
    if (!offers_.empty()) keep_copies();
    return;
  }
}

void PointToPoint::keep_copies() {
  std::vector<std::function<void(const Error*, int)>> ended;
  std::erase_if(blocked_, [&](const Key& key) {
    const auto found = outgoing_.find(key);
    if (found == outgoing_.end() || found->second.started || !found->second.call.done) return true;
    PointToPointCall& call = found->second.call;
    const std::uint64_t charge = std::max<std::uint64_t>(call.from.size(), kLeastKeptCharge);
    if (kept_bytes_ > 0 && kept_bytes_ + charge > kMostKept) return false;
    auto copy = std::make_shared<std::vector<std::byte>>(call.from.begin(), call.from.end());
    call.from = *copy;
    call.keep = std::move(copy);
    found->second.kept = charge;
    kept_bytes_ += charge;
    group_.count_kept(1);
    ended.push_back(std::exchange(call.done, nullptr));
    return true;
  });
  for (const auto& done : ended) done(nullptr, -1);
}

void PointToPoint::release_kept(Outgoing& outgoing) {
  if (outgoing.kept == 0) return;
  kept_bytes_ -= std::exchange(outgoing.kept, 0);
  group_.count_kept(-1);
}

std::size_t PointToPoint::drop_kept(int peer) {
  std::size_t dropped = 0;
  for (auto one = outgoing_.begin(); one != outgoing_.end();) {
    const bool drop = one->first.first == peer && one->second.kept > 0;
    if (drop) release_kept(one->second);
    dropped += drop ? 1 : 0;
    one = drop ? outgoing_.erase(one) : std::next(one);
  }
  unoffered_.erase(peer);
  return dropped;
}

void PointToPoint::offer(const Key& key, Outgoing& outgoing) {
  const auto peer = static_cast<std::size_t>(key.first);
  const std::uint64_t charge = std::max<std::uint64_t>(outgoing.call.from.size(), kLeastCharge);
  Message message{.kind = MessageKind::offer};
  message.sequence = key.second;
  message.tag = outgoing.call.tag;
  message.bytes = outgoing.call.from.size();
  message.text = outgoing.call.what;
  ++ungranted_[peer];
  group_.tell(key.first, message);
  if (allowance_used_[peer] + charge > kAllowance) return;
  allowance_used_[peer] += charge;
  outgoing.charge = charge;
  start(key, outgoing);
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
    release_kept(found->second);
    if (!blocked_.empty() && !offers_.empty()) keep_copies();  // there may be room for the next
    if (found->second.charge == 0) {
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
  const auto peer = static_cast<std::size_t>(from);
  const auto found = outgoing_.find(key);
  if (found == outgoing_.end() || found->second.granted) return;
  Outgoing& outgoing = found->second;
  outgoing.granted = true;
  --ungranted_[peer];
  if (!outgoing.started) {
    start(key, outgoing);
  } else if (outgoing.charge > 0) {
    allowance_used_[peer] -= std::exchange(outgoing.charge, 0);
    if (outgoing.chunks_left == 0) outgoing_.erase(found);
  }
  auto& waiting = unoffered_[from];
  while (!waiting.empty() && ungranted_[peer] < kMostOffersAhead) {
    const Key next{from, waiting.front()};
    waiting.pop_front();
    if (const auto one = outgoing_.find(next); one != outgoing_.end()) offer(next, one->second);
  }
}

void PointToPoint::recv(PointToPointCall call) {
  next_deadline_ = std::min(next_deadline_, call.deadline);
  const auto offer = std::find_if(offers_.begin(), offers_.end(), [&](const auto& one) {
    return (call.peer < 0 || one.first == call.peer) && one.second.tag == call.tag;
  });
  if (offer == offers_.end()) {
    waiting_.push_back(std::move(call));
    return;
  }
  const auto [from, found] = std::move(*offer);
  offers_.erase(offer);
  --offers_from_[static_cast<std::size_t>(from)];
  match(from, found, call);
}

void PointToPoint::on_offer(int from, const Message& message) {
  const Offer offer{message.sequence, message.tag, message.bytes, message.text};
  const auto call = std::find_if(waiting_.begin(), waiting_.end(), [&](const PointToPointCall& one) {
    return (one.peer < 0 || one.peer == from) && one.tag == offer.tag;
  });
  if (call == waiting_.end()) {
    auto& open = offers_from_[static_cast<std::size_t>(from)];
    if (open >= 2 * kMostOffersAhead) {
      return group_.fail(Error(ErrorKind::protocol, "rank " + std::to_string(from) + " offers " + std::to_string(open) +
                                                        " messages that nobody receives, more than it may"));
    }
    ++open;
    offers_.emplace_back(from, offer);
    keep_copies();
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

void PointToPoint::fail(const std::function<Error(const std::string& what)>& explain) {
  std::vector<std::pair<PointToPointCall, std::string>> ended;
  const auto end = [&](PointToPointCall& call, const std::string& title) {
    if (call.done) ended.emplace_back(std::move(call), title);
  };
  for (auto& [key, outgoing] : outgoing_) end(outgoing.call, title_of_send(outgoing.call));
  for (auto& [key, matched] : matched_) end(matched.call, title_of_recv(matched.call));
  for (auto& call : waiting_) end(call, title_of_recv(call));
  for (auto& [key, outgoing] : outgoing_) release_kept(outgoing);
  blocked_.clear();
  outgoing_.clear();
  matched_.clear();
  waiting_.clear();
  offers_.clear();
  early_.clear();
  unoffered_.clear();
  for (const auto& [call, title] : ended) {
    const Error error = explain(title);
    call.done(&error, -1);
  }
}

bool PointToPoint::waits_for(int rank) const {
  const auto names = [&](const auto& entry) { return entry.first.first == rank; };
  return std::any_of(matched_.begin(), matched_.end(), names) ||
         std::any_of(outgoing_.begin(), outgoing_.end(),
                     [&](const auto& entry) { return names(entry) && entry.second.call.done != nullptr; }) ||
         std::any_of(waiting_.begin(), waiting_.end(), [&](const auto& call) { return call.peer == rank; });
}

std::optional<std::string> PointToPoint::overdue(TimePoint now) {
  if (now < next_deadline_) return std::nullopt;
  next_deadline_ = kNever;
  for (const auto& [key, outgoing] : outgoing_) {
    if (!outgoing.call.done) continue;
    if (outgoing.call.deadline <= now) return title_of_send(outgoing.call);
    next_deadline_ = std::min(next_deadline_, outgoing.call.deadline);
  }
  for (const auto& [key, matched] : matched_) {
    if (matched.call.deadline <= now) return title_of_recv(matched.call);
    next_deadline_ = std::min(next_deadline_, matched.call.deadline);
  }
  for (const auto& call : waiting_) {
    if (call.deadline <= now) return title_of_recv(call) + ", which has not sent it";
    next_deadline_ = std::min(next_deadline_, call.deadline);
  }
  return std::nullopt;
}

}  // namespace torch_iroh::collective
