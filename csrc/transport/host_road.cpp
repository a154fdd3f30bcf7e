#include "transport/host_road.hpp"

#include <utility>

namespace torch_iroh::transport {
namespace {

// How often to look whether the ranks that messages are exchanged with still run.
constexpr Duration kLook = milliseconds(250);
// Messages of one rank before the others have their turn.
constexpr int kMostInARow = 64;

}  // namespace

HostRoad::HostRoad(std::shared_ptr<HostTeam> team, Duration peer_timeout)
    : team_(std::move(team)), rank_(team_->rank()), world_(team_->world()), watch_(peer_timeout) {
  for (const int rank : team_->neighbours()) peers_[rank];
}

HostRoad::~HostRoad() {
  close({});
}

void HostRoad::start(Receiver& receiver) {
  gate_.open(receiver);
  {
    const std::lock_guard lock(mutex_);
    started_ = true;
  }
  HostDriver::own().attend(shared_from_this());
}

void HostRoad::send(int peer, const Tag& tag, std::span<const std::byte> bytes, SendDone done) {
  put(peer, {RingKind::data, tag, bytes, std::move(done)});
}

void HostRoad::send_control(int peer, std::vector<std::byte> bytes) {
  const auto kept = std::make_shared<std::vector<std::byte>>(std::move(bytes));
  put(peer, {RingKind::control, {}, *kept, [kept](Result<Nothing>) {}});
}

void HostRoad::put(int rank, Pending message) {
  std::vector<Pending> sent;
  std::optional<Error> refused;
  {
    const std::lock_guard lock(mutex_);
    Peer& peer = peers_.at(rank);
    if (peer.lost || closed_) {
      refused.emplace(ErrorKind::peer_gone, closed_ ? "this rank left the group" : "it is gone");
    } else {
      try {
        watch(rank, peer);
        if (message.kind == RingKind::data) peer.sent_bytes += message.bytes.size();
        if (!peer.out) peer.out = std::make_unique<RingWriter>(team_->line(rank), team_->line_of(rank));
        peer.pending.push_back(std::move(message));
        flush(rank, peer, sent);
      } catch (const Error& error) {
        refused = error;
        if (!peer.pending.empty()) {
          message = std::move(peer.pending.back());
          peer.pending.pop_back();
        }
      }
    }
  }
  for (const Pending& one : sent) one.done(Nothing{});
  if (!refused) return;
  message.done(*refused);
  lose(rank, false, *refused);
}

void HostRoad::flush(int rank, Peer& peer, std::vector<Pending>& sent) {
  const std::uint64_t before = team_->line(rank).put.load();
  while (!peer.pending.empty()) {
    Pending& next = peer.pending.front();
    if (!peer.out->put(next.kind, next.tag, next.bytes, next.sent)) {
      if (peer.out->regained_room()) continue;
      break;
    }
    sent.push_back(std::move(next));
    peer.pending.pop_front();
  }
  if (team_->line(rank).put.load() != before) team_->ring(rank, News::messages);
  if (peer.out->is_opened()) peer.out->close_descriptor();
}

void HostRoad::connect(int peer) {
  const std::lock_guard lock(mutex_);
  if (!closed_) watch(peer, peers_.at(peer));
}

bool HostRoad::connected(int peer) const {
  const std::lock_guard lock(mutex_);
  const Peer& entry = peers_.at(peer);
  return !closed_ && !entry.lost && (entry.watched || team_->line_of(peer).wanted.load() != 0);
}

void HostRoad::watch(int rank, Peer& peer) {
  if (std::exchange(peer.watched, true)) return;
  team_->line(rank).wanted.store(1);
  look_at_ = TimePoint{};
  Doorbell::own().ring(News::messages);
}

std::optional<TimePoint> HostRoad::advance_if_free() {
  const std::unique_lock driving(driving_, std::try_to_lock);
  if (!driving) return std::nullopt;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return std::nullopt;
  }
  bool more = false;
  for (auto& [rank, peer] : peers_) {
    // Said before the last message was looked for: then there are no more.
    const bool parted = team_->parted(rank);
    std::vector<Pending> sent;
    std::optional<Error> failed;
    bool empty = false;
    try {
      empty = receive(rank, peer);
      const std::lock_guard lock(mutex_);
      if (peer.out) flush(rank, peer, sent);
    } catch (const Error& error) {
      // Of a process that ended nothing can be opened any more, which is not what there is to say about it.
      failed = team_->ended(rank) ? Error(ErrorKind::peer_gone, HostWatch::ended_text(*team_, rank)) : error;
    }
    for (const Pending& one : sent) one.done(Nothing{});
    if (failed) {
      lose(rank, false, *failed);
      continue;
    }
    more = more || !empty;
    {
      const std::lock_guard lock(mutex_);
      if (!empty || !parted || !peer.watched) continue;
    }
    lose(rank, true, Error(ErrorKind::peer_gone, "it left the group"));
  }
  delivered_.notify_all();
  look(Clock::now());
  const std::lock_guard lock(mutex_);
  return more ? TimePoint{} : look_at_;
}

bool HostRoad::receive(int rank, Peer& peer) {
  {
    const std::lock_guard lock(mutex_);
    if (peer.lost) return true;
  }
  if (!peer.in) {
    const HostLine& theirs = team_->line_of(rank);
    if (theirs.ring.load() == 0) return true;
    peer.in = std::make_shared<RingReader>(
        team_->pid_of(rank), team_->line(rank), theirs,
        [team = team_.get(), rank] { team->ring(rank, News::messages); }, team_);
    team_->ring(rank, News::messages);  // it may wait for this rank to have opened it
    const std::lock_guard lock(mutex_);
    watch(rank, peer);
  }
  for (int i = 0; i < kMostInARow; ++i) {
    auto message = peer.in->next();
    if (!message) return true;
    deliver(rank, std::move(*message));
  }
  return false;
}

void HostRoad::deliver(int rank, RingReader::Message message) {
  if (message.kind == RingKind::data) {
    const std::lock_guard lock(mutex_);
    peers_.at(rank).received_bytes += message.payload.size();
  }
  gate_.with([&](Receiver& receiver) {
    if (message.kind == RingKind::data) {
      receiver.on_data(rank, message.tag, std::move(message.payload));
    } else {
      receiver.on_control(rank, std::move(message.payload));
    }
  });
}

void HostRoad::look(TimePoint now) {
  std::vector<int> watched;
  {
    const std::lock_guard lock(mutex_);
    if (now < look_at_) return;
    for (const auto& [rank, peer] : peers_) {
      if (peer.watched && !peer.lost) watched.push_back(rank);
    }
    look_at_ = watched.empty() ? kNever : after(now, kLook);
  }
  const auto gone = watch_.look(*team_, watched, now);
  if (!gone) return;
  // What it has said before counts: a last message, or that it left.
  if (!team_->parted(gone->rank)) {
    try {
      while (!receive(gone->rank, peers_.at(gone->rank))) {
      }
    } catch (const Error&) {
      // It ended before its memory was opened, or in the middle of a message.
    }
    lose(gone->rank, false, Error(ErrorKind::peer_gone, gone->why));
  }
  const std::lock_guard lock(mutex_);
  look_at_ = TimePoint{};  // there may be more
}

void HostRoad::lose(int rank, bool left, const Error& cause) {
  std::deque<Pending> dropped;
  {
    const std::lock_guard lock(mutex_);
    Peer& peer = peers_.at(rank);
    if (std::exchange(peer.lost, true)) return;
    dropped.swap(peer.pending);
  }
  for (const Pending& one : dropped) one.done(cause);
  delivered_.notify_all();
  gate_.with([&](Receiver& receiver) { receiver.on_lost(rank, left, cause); });
}

bool HostRoad::all_delivered() const {
  for (const auto& [rank, peer] : peers_) {
    // What a ring holds outlives this rank once its reader has opened it.
    if (!peer.lost && (!peer.pending.empty() || (peer.out && !peer.out->is_opened()))) return false;
  }
  return true;
}

void HostRoad::close(Duration linger) {
  std::vector<Pending> dropped;
  {
    std::unique_lock lock(mutex_);
    if (closed_) return;
    if (started_) delivered_.wait_for(lock, linger, [this] { return all_delivered(); });
    closed_ = true;
    for (auto& [rank, peer] : peers_) {
      for (Pending& one : peer.pending) dropped.push_back(std::move(one));
      peer.pending.clear();
    }
  }
  gate_.close();
  team_->part();
  for (const Pending& one : dropped) one.done(Error(ErrorKind::aborted, "this rank left the group"));
  {
    const std::lock_guard driving(driving_);
    const std::lock_guard lock(mutex_);
    for (auto& [rank, peer] : peers_) {
      peer.out.reset();
      peer.in.reset();
    }
    team_.reset();
  }
  Doorbell::own().ring(News::messages);  // the driver lets go of it
}

std::vector<PeerStats> HostRoad::stats() const {
  const std::lock_guard lock(mutex_);
  std::vector<PeerStats> all;
  for (const auto& [rank, peer] : peers_) {
    all.push_back({rank, "", "shared memory", std::nullopt, peer.sent_bytes, peer.received_bytes});
  }
  return all;
}

}  // namespace torch_iroh::transport
