#include "relay/hub.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace torch_iroh::relay {
namespace {

constexpr std::size_t kMostHello = 1024;
constexpr std::size_t kMostSessions = 4;  // of one key
constexpr std::size_t kMostPeers = 4096;  // remembered for notices that one is gone
constexpr std::size_t kEcho = 8;          // bytes of a ping

std::byte byte_of(Type type) {
  return static_cast<std::byte>(type);
}

}  // namespace

std::size_t Hub::HashKey::operator()(const Key& key) const {
  std::uint64_t hash = seed;
  for (std::size_t i = 0; i < key.size(); i += 8) {
    std::uint64_t word;
    std::memcpy(&word, key.data() + i, 8);
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  return hash;
}

ClientId Hub::open() {
  const ClientId id = next_++;
  clients_.emplace(id, std::make_unique<Client>(id, queue_bytes_));
  return id;
}

Hub::Client& Hub::client_of(ClientId id) {
  return *clients_.at(id);
}

std::optional<ClientId> Hub::confirm(ClientId id, const Key& key) {
  Client& client = client_of(id);
  if (client.endpoint != nullptr) throw std::logic_error("a client of the relay was confirmed twice");
  auto& endpoint = endpoints_[key];
  if (!endpoint) {
    endpoint = std::make_unique<Endpoint>();
    endpoint->key = key;
  }
  client.endpoint = endpoint.get();
  send_to(client, Type::confirmed, {});
  auto& sessions = endpoint->sessions;
  if (!sessions.empty()) {
    const std::byte status{static_cast<std::uint8_t>(Status::same_key_elsewhere)};
    send_to(*sessions.back(), Type::status, {&status, 1});
    ++counters_.replaced;
  }
  sessions.push_back(&client);
  return sessions.size() > kMostSessions ? std::optional(sessions.front()->id) : std::nullopt;
}

void Hub::close(ClientId id) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  const std::unique_ptr<Client> client = std::move(found->second);
  clients_.erase(found);
  Endpoint* endpoint = client->endpoint;
  if (endpoint == nullptr) return;
  auto& sessions = endpoint->sessions;
  const bool newest = sessions.back() == client.get();
  std::erase(sessions, client.get());
  if (sessions.empty()) {
    forget(*endpoint);
  } else if (newest) {
    const std::byte status{static_cast<std::uint8_t>(Status::healthy)};
    send_to(*sessions.back(), Type::status, {&status, 1});
  }
}

void Hub::forget(Endpoint& endpoint) {
  for (Endpoint* peer : endpoint.peers) {
    peer->peers.erase(&endpoint);
    send_to(*peer->sessions.back(), Type::gone, endpoint.key);
    ++counters_.gone_notices;
  }
  ++epoch_;
  endpoints_.erase(Key(endpoint.key));
}

Fed Hub::feed(ClientId id, View bytes) {
  Client& from = client_of(id);
  Fed fed;
  counters_.received_bytes += bytes.size();
  try {
    while (!fed.leaves) {
      const auto frame = from.reader.next(bytes);
      if (!frame) break;
      on_frame(from, *frame, fed);
    }
  } catch (const Violation& violation) {
    fed.leaves = true;
    fed.violation = violation.what();
    send_close(id, violation.code());
  }
  return fed;
}

void Hub::on_frame(Client& from, const Frame& frame, Fed& fed) {
  switch (frame.opcode) {
    case Opcode::binary:
      if (from.in_parts) throw Violation(kCloseProtocol, "a websocket message inside another");
      if (frame.last) return on_message(from, frame, fed);
      from.in_parts = true;
      return on_part(from, frame, fed);
    case Opcode::more:
      if (!from.in_parts) throw Violation(kCloseProtocol, "the rest of a websocket message that never began");
      return on_part(from, frame, fed);
    case Opcode::text: throw Violation(kCloseData, "a text message");
    case Opcode::pong: return;
    case Opcode::ping:
    case Opcode::close: {
      Bytes payload(frame.masked.size());
      unmask(frame, 0, payload.data());
      answer(from, frame.opcode == Opcode::ping ? Opcode::pong : Opcode::close, payload);
      fed.leaves = frame.opcode == Opcode::close;
      return;
    }
  }
}

void Hub::on_part(Client& from, const Frame& frame, Fed& fed) {
  if (from.parts.size() + frame.masked.size() > kMostBody + 1) {
    throw Violation(kCloseTooBig, "a message in parts, longer than allowed");
  }
  const std::size_t before = from.parts.size();
  from.parts.resize(before + frame.masked.size());
  unmask(frame, 0, from.parts.data() + before);
  if (!frame.last) return;
  const Bytes whole = std::exchange(from.parts, {});
  from.in_parts = false;
  Frame message;
  message.masked = whole;
  on_message(from, message, fed);
}

void Hub::on_message(Client& from, const Frame& frame, Fed& fed) {
  if (frame.masked.empty()) throw Violation(kCloseProtocol, "an empty message");
  const auto first = frame.masked[0] ^ static_cast<std::byte>(frame.mask);
  const auto type = static_cast<Type>(first);
  if (from.endpoint == nullptr) {
    if (type != Type::client_auth || from.said_hello || frame.masked.size() > kMostHello) {
      throw Violation(kCloseProtocol, "a message before the client has proved who it is");
    }
    from.said_hello = true;
    Bytes whole(frame.masked.size());
    unmask(frame, 0, whole.data());
    fed.hello = Bytes(whole.begin() + 1, whole.end());
    return;
  }
  switch (type) {
    case Type::datagram_out:
    case Type::batch_out: return forward(from, first, frame);
    case Type::ping:
    case Type::pong: {
      std::array<std::byte, 1 + kEcho> whole;
      if (frame.masked.size() != whole.size()) throw Violation(kCloseProtocol, "a ping or pong of another length");
      if (type == Type::pong) return;
      unmask(frame, 0, whole.data());
      return send_to(from, Type::pong, View(whole).subspan(1));
    }
    default:
      throw Violation(kCloseProtocol, "a message of type " + std::to_string(std::to_integer<unsigned>(first)) +
                                          ", which no client sends");
  }
}

void Hub::forward(Client& from, std::byte type, const Frame& frame) {
  constexpr std::size_t before = 1 + sizeof(Key);  // type and key
  const std::size_t fields = type == byte_of(Type::batch_out) ? 3 : 1;
  if (frame.masked.size() < before + fields) throw Violation(kCloseProtocol, "a datagram shorter than its fields");
  std::array<std::byte, before> front;
  Frame head = frame;
  head.masked = frame.masked.first(before);
  unmask(head, 0, front.data());
  Key to;
  std::copy(front.begin() + 1, front.end(), to.begin());
  Endpoint* endpoint = receiver(from, to);
  if (endpoint == nullptr) {
    ++counters_.dropped_unknown_frames;
    return;
  }
  Client& client = *endpoint->sessions.back();
  std::byte header[kMostServerHeader];
  const std::size_t header_bytes = put_header(Opcode::binary, frame.masked.size(), header);
  Egress::Dropped dropped;
  std::byte* out = client.egress.push_datagram(header_bytes + frame.masked.size(), client.cap, dropped);
  std::memcpy(out, header, header_bytes);
  out += header_bytes;
  *out++ = static_cast<std::byte>(std::to_integer<unsigned>(type) + 2);
  std::copy(from.endpoint->key.begin(), from.endpoint->key.end(), out);
  unmask(frame, before, out + sizeof(Key));
  counters_.dropped_slow_frames += dropped.frames;
  counters_.dropped_slow_bytes += dropped.bytes;
  ++counters_.relayed_frames;
  counters_.relayed_bytes += frame.masked.size() - before - fields;
  mark_ready(client);
}

// None: it is not here.
Hub::Endpoint* Hub::receiver(Client& from, const Key& key) {
  if (from.last_to != nullptr && from.last_epoch == epoch_ && from.last_to->key == key) return from.last_to;
  const auto found = endpoints_.find(key);
  if (found == endpoints_.end()) return nullptr;
  Endpoint* to = found->second.get();
  Endpoint* own = from.endpoint;
  if (own != to && own->peers.size() < kMostPeers && to->peers.size() < kMostPeers) {
    own->peers.insert(to);
    to->peers.insert(own);
  }
  from.last_to = to;
  from.last_epoch = epoch_;
  return to;
}

void Hub::send(ClientId id, Type type, View body) {
  send_to(client_of(id), type, body);
}

void Hub::send_to(Client& to, Type type, View body) {
  Bytes message{byte_of(type)};
  message.insert(message.end(), body.begin(), body.end());
  answer(to, Opcode::binary, message);
}

void Hub::answer(Client& to, Opcode opcode, View payload) {
  Bytes frame(kMostServerHeader + payload.size());
  const std::size_t header_bytes = put_header(opcode, payload.size(), frame.data());
  std::copy(payload.begin(), payload.end(), frame.begin() + static_cast<std::ptrdiff_t>(header_bytes));
  // Too many unread answers: this one is lost, and the client's own time-out says so to it.
  if (to.egress.push_answer(View(frame).first(header_bytes + payload.size()))) mark_ready(to);
}

void Hub::send_close(ClientId id, std::uint16_t code) {
  Client& client = client_of(id);
  const std::array<std::byte, 2> payload{static_cast<std::byte>(code >> 8), static_cast<std::byte>(code)};
  client.egress.drop_datagrams();
  answer(client, Opcode::close, payload);
}

void Hub::mark_ready(Client& client) {
  if (std::exchange(client.ready, true)) return;
  ready_.push_back(client.id);
}

std::vector<ClientId> Hub::take_ready() {
  std::vector<ClientId> ready = std::exchange(ready_, {});
  std::erase_if(ready, [&](ClientId id) {
    const auto found = clients_.find(id);
    if (found == clients_.end()) return true;
    found->second->ready = false;
    return false;
  });
  return ready;
}

void Hub::adapt(Duration passed) {
  using Seconds = std::chrono::duration<double>;
  const double share = Seconds(kMostDelay) / std::max(Seconds(passed), Seconds(0.001));
  const std::size_t least = std::min(kLeastQueue, queue_bytes_);
  for (const auto& [id, client] : clients_) {
    const bool behind = !client->egress.empty();
    if (behind && client->was_behind) {
      const auto read = static_cast<std::size_t>(static_cast<double>(client->taken) * share);
      client->cap = std::clamp(read, least, queue_bytes_);
    } else if (!behind) {
      client->cap = std::min(2 * client->cap, queue_bytes_);
    }
    client->was_behind = behind;
    client->taken = 0;
  }
}

std::size_t Hub::next_size(ClientId id, std::size_t limit) {
  return client_of(id).egress.next_size(limit);
}

void Hub::take_into(ClientId id, std::byte* to, std::size_t size) {
  Client& client = client_of(id);
  client.egress.take_into(to, size);
  client.taken += size;
  counters_.sent_bytes += size;
}

std::size_t Hub::queued_bytes() const {
  std::size_t sum = 0;
  for (const auto& [id, client] : clients_) sum += client->egress.bytes();
  return sum;
}

}  // namespace torch_iroh::relay
