// This process on the network: one endpoint, one link per peer process, and the groups that share them. Lets in only
// peers that one of its groups lists. Knows no collectives: a group is a number, a list of endpoint ids and a sink.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/workers.hpp"
#include "link/acceptor.hpp"
#include "link/link.hpp"
#include "link/reach.hpp"

namespace torch_iroh::link {

struct NodeOptions {
  LinkOptions link;
  std::string bind_addr;  // "ip:port"; empty: every interface, any port
  ReachOptions reach;
  bool operator==(const NodeOptions&) const = default;
};

// What a group hears. Called on polling or worker threads, never with a lock held.
class GroupSink {
 public:
  virtual ~GroupSink() = default;
  virtual void on_frame(const iroh::EndpointId& from, const FrameHeader& header, Payload payload) = 0;
  virtual void on_peer_dead(const iroh::EndpointId& peer, const Error& cause) = 0;
};

class Node : public std::enable_shared_from_this<Node> {
 public:
  // The node of this process, made by the first group and closed when the last one leaves. Blocks while it binds.
  // Throws Error(invalid) when a running node has other options, Error(library) in a forked child.
  static std::shared_ptr<Node> shared(const NodeOptions& options);
  static std::optional<NodeOptions> running_options();
  // For the end of the process: says goodbye to every peer, and waits a moment for it to arrive.
  static void leave_all();

  explicit Node(const NodeOptions& options) : options_(options) {}

  const iroh::EndpointId& id() const { return id_; }
  PeerAddr addr() const;

  // Frames of `group` go to `sink` from now on, whoever sends them; strangers that connect are kept waiting until
  // set_members() says who belongs.
  void join(std::uint64_t group, std::weak_ptr<GroupSink> sink);
  void set_members(std::uint64_t group, const std::vector<PeerAddr>& members);

  std::shared_ptr<Link> link_to(const iroh::EndpointId& peer);       // a live one, made when needed
  std::vector<std::shared_ptr<Link>> links_of(std::uint64_t group);  // those that exist
  bool has_link(const iroh::EndpointId& peer);                       // one that is up or being built

  // Says goodbye on the group's links. The last group to leave closes everything: what was sent is delivered first,
  // as long as its peer is alive and for at most `linger`.
  void leave(std::uint64_t group, Duration linger);

 private:
  struct Group {
    std::weak_ptr<GroupSink> sink;
    std::map<iroh::EndpointId, PeerAddr> members;
    std::map<iroh::EndpointId, iroh::EndpointId> of_standby;  // whose it is
    bool complete = false;
  };
  struct Stranger {
    iroh::Connection connection;
    iroh::EndpointId id;
    TimePoint since;
  };

  static std::shared_ptr<Node> running(const NodeOptions& options);
  void start();
  void bind_standby();
  void on_connected(Result<iroh::Connection> result);
  std::optional<iroh::EndpointId> member_locked(const iroh::EndpointId& id) const;  // whose endpoint it is
  void welcome(const iroh::EndpointId& id, const iroh::Connection& connection);
  void refuse(const iroh::EndpointId& id, const iroh::Connection& connection);
  std::shared_ptr<Link> link_locked(const iroh::EndpointId& peer);
  void on_frame(const iroh::EndpointId& from, const FrameHeader& header, Payload payload);
  void on_dead(const iroh::EndpointId& peer, const Error& cause);
  Duration tick_interval() const;
  void tick();
  void arm_tick();
  void close(Duration linger);

  const NodeOptions options_;
  Endpoints endpoints_;
  std::shared_ptr<Acceptor> acceptor_;
  std::shared_ptr<Reach> reach_;
  iroh::EndpointId id_{};

  std::mutex mutex_;
  std::map<std::uint64_t, Group> groups_;
  std::map<iroh::EndpointId, std::shared_ptr<Link>> links_;
  std::vector<Stranger> strangers_;
  bool closing_ = false;
  TimePoint last_tick_{};
};

}  // namespace torch_iroh::link
