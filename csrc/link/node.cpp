#include "link/node.hpp"

#include <algorithm>
#include <condition_variable>
#include <utility>

#include "base/log.hpp"
#include "iroh/library.hpp"

namespace torch_iroh::link {
namespace {

constexpr Duration kBindTimeout = milliseconds(10000);
constexpr Duration kTick = milliseconds(100);  // a lane must leave a silent road within 2 s
constexpr Duration kReachTimeout = milliseconds(3000);
constexpr Duration kEndpointCloseTimeout = milliseconds(300);
constexpr Duration kExitLinger = milliseconds(2000);
constexpr Duration kStrangerTimeout = milliseconds(30000);
constexpr std::size_t kMostStrangers = 4096;
constexpr std::uint32_t kCloseNotAMember = 1;
constexpr std::uint32_t kCloseLeft = 0;

// Outlive every Node: the last reference may go away on any thread.
std::mutex& shared_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
std::weak_ptr<Node>& shared_node() {
  static auto* node = new std::weak_ptr<Node>;
  return *node;
}

}  // namespace

// The caller holds the lock of shared_node().
std::shared_ptr<Node> Node::running(const NodeOptions& options) {
  auto node = shared_node().lock();
  if (!node) return nullptr;
  const std::lock_guard lock(node->mutex_);
  if (node->closing_) return nullptr;
  if (node->options_ != options) {
    throw Error(
        ErrorKind::invalid,
        "streams, heartbeat, peer_timeout, connect_timeout, bind, relay and observer are per process: a running "
        "group of this process uses other values. Leave them unset here, or set them in the first group");
  }
  return node;
}

std::shared_ptr<Node> Node::shared(const NodeOptions& options) {
  if (iroh::Library::inherited()) {
    throw Error(ErrorKind::library,
                "this process was forked from one that already used iroh, and iroh's threads stayed in the parent. "
                "Make the first process group after the fork, or start processes with 'spawn'");
  }
  {
    const std::lock_guard lock(shared_mutex());
    if (auto node = running(options)) return node;
  }
  auto mine = std::make_shared<Node>(options);
  mine->start();  // without the lock: it waits for iroh
  std::shared_ptr<Node> chosen;
  {
    const std::lock_guard lock(shared_mutex());
    chosen = running(options);
    if (!chosen) {
      shared_node() = mine;
      chosen = mine;
    }
  }
  if (chosen != mine) mine->close({});  // another thread was faster; ours has met nobody
  return chosen;
}

std::optional<NodeOptions> Node::running_options() {
  const std::lock_guard lock(shared_mutex());
  const auto running = shared_node().lock();
  if (!running) return std::nullopt;
  const std::lock_guard inner(running->mutex_);
  if (running->closing_) return std::nullopt;
  return running->options_;
}

void Node::leave_all() {
  std::shared_ptr<Node> running;
  {
    const std::lock_guard lock(shared_mutex());
    running = shared_node().lock();
  }
  if (!running) return;
  std::vector<std::uint64_t> groups;
  {
    const std::lock_guard lock(running->mutex_);
    for (const auto& [number, group] : running->groups_) groups.push_back(number);
  }
  for (const std::uint64_t group : groups) running->leave(group, kExitLinger);
}

void Node::start() {
  iroh::EndpointOptions options;
  options.alpns = {kAlpn};
  if (!options_.bind_addr.empty()) options.bind_addr = options_.bind_addr;
  options.relays = options_.reach.relays;
  options.public_relays = options_.reach.public_relays;
  endpoints_.main = iroh::Endpoint::bind(options).get(after(Clock::now(), kBindTimeout));
  id_ = endpoints_.main.id();
  if (!options.relays.empty() || options.public_relays) bind_standby();
  reach_ = std::make_shared<Reach>(endpoints_.main, options_.reach);
  reach_->start(after(Clock::now(), kReachTimeout));
  last_tick_ = Clock::now();
  acceptor_ = std::make_shared<Acceptor>([weak = weak_from_this()](Result<iroh::Connection> connection) {
    if (const auto self = weak.lock()) self->on_connected(std::move(connection));
  });
  acceptor_->accept(endpoints_.main);
  if (endpoints_.standby) acceptor_->accept(endpoints_.standby);
  arm_tick();
}

// It has no address but the relay's, so that its connections stay there: those of one endpoint all follow the path that
// iroh has chosen to the peer, also into silence.
void Node::bind_standby() {
  iroh::EndpointOptions options;
  options.alpns = {kAlpn};
  options.bind_addr = "127.0.0.1:0";
  options.relays = options_.reach.relays;
  options.public_relays = options_.reach.public_relays;
  endpoints_.standby = iroh::Endpoint::bind(options).get(after(Clock::now(), kBindTimeout));
}

PeerAddr Node::addr() const {
  PeerAddr addr{endpoints_.main.addr(), std::nullopt};
  if (endpoints_.standby) {
    addr.standby = endpoints_.standby.addr();
    addr.standby->direct.clear();
    // Its own home relay may not be settled yet; that of the main endpoint serves as well.
    if (!addr.standby->relay_url) addr.standby->relay_url = addr.main.relay_url;
    if (!addr.standby->relay_url) addr.standby.reset();
  }
  return addr;
}

void Node::on_connected(Result<iroh::Connection> result) {
  if (!result.ok()) {
    log_once(LogLevel::info, "handshake", std::string("a connection attempt failed: ") + result.error().what());
    return;
  }
  iroh::EndpointId id = result.value().remote_id();
  bool known = false;
  bool wait = false;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, group] : groups_) wait = wait || !group.complete;
    if (const auto member = member_locked(id)) {
      id = *member;
      known = true;
    }
    // While this process leaves, a peer may still have to dial in to say farewell.
    const auto link = links_.find(id);
    known = known || (link != links_.end() && !link->second->is_dead());
    wait = wait && strangers_.size() < kMostStrangers && !closing_;
    if (!known && wait) strangers_.push_back({result.value(), id, Clock::now()});
  }
  if (known) {
    welcome(id, result.value());
  } else if (!wait) {
    refuse(id, result.value());
  }
}

std::optional<iroh::EndpointId> Node::member_locked(const iroh::EndpointId& id) const {
  for (const auto& [number, group] : groups_) {
    if (group.members.contains(id)) return id;
    if (const auto owner = group.of_standby.find(id); owner != group.of_standby.end()) return owner->second;
  }
  return std::nullopt;
}

void Node::welcome(const iroh::EndpointId& id, const iroh::Connection& connection) {
  link_to(id)->adopt(connection);
}

void Node::refuse(const iroh::EndpointId& id, const iroh::Connection& connection) {
  log_once(LogLevel::warn, "stranger " + iroh::to_hex(id),
           "refused a connection from endpoint " + iroh::short_name(id) + ": no group of this process lists it");
  connection.close(kCloseNotAMember, "not a member of any group of this process, or no longer: it may have left");
}

void Node::join(std::uint64_t group, std::weak_ptr<GroupSink> sink) {
  const std::lock_guard lock(mutex_);
  groups_[group].sink = std::move(sink);
}

void Node::set_members(std::uint64_t group, const std::vector<PeerAddr>& members) {
  std::vector<Stranger> welcomed;
  std::vector<Stranger> refused;
  {
    const std::lock_guard lock(mutex_);
    Group& entry = groups_[group];
    for (const auto& member : members) {
      if (member.main.id == id_) continue;
      entry.members.emplace(member.main.id, member);
      if (member.standby) entry.of_standby.emplace(member.standby->id, member.main.id);
    }
    entry.complete = true;
    const bool still_waiting =
        std::any_of(groups_.begin(), groups_.end(), [](const auto& one) { return !one.second.complete; });
    std::vector<Stranger> left;
    for (Stranger& stranger : strangers_) {
      const auto member = member_locked(stranger.id);
      if (member) stranger.id = *member;
      auto& where = member ? welcomed : still_waiting ? left : refused;
      where.push_back(std::move(stranger));
    }
    strangers_ = std::move(left);
  }
  for (const Stranger& one : welcomed) welcome(one.id, one.connection);
  for (const Stranger& one : refused) refuse(one.id, one.connection);
}

std::shared_ptr<Link> Node::link_to(const iroh::EndpointId& peer) {
  const std::lock_guard lock(mutex_);
  return link_locked(peer);
}

std::shared_ptr<Link> Node::link_locked(const iroh::EndpointId& peer) {
  std::shared_ptr<Link>& link = links_[peer];
  if (link && !link->is_dead()) return link;
  PeerAddr addr;
  addr.main.id = peer;
  for (const auto& [number, group] : groups_) {
    const auto member = group.members.find(peer);
    if (member != group.members.end()) addr = member->second;
  }
  Link::Events events;
  events.on_frame = [weak = weak_from_this()](const iroh::EndpointId& from, const FrameHeader& header,
                                              Payload payload) {
    if (const auto node = weak.lock()) node->on_frame(from, header, std::move(payload));
  };
  events.on_dead = [weak = weak_from_this()](const iroh::EndpointId& id, const Error& cause) {
    if (const auto node = weak.lock()) node->on_dead(id, cause);
  };
  link = std::make_shared<Link>(endpoints_, addr, options_.link, std::move(events));
  return link;
}

std::vector<std::shared_ptr<Link>> Node::links_of(std::uint64_t group) {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Link>> links;
  const auto found = groups_.find(group);
  if (found == groups_.end()) return links;
  for (const auto& [id, addr] : found->second.members) {
    const auto link = links_.find(id);
    if (link != links_.end()) links.push_back(link->second);
  }
  return links;
}

bool Node::has_link(const iroh::EndpointId& peer) {
  const std::lock_guard lock(mutex_);
  const auto link = links_.find(peer);
  return link != links_.end() && !link->second->is_dead();
}

void Node::on_frame(const iroh::EndpointId& from, const FrameHeader& header, Payload payload) {
  std::shared_ptr<GroupSink> sink;
  {
    const std::lock_guard lock(mutex_);
    const auto group = groups_.find(header.group);
    if (group == groups_.end()) return;  // a group we have left: what its members still send is of no use
    if (group->second.complete && !group->second.members.contains(from)) return;
    sink = group->second.sink.lock();
  }
  if (sink) sink->on_frame(from, header, std::move(payload));
}

void Node::on_dead(const iroh::EndpointId& peer, const Error& cause) {
  std::vector<std::shared_ptr<GroupSink>> sinks;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, group] : groups_) {
      if (!group.members.contains(peer)) continue;
      if (auto sink = group.sink.lock()) sinks.push_back(std::move(sink));
    }
  }
  for (const auto& sink : sinks) sink->on_peer_dead(peer, cause);
}

// Often enough that a verdict comes at most a sixth of its time-out late.
Duration Node::tick_interval() const {
  return std::min({options_.link.heartbeat, Duration(options_.link.peer_timeout / 6), Duration(kTick)});
}

void Node::arm_tick() {
  const Duration interval = tick_interval();
  workers().at(after(Clock::now(), interval), [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->tick();
  });
}

void Node::tick() {
  const TimePoint now = Clock::now();
  const Duration interval = tick_interval();
  std::vector<std::shared_ptr<Link>> links;
  std::vector<Stranger> expired;
  Duration paused{};
  {
    const std::lock_guard lock(mutex_);
    if (closing_) return;
    // A tick that comes late means this process stood still.
    paused = std::max<Duration>(now - last_tick_ - 2 * interval, Duration::zero());
    last_tick_ = now;
    for (const auto& [id, link] : links_) links.push_back(link);
    const auto old = std::partition(strangers_.begin(), strangers_.end(),
                                    [&](const Stranger& one) { return now - one.since < kStrangerTimeout; });
    std::move(old, strangers_.end(), std::back_inserter(expired));
    strangers_.erase(old, strangers_.end());
  }
  for (const auto& link : links) link->on_tick(now, paused);
  reach_->on_tick(now);
  for (const Stranger& one : expired) refuse(one.id, one.connection);
  arm_tick();
}

void Node::leave(std::uint64_t group, Duration linger) {
  FrameHeader goodbye{.type = FrameType::goodbye};
  goodbye.group = group;
  for (const auto& link : links_of(group)) link->send_everywhere(goodbye);
  bool last = false;
  {
    const std::lock_guard outer(shared_mutex());
    const std::lock_guard lock(mutex_);
    last = groups_.erase(group) == 1 && groups_.empty();
    if (last) closing_ = true;
  }
  if (last) close(linger);
}

void Node::close(Duration linger) {
  std::vector<std::shared_ptr<Link>> links;
  std::vector<Stranger> strangers;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, link] : links_) links.push_back(link);
    strangers.swap(strangers_);
  }
  struct Waiting {
    std::mutex mutex;
    std::condition_variable changed;
    std::size_t left;
  };
  auto waiting = std::make_shared<Waiting>();
  waiting->left = links.size();
  for (const auto& link : links) {
    link->flush([waiting] {
      const std::lock_guard lock(waiting->mutex);
      --waiting->left;
      waiting->changed.notify_all();
    });
  }
  {
    // The links' own verdict ends the wait for a peer that dies meanwhile.
    const TimePoint until = after(Clock::now(), linger);
    std::unique_lock lock(waiting->mutex);
    while (waiting->left > 0 && Clock::now() < until) {
      waiting->changed.wait_for(lock, milliseconds(100));
      lock.unlock();
      for (const auto& link : links) link->on_tick(Clock::now(), {});
      lock.lock();
    }
  }
  for (const auto& link : links) link->kill(Error(ErrorKind::aborted, "this process left"));
  {
    const std::lock_guard lock(mutex_);
    links_.clear();
  }
  for (const Stranger& one : strangers) one.connection.close(kCloseLeft, "left");
  const TimePoint by = after(Clock::now(), kEndpointCloseTimeout);
  for (const iroh::Endpoint& endpoint : {endpoints_.main, endpoints_.standby}) {
    if (!endpoint) continue;
    try {
      endpoint.close().get(by);
    } catch (const Error& error) {
      log(LogLevel::debug, std::string("closing the endpoint: ") + error.what());
    }
  }
}

}  // namespace torch_iroh::link
