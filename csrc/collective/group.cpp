#include "collective/group.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "base/rank_text.hpp"
#include "collective/planner.hpp"

namespace torch_iroh::collective {
namespace {

// What one rank may send to another ahead of its announcement: enough for small operations to need no round trip.
constexpr std::uint64_t kAllowance = 1 << 20;
// Chunks of a foreign operation overtake its announcement by less than this, or something else is wrong.
constexpr Duration kNameFollows = milliseconds(1000);
// So many finished operations are remembered, to compare late announcements with.
constexpr std::size_t kHistory = 256;
// A rank gets ahead of another by operations that need nothing of it; each counts as this many bytes at least.
constexpr std::uint64_t kLeastCharge = 256;
constexpr std::size_t kMostCallsAhead = 8192;
constexpr Duration kFinishGrace = milliseconds(500);
constexpr Duration kLinger = milliseconds(60000);
// When the group is broken: enough to tell the others why.
constexpr Duration kFarewell = milliseconds(500);
constexpr int kAnyone = -1;

// Nothing to move on any rank, as every rank knows. Such a call still waits for all: else a rank that meant another
// call would be left alone with it.
bool is_empty(const Request& request) {
  if (request.op == Op::barrier || request.op == Op::all_to_all) return false;
  const auto empty = [](std::uint64_t block) { return block == 0; };
  return request.count == 0 && std::all_of(request.blocks.begin(), request.blocks.end(), empty);
}

Request empty_request(const Request& request) {
  Request barrier;
  barrier.rank = request.rank;
  barrier.world = request.world;
  return barrier;
}

// Gloo begins so, and programs look for it.
std::string timed_out(Duration limit, int rank) {
  return "Timed out waiting " + whole_milliseconds(limit) + "ms on rank " + std::to_string(rank);
}

}  // namespace

std::shared_ptr<Group> Group::make(std::shared_ptr<transport::Transport> transport, const GroupOptions& options) {
  std::shared_ptr<Group> group(new Group(std::move(transport), options));
  group->transport_->start(*group);
  return group;
}

Group::Group(std::shared_ptr<transport::Transport> transport, const GroupOptions& options)
    : transport_(std::move(transport)),
      options_(options),
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

Group::~Group() {
  transport_->close({});
}

void Group::post(Task task) {
  auto self = weak_from_this().lock();
  if (!self) return;  // a group that is being destroyed has nobody left to tell
  const auto strand = strand_;
  // The reference goes along: dropped here it could be the last, and the destructor would wait for this very call.
  strand->post([self = std::move(self), task = std::move(task)] { task(); });
}

std::uint64_t Group::submit(CollectiveCall call) {
  const TimePoint deadline = after(Clock::now(), call.timeout);
  const std::lock_guard lock(submit_mutex_);
  const std::uint64_t sequence = submitted_++;
  count_in_flight(1);
  call.request.rank = rank_;
  call.request.world = world_;
  call.request.algorithm = choose_algorithm(call.request, size_of(call.work.dtype), options_.algorithm);
  auto queued = std::make_shared<Queued>(Queued{sequence, std::move(call), deadline});
  post([this, queued] {
    queue_.push_back(std::move(*queued));
    advance();
  });
  return sequence;
}

void Group::release(std::uint64_t sequence) {
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
  post([this, call = counted(std::move(call))]() mutable {
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
  post([this, call = counted(std::move(call))]() mutable {
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

void Group::caller_waits_for_send(std::uint64_t id) {
  post([this, id] {
    if (!failure()) point_to_point_->caller_waits(id);
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
      call.request.algorithm = choose_algorithm(call.request, size_of(call.work.dtype), options_.algorithm);
    }
    description = describe(call);
    signature = signature_of(description);
    execution = std::make_shared<Execution>(
        is_empty(request) ? empty_request(request) : request, call.work, options_.chunk_bytes, queued.sequence,
        signature,
        [this](int peer, const transport::Tag& tag, std::span<const std::byte> bytes, std::function<void()> sent) {
          send_chunk(peer, tag, bytes, std::move(sent));
        });
  } catch (const std::exception& refused) {
    // The others may have begun it already: the group cannot go on without this rank.
    queue_.push_front(std::move(queued));
    return fail(Error(ErrorKind::invalid, description + ": " + refused.what()), true);
  }
  Past past{description, {}};
  if (request.op == Op::all_to_all) past.amounts = request.blocks;
  current_.emplace(Running{queued.sequence, std::move(past), signature, call.timeout, queued.deadline, execution,
                           std::move(call.done)});
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
        peers_[static_cast<std::size_t>(one.from)].early_bytes -= one.payload.size();
        if (current_) handle_data(one.from, one.tag, std::move(one.payload));
      }
    }
    for (const int peer : execution->peers()) {
      if (current_ && peers_[static_cast<std::size_t>(peer)].lost && execution->waits_for(peer)) throw gone(peer);
    }
  });
}

void Group::announce(std::uint64_t sequence, const Request& request, const std::string& description,
                     const Execution& execution) {
  std::vector<bool> needed(static_cast<std::size_t>(world_));
  for (const int peer : execution.peers()) needed[static_cast<std::size_t>(peer)] = true;
  // Two ranks of an all_to_all that have nothing for each other must agree on that too.
  const bool everyone = request.op == Op::all_to_all;
  Message announcement{.kind = MessageKind::call};
  announcement.sequence = sequence;
  announcement.text = description;
  for (int peer = 0; peer < world_; ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    const Peer& entry = peers_[index];
    // A rank that said goodbye may have sent already all that this operation needs of it.
    if (needed[index] && entry.lost && (!entry.left || execution.sends_to(peer))) throw gone(peer);
    if (peer == rank_ || entry.lost || !(needed[index] || everyone)) continue;
    if (everyone) announcement.bytes = request.send_blocks[index];
    transport_->send_control(peer, encode(announcement));
  }
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

void Group::send_chunk(int peer, const transport::Tag& tag, std::span<const std::byte> bytes,
                       std::function<void()> sent) {
  // `sent` holds the execution, and with it the memory, until the transport has let go of it.
  auto done = [weak = weak_from_this(), sent = std::move(sent)](Result<Nothing> result) mutable {
    const auto self = weak.lock();
    if (!self || !result.ok()) return;  // on_lost tells why
    self->post([self = self.get(), sent = std::move(sent)] {
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
  const std::uint64_t charge = std::max<std::uint64_t>(bytes, kLeastCharge);
  if (peer.allowance_used + charge > kAllowance) return false;
  peer.allowance_used += charge;
  peer.ahead[sequence] += charge;
  return true;
}

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
    bytes += payload.size();
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

void Group::end_current() {
  const Done done = std::move(current_->done);
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

void Group::on_lost(int rank, bool left, const Error& cause) {
  post([this, rank, left, cause] {
    Peer& entry = peers_[static_cast<std::size_t>(rank)];
    if (entry.lost) return;
    entry.lost = cause;
    entry.left = left;
    const bool needed = (current_ && current_->execution->waits_for(rank)) || point_to_point_->waits_for(rank) ||
                        (alone() && point_to_point_->waits_for(kAnyone));
    // A rank that said goodbye had all it needed; it is missed only by an operation that waits for it.
    if (left && !needed) return;
    if (!closed_) fail(Error(cause.kind(), "rank " + std::to_string(rank) + " is gone: " + cause.what()), true);
  });
}

void Group::abort(const Error& cause) {
  post([this, cause] { fail(cause, true); });
}

void Group::fail(const Error& given, bool tell_others) {
  const bool late = given.kind() == ErrorKind::timeout && current_;
  const Error cause(given.kind(), given.what() + (late ? waiting_text() : ""));
  {
    const std::lock_guard lock(shared_mutex_);
    if (failure_) return;
    failure_ = cause;
  }
  if (!closed_) log(LogLevel::info, explain(cause, "group " + options_.name).what());
  if (tell_others) {
    const Error news =
        late ? Error(cause.kind(), title_of(current_->sequence, current_->call.description) + ": " + cause.what())
             : cause;
    for (int peer = 0; peer < world_; ++peer) {
      if (peer != rank_ && transport_->connected(peer)) tell_failure(peer, news);
    }
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
  idle_.notify_all();
}

void Group::tell_failure(int peer, const Error& cause) {
  Peer& entry = peers_[static_cast<std::size_t>(peer)];
  if (entry.lost || std::exchange(entry.told, true)) return;
  Message news{.kind = MessageKind::abort};
  news.text = cause.what();
  news.text = news.text.substr(0, news.text.find(" (reported by "));  // once is enough on a long way
  transport_->send_control(peer, encode(news));
}

std::string Group::title_of(std::uint64_t sequence, const std::string& description) const {
  const auto name = description.substr(0, description.find('('));
  return name + " #" + std::to_string(sequence) + description.substr(name.size());
}

Error Group::explain(const Error& cause, const std::string& what) const {
  // News of a time-out elsewhere may begin with this very operation.
  const std::string text = cause.what();
  return {cause.kind(), "rank " + std::to_string(rank_) + ": " + (text.starts_with(what) ? "" : what + ": ") + text};
}

std::string Group::waiting_text() const {
  const auto waiting = current_->execution->waiting_for();
  if (waiting.empty()) return "";
  std::vector<int> silent;
  for (const int rank : waiting) {
    if (peers_[static_cast<std::size_t>(rank)].announced <= current_->sequence) silent.push_back(rank);
  }
  std::string text = "; still waiting for " + ranks_text(waiting);
  if (!silent.empty()) text += " (" + ranks_text(silent) + " never began this operation)";
  return text;
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
                      timed_out(queue_.front().call.timeout, rank_) + ", whose device has not handed over its data"),
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

void Group::shutdown() {
  bool healthy = false;
  bool idle = false;
  {
    std::unique_lock lock(shared_mutex_);
    if (!failure_) idle_.wait_for(lock, kFinishGrace, [&] { return in_flight_ == 0 || failure_; });
    // Messages whose callers have gone on are still owed to their receivers.
    if (!failure_) idle_.wait_for(lock, kLinger, [&] { return kept_messages_ == 0 || failure_; });
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
  inbox_.close();
  transport_->close(healthy ? kLinger : kFarewell);
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
  stats.peers = transport_->stats();
  return stats;
}

}  // namespace torch_iroh::collective
