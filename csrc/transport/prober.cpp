#include "transport/prober.hpp"

#include <algorithm>
#include <utility>

#include "base/bytes.hpp"
#include "base/rank_text.hpp"

namespace torch_iroh::transport {
namespace {

enum Kind : std::uint8_t { kPing = 1, kPong, kGot, kEnd };

// Apart, because the first come while everyone still connects: the least is to be that of a quiet moment.
constexpr int kEnoughPongs = 8;
constexpr Duration kPause = milliseconds(10);
constexpr Duration kLongEnough = milliseconds(300);  // after the first pong
constexpr Duration kRepeat = milliseconds(100);
constexpr std::size_t kMostPings = 64;  // without an answer

constexpr std::size_t kFlowChunk = 16 << 10;
constexpr std::uint64_t kFlowBytes = 4 << 20;
constexpr Duration kFlowTime = milliseconds(300);
// Ahead of what has come: doubles each round trip, as QUIC's own window does, and leaves a slow link little to clear.
constexpr std::uint64_t kFirstAhead = 64 << 10;
// A flow that brings less than this in its time is a link that nothing is planned for.
constexpr std::size_t kLeastArrivals = 4;

}  // namespace

Prober::Prober(std::shared_ptr<IrohTransport> transport) : transport_(std::move(transport)) {
  transport_->start(*this);
}

Prober::~Prober() {
  transport_->close({});
}

bool Prober::Peer::settled(TimePoint now) const {
  // Far away, or on a busy machine? A little patience tells.
  const bool near = least && *least <= std::chrono::microseconds(kSiteRttUs);
  return (pongs >= kEnoughPongs && near) || (pongs > 0 && now - first_pong >= kLongEnough);
}

void Prober::tell(int rank, std::uint8_t kind, std::uint64_t number) {
  ByteWriter out;
  out.put(kind).put(number);
  transport_->send_control(rank, out.take());
}

void Prober::check_failed() const {
  if (failed_) throw *failed_;
}

std::vector<Prober::Answer> Prober::ask(const std::vector<int>& ranks, TimePoint by) {
  std::unique_lock lock(mutex_);
  peers_.clear();
  for (const int rank : ranks) peers_[rank];
  for (;;) {
    check_failed();
    const TimePoint now = Clock::now();
    std::vector<std::pair<int, std::uint64_t>> due;
    TimePoint next = by;
    bool all = true;
    for (auto& [rank, peer] : peers_) {
      if (peer.settled(now)) continue;
      all = false;
      if (peer.ask_again <= now && peer.pings.size() < kMostPings) {
        peer.pings.emplace(++next_ping_, now);
        due.emplace_back(rank, next_ping_);
        peer.ask_again = now + kRepeat;
      }
      if (peer.pings.size() < kMostPings) next = std::min(next, peer.ask_again);
      if (peer.pongs > 0) next = std::min(next, peer.first_pong + kLongEnough);
    }
    if (all || now >= by) break;
    if (!due.empty()) {
      lock.unlock();
      for (const auto& [rank, number] : due) tell(rank, kPing, number);
      lock.lock();
      continue;
    }
    changed_.wait_until(lock, next);
  }
  std::vector<int> silent;
  std::vector<Answer> answers;
  for (const auto& [rank, peer] : peers_) {
    if (!peer.least) {
      silent.push_back(rank);
      continue;
    }
    const auto us = std::chrono::duration_cast<std::chrono::microseconds>(*peer.least).count();
    answers.push_back({rank, static_cast<std::uint32_t>(us), false});
  }
  peers_.clear();
  lock.unlock();
  if (!silent.empty()) {
    throw Error(ErrorKind::timeout, ranks_text(silent) + " did not answer in time");
  }
  const std::vector<PeerStats> stats = transport_->stats();
  for (Answer& answer : answers) {
    const auto peer =
        std::find_if(stats.begin(), stats.end(), [&](const auto& one) { return one.rank == answer.rank; });
    answer.relayed = peer != stats.end() && peer->path.starts_with("relay");
  }
  return answers;
}

std::uint64_t Prober::exchange_flow(int next, int previous, TimePoint by) {
  const auto chunk = std::make_shared<const std::vector<std::byte>>(kFlowChunk);
  const TimePoint stop = std::min(by, after(Clock::now(), kFlowTime));
  std::uint64_t sent = 0;
  std::unique_lock lock(mutex_);
  while (sent < kFlowBytes && Clock::now() < stop) {
    check_failed();
    if (sent + kFlowChunk > kFirstAhead + 2 * acknowledged_[next]) {
      changed_.wait_until(lock, stop);
      continue;
    }
    lock.unlock();
    sent += kFlowChunk;
    transport_->send(next, {.chunk = static_cast<std::uint32_t>(sent / kFlowChunk)}, *chunk,
                     [chunk](Result<Nothing>) {});
    lock.lock();
  }
  lock.unlock();
  tell(next, kEnd, sent);
  lock.lock();
  const auto complete = [&] {
    const auto total = totals_.find(previous);
    return failed_ || (total != totals_.end() && received_[previous] >= total->second);
  };
  changed_.wait_until(lock, by, complete);
  check_failed();
  const std::vector<Arrival>& arrivals = arrivals_[previous];
  const std::uint64_t rate = arrivals.size() >= kLeastArrivals ? best_rate(arrivals) : 0;
  if (rate == 0) {
    throw Error(ErrorKind::timeout,
                "rank " + std::to_string(previous) + " brought " + std::to_string(received_[previous]) + " bytes only");
  }
  return rate;
}

void Prober::on_data(int from, const Tag&, Payload payload) {
  std::uint64_t received = 0;
  {
    const std::lock_guard lock(mutex_);
    std::vector<Arrival>& arrivals = arrivals_[from];
    // More is not what any rank sends.
    if (arrivals.size() >= kFlowBytes / kFlowChunk || payload.size() > kFlowChunk) return;
    const auto ns = std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
    arrivals.push_back({static_cast<std::uint64_t>(ns), payload.size()});
    received = received_[from] += payload.size();
  }
  changed_.notify_all();
  tell(from, kGot, received);
}

void Prober::on_control(int from, Payload payload) {
  std::uint8_t kind = 0;
  std::uint64_t number = 0;
  try {
    ByteReader in(payload.bytes());
    kind = in.get<std::uint8_t>();
    number = in.get<std::uint64_t>();
  } catch (const Error&) {
    return;  // no probe: its sender will be missing an answer
  }
  if (kind == kPing) return tell(from, kPong, number);
  {
    const std::lock_guard lock(mutex_);
    if (kind == kPong) {
      const auto peer = peers_.find(from);
      if (peer == peers_.end()) return;
      const auto ping = peer->second.pings.find(number);
      if (ping == peer->second.pings.end()) return;
      const TimePoint now = Clock::now();
      const Duration rtt = now - ping->second;
      peer->second.pings.erase(ping);
      peer->second.least = std::min(peer->second.least.value_or(rtt), rtt);
      if (peer->second.pongs++ == 0) peer->second.first_pong = now;
      peer->second.ask_again = now + kPause;
    } else if (kind == kGot) {
      std::uint64_t& acknowledged = acknowledged_[from];
      acknowledged = std::max(acknowledged, std::min(number, kFlowBytes));
    } else if (kind == kEnd) {
      totals_[from] = number;
    }
  }
  changed_.notify_all();
}

void Prober::on_lost(int rank, bool left, const Error& cause) {
  if (left) return;  // it has what it wanted
  {
    const std::lock_guard lock(mutex_);
    if (!failed_) failed_.emplace(ErrorKind::peer_gone, "rank " + std::to_string(rank) + ": " + cause.what());
  }
  changed_.notify_all();
}

}  // namespace torch_iroh::transport
