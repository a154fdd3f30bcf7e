// The life of a group: what is submitted, what begins and ends, and leaving. What comes in and goes out is in
// group_traffic.cpp, how it breaks in group_failure.cpp.
#include "collective/group.hpp"

#include <algorithm>
#include <utility>

#include "collective/failure_text.hpp"
#include "collective/planner.hpp"

namespace torch_iroh::collective {
namespace {

// So many finished operations are remembered, to compare late announcements with.
constexpr std::size_t kHistory = 256;
constexpr Duration kFinishGrace = milliseconds(500);
// When the group is broken: enough to tell the others why.
constexpr Duration kFarewell = milliseconds(500);

}  // namespace

std::shared_ptr<Group> Group::make(std::shared_ptr<transport::Transport> transport, const GroupOptions& options,
                                   std::shared_ptr<transport::HostTeam> team) {
  std::shared_ptr<Group> group(new Group(std::move(transport), options));
  if (team) group->share_memory(std::move(team));
  group->transport_->start(*group);
  return group;
}

Group::Group(std::shared_ptr<transport::Transport> transport, const GroupOptions& options)
    : transport_(std::move(transport)),
      options_(options),
      chooser_(options.pins, options.costs, options.chunk_bytes),
      rank_(transport_->rank()),
      world_(transport_->world()),
      strand_(std::make_shared<Strand>(workers())),
      inbox_(transport_->may_wait_for_receiver()),
      peers_(static_cast<std::size_t>(world_)) {
  PointToPoint::Group hooks;
  hooks.tell = [this](int peer, const Message& message) { transport_->send_control(peer, encode(message)); };
  hooks.transmit = [this](int peer, const transport::Tag& tag, std::span<const std::byte> bytes,
                          std::function<void()> sent) {
    transmit(peer, tag, bytes, [weak = weak_from_this(), sent = std::move(sent)](Result<Nothing> result) {
      const auto self = weak.lock();
      if (self && result.ok()) self->post(sent);
    });
  };
  hooks.count_kept = [this](int change) {
    {
      const std::lock_guard lock(shared_mutex_);
      kept_messages_ += change;
    }
    idle_.notify_all();
  };
  hooks.fail = [this](const Error& cause) { fail(cause, true); };
  hooks.chunk_bytes = options_.chunk_bytes;
  monitored_barrier_ = std::make_unique<MonitoredBarrier>(rank_, world_, hooks.tell);
  point_to_point_ = std::make_unique<PointToPoint>(rank_, world_, std::move(hooks));
}

void Group::share_memory(std::shared_ptr<transport::HostTeam> team) {
  HostQueue::Hooks hooks;
  hooks.fail = [weak = weak_from_this()](const Error& cause, const std::string& news) {
    const auto self = weak.lock();
    if (!self) return;
    self->post([self = self.get(), cause, news = Error(cause.kind(), news)] { self->fail(cause, true, news); });
  };
  hooks.ended = [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    {
      const std::lock_guard lock(self->shared_mutex_);
      ++self->finished_;
    }
    self->count_in_flight(-1);
  };
  host_ = std::make_shared<HostQueue>(std::move(team), options_.peer_timeout, std::move(hooks));
}

Group::~Group() {
  if (host_) host_->leave();
  transport_->close({});
}

void Group::post(Task task) {
  auto self = weak_from_this().lock();
  if (!self) return;  // a group that is being destroyed has nobody left to tell
  const auto strand = strand_;
  // The reference goes along: dropped here it could be the last, and the destructor would wait for this very call.
  strand->post([self = std::move(self), task = std::move(task)] { task(); });
}

// For calls of the group's owner, whose thread is as good as another.
void Group::run_or_post(Task task) {
  strand_->run([self = shared_from_this(), task = std::move(task)] { task(); });
}

std::uint64_t Group::submit(CollectiveCall call) {
  const TimePoint deadline = after(Clock::now(), call.timeout);
  const bool drives = call.drives && !call.held;
  std::unique_lock lock(submit_mutex_);
  const std::uint64_t sequence = submitted_++;
  count_in_flight(1);
  call.request.rank = rank_;
  call.request.world = world_;
  if (host_) {
    host_->push(sequence, std::move(call), deadline);
    lock.unlock();
    drives ? host_->drive(sequence) : host_->attend();
    return sequence;
  }
  if (!call.request.hierarchy && !call.request.members) call.request.hierarchy = options_.hierarchy;
  chooser_.choose(call);
  auto queued = std::make_shared<Queued>(Queued{sequence, std::move(call), deadline});
  const bool begins = strand_->enqueue([this, self = shared_from_this(), queued] {
    queue_.push_back(std::move(*queued));
    advance();
  });
  lock.unlock();
  if (begins) drives ? strand_->drain() : strand_->schedule();
  return sequence;
}

void Group::release(std::uint64_t sequence) {
  if (host_) return host_->release(sequence);
  post([this, sequence] {
    for (Queued& queued : queue_) {
      if (queued.sequence == sequence) queued.call.held = false;
    }
    advance();
  });
}

void Group::monitored_barrier(MonitoredBarrierCall call) {
  count_in_flight(1);
  call.done = [this, done = std::move(call.done)](const Error* error) {
    done(error);
    count_in_flight(-1);
  };
  post([this, call = std::move(call)]() mutable {
    if (const auto failed = failure()) {
      const Error error = explain(*failed, "monitored_barrier");
      return call.done(&error);
    }
    monitored_barrier_->begin(std::move(call));
    for (int peer = 0; peer < world_; ++peer) {
      if (peers_[static_cast<std::size_t>(peer)].lost) monitored_barrier_->on_lost(peer, gone(peer));
    }
    watch_deadlines();
  });
}

PointToPointCall Group::counted(PointToPointCall call) {
  count_in_flight(1);
  call.done = [this, done = std::move(call.done)](const Error* error, int source) {
    done(error, source);
    count_in_flight(-1);
  };
  return call;
}

void Group::send(PointToPointCall call) {
  run_or_post([this, call = counted(std::move(call))]() mutable {
    if (const auto failed = failure()) {
      const Error error = explain(*failed, "send");
      return call.done(&error, -1);
    }
    if (peers_[static_cast<std::size_t>(call.peer)].lost) {
      const Error error = gone(call.peer);
      call.done(&error, -1);
      return fail(error, true);
    }
    point_to_point_->send(std::move(call));
    watch_deadlines();
  });
}

void Group::recv(PointToPointCall call) {
  run_or_post([this, call = counted(std::move(call))]() mutable {
    if (const auto failed = failure()) {
      const Error error = explain(*failed, "recv");
      return call.done(&error, -1);
    }
    const int peer = call.peer;
    if (peer >= 0) transport_->connect(peer);  // a peer that dies before its first word must be noticed
    for (int i = 0; peer < 0 && i < world_; ++i) {
      if (i != rank_) transport_->connect(i);
    }
    point_to_point_->recv(std::move(call));
    if (peer >= 0 && peers_[static_cast<std::size_t>(peer)].lost && point_to_point_->waits_for(peer)) {
      return fail(gone(peer), true);
    }
    if (peer < 0 && world_ > 1 && alone() && point_to_point_->waits_for(kAnyone)) {
      return fail(gone(rank_ == 0 ? 1 : 0), true);
    }
    watch_deadlines();
  });
}

void Group::caller_waits_for_send(int peer, std::uint64_t id) {
  run_or_post([this, peer, id] {
    if (!failure()) run([&] { point_to_point_->caller_waits(peer, id); });
  });
}

void Group::connect(int peer) {
  transport_->connect(peer);
}

void Group::on_failure(std::function<void(const Error&)> listener) {
  post([this, listener = std::move(listener)]() mutable {
    failure_listener_ = std::move(listener);
    if (const auto failed = failure()) failure_listener_(*failed);
  });
}

void Group::connect_all() {
  for (int i = 0; i < world_; ++i) {
    if (i != rank_) transport_->connect(i);
  }
}

// Ends what is finished and begins what is next, until there is something to wait for.
void Group::advance() {
  if (std::exchange(advancing_, true)) return;  // the outer call goes on
  for (;;) {
    if (current_ && current_->execution->finished()) {
      end_current();
    } else if (waits_for_memory()) {
      watch_deadlines();
      break;
    } else if (!current_ && !queue_.empty()) {
      Queued next = std::move(queue_.front());
      queue_.pop_front();
      begin(std::move(next));
    } else {
      break;
    }
  }
  advancing_ = false;
}

void Group::begin(Queued queued) {
  CollectiveCall& call = queued.call;
  const Request& request = call.request;
  if (const auto failed = failure()) {
    const Error error = explain(*failed, title_of(queued.sequence, describe(call)));
    call.done(&error);
    return count_in_flight(-1);
  }
  std::string description;
  std::uint32_t signature = 0;
  std::shared_ptr<Execution> execution;
  try {
    if (call.prepare) {
      std::exchange(call.prepare, nullptr)(call);
      chooser_.choose(call);
    }
    description = describe(call);
    signature = signature_of(description);
    execution = std::make_shared<Execution>(
        moves_nothing(request) ? barrier_for(request) : request, call.work, call.chunk_bytes, queued.sequence,
        signature,
        [this](int peer, const transport::Tag& tag, std::span<const std::byte> bytes, std::function<void()> sent) {
          send_chunk(peer, tag, bytes, std::move(sent));
        });
  } catch (const std::exception& refused) {
    // The others may have begun it already: the group cannot go on without this rank.
    queue_.push_front(std::move(queued));
    const auto* known = dynamic_cast<const Error*>(&refused);
    const std::string what = (description.empty() ? "" : description + ": ") + refused.what();
    return fail(Error(known == nullptr ? ErrorKind::invalid : known->kind(), what), true);
  }
  Past past{description, {}};
  if (request.op == Op::all_to_all) past.amounts = amounts_by_rank(request, request.blocks);
  const Choice choice{request.op, request.algorithm, known_bytes(request, size_of(call.work.dtype)).value_or(0),
                      call.predicted_ns};
  current_.emplace(Running{queued.sequence, std::move(past), signature, call.timeout, queued.deadline, execution,
                           std::move(call.done), choice, Clock::now()});
  watch_deadlines();
  run([&] {
    announce(queued.sequence, request, description, *execution);
    for (int peer = 0; peer < world_; ++peer) {
      auto& calls = peers_[static_cast<std::size_t>(peer)].calls;
      const auto theirs = calls.find(queued.sequence);
      if (theirs == calls.end()) continue;
      const Announced announced = std::move(theirs->second);
      calls.erase(theirs);
      compare(peer, queued.sequence, current_->call, announced);
    }
    execution->start();
    const auto early = early_.extract(queued.sequence);
    if (!early.empty()) {
      for (Early& one : early.mapped()) {
        peers_[static_cast<std::size_t>(one.from)].early_bytes -= charge_of(one.payload.size());
        if (current_) handle_data(one.from, one.tag, std::move(one.payload));
      }
    }
    for (const int peer : execution->peers()) {
      if (current_ && peers_[static_cast<std::size_t>(peer)].lost && execution->waits_for(peer)) throw gone(peer);
    }
  });
}

void Group::run(const std::function<void()>& step) {
  try {
    step();
  } catch (const Error& error) {
    fail(error, true);
  } catch (const std::exception& error) {
    fail(Error(ErrorKind::invalid, error.what()), true);
  }
}

void Group::end_current() {
  const Done done = std::move(current_->done);
  ledger_.add(current_->choice, Clock::now() - current_->begun);
  history_.emplace(current_->sequence, std::move(current_->call));
  if (history_.size() > kHistory) history_.erase(history_.begin());
  current_.reset();
  {
    const std::lock_guard lock(shared_mutex_);
    ++finished_;
  }
  done(nullptr);
  count_in_flight(-1);
}

void Group::count_in_flight(int change) {
  const TimePoint now = Clock::now();
  {
    const std::lock_guard lock(shared_mutex_);
    if (in_flight_ == 0 && change > 0) busy_since_ = now;
    in_flight_ += change;
    if (in_flight_ == 0 && change < 0) busy_ += now - busy_since_;
    if (in_flight_ > 0) return;
  }
  idle_.notify_all();
}

void Group::shutdown(Duration linger) {
  bool healthy = false;
  bool idle = false;
  {
    std::unique_lock lock(shared_mutex_);
    if (!failure_) idle_.wait_for(lock, kFinishGrace, [&] { return in_flight_ == 0 || failure_; });
    // Messages whose callers have gone on are still owed to their receivers.
    if (!failure_) idle_.wait_for(lock, linger, [&] { return kept_messages_ == 0 || failure_; });
    idle = in_flight_ == 0;
    healthy = !failure_ && idle;
  }
  post([this, idle] {
    closed_ = true;
    fail(Error(ErrorKind::aborted, "the group was destroyed on rank " + std::to_string(rank_)), !idle);
  });
  {
    // What is in flight has to hear of it before the transport goes away.
    std::unique_lock lock(shared_mutex_);
    idle_.wait_for(lock, kFinishGrace, [&] { return in_flight_ == 0 && failure_; });
  }
  if (host_) {
    host_->leave();
    host_->close();
  }
  inbox_.close();
  transport_->close(healthy ? linger : kFarewell);
}

GroupStats Group::stats() const {
  GroupStats stats;
  {
    const std::lock_guard lock(shared_mutex_);
    stats.collectives = finished_;
    Duration busy = busy_;
    if (in_flight_ > 0) busy += Clock::now() - busy_since_;
    stats.busy_seconds = std::chrono::duration<double>(busy).count();
  }
  stats.plan = options_.pins.text();
  if (options_.costs) stats.network = options_.costs->network();
  stats.choices = ledger_.all();
  stats.peers = transport_->stats();
  return stats;
}

}  // namespace torch_iroh::collective
