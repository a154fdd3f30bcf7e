// How a group breaks: deadlines, lost ranks, the one first cause, and the words in which everyone hears of it.
#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "collective/failure_text.hpp"
#include "collective/group.hpp"
#include "collective/planner.hpp"

namespace torch_iroh::collective {
namespace {

// Once is enough on a long way.
std::string without_reporter(const std::string& text) {
  return text.substr(0, text.find(" (reported by "));
}

}  // namespace

bool Group::alone() const {
  for (int peer = 0; peer < world_; ++peer) {
    if (peer != rank_ && !peers_[static_cast<std::size_t>(peer)].lost) return false;
  }
  return true;
}

Error Group::gone(int peer) const {
  const Error& why = *peers_[static_cast<std::size_t>(peer)].lost;
  return {why.kind(), "rank " + std::to_string(peer) + " is gone: " + why.what()};
}

void Group::on_lost(int rank, bool left, const Error& cause) {
  post([this, rank, left, cause] {
    Peer& entry = peers_[static_cast<std::size_t>(rank)];
    if (entry.lost) return;
    entry.lost = cause;
    entry.left = left;
    const auto unsure = std::exchange(entry.unsure, {});
    if (left) {
      for (const auto& sent : unsure) run(sent);
    }
    if (const std::size_t dropped = point_to_point_->drop_kept(rank); dropped > 0 && !failure()) {
      log(LogLevel::warn, "rank " + std::to_string(rank_) + ": " + std::to_string(dropped) + " messages that rank " +
                              std::to_string(rank) + " never received are dropped: " + gone(rank).what());
    }
    monitored_barrier_->on_lost(rank, gone(rank));
    const bool needed = (current_ && current_->execution->waits_for(rank)) || point_to_point_->waits_for(rank) ||
                        (alone() && point_to_point_->waits_for(kAnyone));
    // A rank that said goodbye had all it needed; it is missed only by an operation that waits for it.
    if (left && !needed) return advance();
    if (!closed_) fail(Error(cause.kind(), "rank " + std::to_string(rank) + " is gone: " + cause.what()), true);
  });
}

void Group::abort(const Error& cause) {
  post([this, cause] { fail(cause, true); });
}

void Group::fail(const Error& given, bool tell_others) {
  const bool late = given.kind() == ErrorKind::timeout && current_;
  std::string more;
  if (late) more = waiting_text();
  if (host_ && given.kind() == ErrorKind::timeout) more = host_->waiting_text();
  const Error cause(given.kind(), given.what() + more);
  fail(cause, tell_others,
       late ? Error(cause.kind(), title_of(current_->sequence, current_->call.description) + ": " + cause.what())
            : cause);
}

void Group::fail(const Error& cause, bool tell_others, const Error& news) {
  {
    const std::lock_guard lock(shared_mutex_);
    if (failure_) return;
    failure_ = cause;
  }
  if (!closed_) log(LogLevel::info, explain(cause, "group " + options_.name).what());
  if (tell_others) {
    for (int peer = 0; peer < world_; ++peer) {
      if (peer != rank_ && transport_->connected(peer)) tell_failure(peer, news);
    }
  }
  if (host_) {
    // Also what others told: whoever reads this rank's memory learns from it alone that the memory was given back.
    const bool leaves = closed_ && !tell_others;
    host_->fail(cause, leaves ? "" : without_reporter(news.what()));
  }
  std::vector<std::pair<Done, Error>> ended;
  if (current_) {
    ended.emplace_back(std::move(current_->done),
                       explain(cause, title_of(current_->sequence, current_->call.description)));
    current_->execution->abandon();
    current_.reset();
  }
  for (Queued& queued : queue_) {
    ended.emplace_back(std::move(queued.call.done), explain(cause, title_of(queued.sequence, describe(queued.call))));
  }
  queue_.clear();
  early_.clear();
  for (Peer& peer : peers_) peer.held.clear();
  for (const auto& [done, error] : ended) {
    done(&error);
    count_in_flight(-1);
  }
  point_to_point_->fail([&](const std::string& what) { return explain(cause, what); });
  monitored_barrier_->fail(explain(cause, "monitored_barrier"));
  if (failure_listener_) failure_listener_(cause);
  idle_.notify_all();
}

void Group::tell_failure(int peer, const Error& cause) {
  Peer& entry = peers_[static_cast<std::size_t>(peer)];
  if (entry.lost || std::exchange(entry.told, true)) return;
  Message news{.kind = MessageKind::abort};
  news.text = without_reporter(cause.what());
  transport_->send_control(peer, encode(news));
}

Error Group::explain(const Error& cause, const std::string& what) const {
  return collective::explain(cause, rank_, what);
}

std::string Group::waiting_text() const {
  const auto waiting = current_->execution->waiting_for();
  std::vector<int> silent;
  for (const int rank : waiting) {
    if (peers_[static_cast<std::size_t>(rank)].announced <= current_->sequence) silent.push_back(rank);
  }
  return still_waiting_for(waiting, silent);
}

std::optional<Error> Group::failure() const {
  const std::lock_guard lock(shared_mutex_);
  return failure_;
}

void Group::watch_deadlines() {
  TimePoint next = std::min({point_to_point_->next_deadline(), monitored_barrier_->next_deadline(), mismatch_until_});
  if (current_) next = std::min(next, current_->deadline);
  if (waits_for_memory()) next = std::min(next, queue_.front().deadline);
  if (next >= timer_at_) return;  // an earlier timer looks again when it fires
  timer_at_ = next;
  workers().at(next, [weak = weak_from_this(), next] {
    if (const auto self = weak.lock()) {
      self->post([self = self.get(), next] {
        if (self->timer_at_ != next) return;
        self->timer_at_ = kNever;
        self->on_deadline();
      });
    }
  });
}

void Group::on_deadline() {
  if (failure()) return;
  const TimePoint now = Clock::now();
  if (mismatch_until_ <= now) {
    return fail(Error(ErrorKind::mismatch,
                      "rank " + std::to_string(mismatch_from_) + " called another operation than " +
                          (current_ ? current_->call.description : "this rank") + " (its name did not arrive)"),
                true);
  }
  monitored_barrier_->expire(now);
  if (waits_for_memory() && queue_.front().deadline <= now) {
    return fail(Error(ErrorKind::timeout,
                      timed_out(queue_.front().call.timeout, rank_) +
                          (queue_.front().call.part_of.empty() ? ", whose device has not handed over its data"
                                                               : ", whose part inside this host is not done")),
                true);
  }
  if (current_ && current_->deadline <= now) {
    return fail(Error(ErrorKind::timeout, timed_out(current_->timeout, rank_)), true);
  }
  if (const auto overdue = point_to_point_->overdue(now)) {
    return fail(Error(ErrorKind::timeout, "rank " + std::to_string(rank_) + ": " + *overdue + ": timed out"), true);
  }
  watch_deadlines();
}

}  // namespace torch_iroh::collective
