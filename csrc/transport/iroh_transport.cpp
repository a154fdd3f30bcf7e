#include "transport/iroh_transport.hpp"

#include <utility>

#include "base/log.hpp"

namespace torch_iroh::transport {
namespace {

// Frames that come before set_members(): peers may send this much each before they know that we have begun.
constexpr std::size_t kMostEarlyBytes = 256 << 20;

}  // namespace

IrohTransport::IrohTransport(std::shared_ptr<link::Node> node, std::uint64_t group, int rank, int world)
    : node_(std::move(node)), group_(group), rank_(rank), world_(world), peers_(static_cast<std::size_t>(world)) {}

std::shared_ptr<IrohTransport> IrohTransport::join(std::shared_ptr<link::Node> node, std::uint64_t group, int rank,
                                                   int world) {
  std::shared_ptr<IrohTransport> transport(new IrohTransport(node, group, rank, world));
  node->join(group, transport);
  return transport;
}

IrohTransport::~IrohTransport() {
  close({});
}

void IrohTransport::set_members(const std::vector<link::PeerAddr>& members, std::uint8_t wire_version) {
  {
    const std::lock_guard lock(mutex_);
    wire_version_ = wire_version;
    for (std::size_t i = 0; i < members.size(); ++i) {
      peers_[i].id = members[i].main.id;
      ranks_.emplace(members[i].main.id, static_cast<int>(i));
    }
  }
  node_->set_members(group_, members);
}

void IrohTransport::start(Receiver& receiver) {
  gate_.open(receiver);
  // Frames may arrive meanwhile: they queue behind the early ones until none is left.
  for (;;) {
    std::vector<Early> early;
    std::vector<std::pair<iroh::EndpointId, Error>> deaths;
    {
      const std::lock_guard lock(mutex_);
      if (early_.empty() && early_deaths_.empty()) {
        early_bytes_ = 0;
        started_ = true;
        return;
      }
      early.swap(early_);
      deaths.swap(early_deaths_);
    }
    for (Early& one : early) deliver(one.from, one.header, std::move(one.payload));
    for (const auto& [id, cause] : deaths) deliver_death(id, cause);
  }
}

std::shared_ptr<link::Link> IrohTransport::link_of(int peer) {
  Peer& entry = peers_.at(static_cast<std::size_t>(peer));
  {
    const std::lock_guard lock(mutex_);
    if (entry.link) return entry.link;
  }
  auto link = node_->link_to(entry.id);
  const std::lock_guard lock(mutex_);
  if (!entry.link) entry.link = std::move(link);
  return entry.link;
}

void IrohTransport::send(int peer, const Tag& tag, std::span<const std::byte> bytes, SendDone done) {
  if (is_lost(peer)) return done(Error(ErrorKind::peer_gone, "it is gone"));
  link::FrameHeader header{.type = link::FrameType::data};
  header.version = wire_version_;
  header.length = static_cast<std::uint32_t>(bytes.size());
  header.group = group_;
  header.sequence = tag.sequence;
  header.message = tag.message;
  header.chunk = tag.chunk;
  header.signature = tag.signature;
  {
    const std::lock_guard lock(mutex_);
    peers_[static_cast<std::size_t>(peer)].sent_bytes += bytes.size();
  }
  link_of(peer)->send_data({header, bytes, std::move(done)});
}

void IrohTransport::send_control(int peer, std::vector<std::byte> bytes) {
  if (is_lost(peer)) return;
  link::FrameHeader header{.type = link::FrameType::control};
  header.version = wire_version_;
  header.length = static_cast<std::uint32_t>(bytes.size());
  header.group = group_;
  const auto kept = std::make_shared<std::vector<std::byte>>(std::move(bytes));
  link_of(peer)->send_control({header, *kept, [kept](Result<Nothing>) {}});
}

void IrohTransport::connect(int peer) {
  if (!is_lost(peer)) link_of(peer)->connect();
}

// Then nobody is there, and a road that were built now would only keep this rank from leaving.
bool IrohTransport::is_lost(int peer) const {
  const std::lock_guard lock(mutex_);
  return peers_[static_cast<std::size_t>(peer)].lost;
}

bool IrohTransport::connected(int peer) const {
  iroh::EndpointId id;
  {
    const std::lock_guard lock(mutex_);
    id = peers_[static_cast<std::size_t>(peer)].id;
  }
  return node_->has_link(id);
}

void IrohTransport::close(Duration linger) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    early_.clear();
  }
  gate_.close();
  node_->leave(group_, linger);
}

std::vector<PeerStats> IrohTransport::stats() const {
  std::vector<PeerStats> all;
  std::vector<std::shared_ptr<link::Link>> links;
  {
    const std::lock_guard lock(mutex_);
    for (int i = 0; i < world_; ++i) {
      const Peer& peer = peers_[static_cast<std::size_t>(i)];
      if (i == rank_) continue;
      PeerStats stats;
      stats.rank = i;
      stats.endpoint_id = iroh::short_name(peer.id);
      stats.sent_bytes = peer.sent_bytes;
      stats.received_bytes = peer.received_bytes;
      all.push_back(std::move(stats));
      links.push_back(peer.link);
    }
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].path = links[i] ? links[i]->path_text() : "not connected";
    if (links[i]) all[i].rtt_ms = links[i]->rtt_ms();
  }
  return all;
}

void IrohTransport::on_frame(const iroh::EndpointId& from, const link::FrameHeader& header, Payload payload) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    if (!started_) {
      if (early_bytes_ + payload.size() > kMostEarlyBytes) {
        log_once(LogLevel::warn, "early", "dropped frames that came before their group was complete");
        return;
      }
      early_bytes_ += payload.size();
      early_.push_back({from, header, std::move(payload)});
      return;
    }
  }
  deliver(from, header, std::move(payload));
}

void IrohTransport::deliver(const iroh::EndpointId& from, const link::FrameHeader& header, Payload payload) {
  int rank = -1;
  bool left = false;
  {
    const std::lock_guard lock(mutex_);
    const auto found = ranks_.find(from);
    if (found == ranks_.end() || found->second == rank_) return;
    rank = found->second;
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (header.type == link::FrameType::data) peer.received_bytes += payload.size();
    // Once on every lane of the sender: only then is nothing of it still on its way.
    if (header.type == link::FrameType::goodbye) {
      left = ++peer.goodbyes == static_cast<int>(header.message) && !std::exchange(peer.lost, true);
    }
  }
  gate_.with([&](Receiver& receiver) {
    if (header.type == link::FrameType::data) {
      receiver.on_data(rank, {header.sequence, header.message, header.chunk, header.signature}, std::move(payload));
    } else if (header.type == link::FrameType::control) {
      receiver.on_control(rank, std::move(payload));
    } else if (left) {
      receiver.on_lost(rank, true, Error(ErrorKind::peer_gone, "it left the group"));
    }
  });
}

void IrohTransport::on_peer_dead(const iroh::EndpointId& id, const Error& cause) {
  {
    const std::lock_guard lock(mutex_);
    if (!started_) {
      early_deaths_.emplace_back(id, cause);
      return;
    }
  }
  deliver_death(id, cause);
}

void IrohTransport::deliver_death(const iroh::EndpointId& id, const Error& cause) {
  int rank = -1;
  {
    const std::lock_guard lock(mutex_);
    const auto found = ranks_.find(id);
    if (found == ranks_.end() || std::exchange(peers_[static_cast<std::size_t>(found->second)].lost, true)) return;
    rank = found->second;
  }
  gate_.with([&](Receiver& receiver) { receiver.on_lost(rank, false, cause); });
}

}  // namespace torch_iroh::transport
