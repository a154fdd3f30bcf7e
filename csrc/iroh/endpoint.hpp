// iroh's endpoints, connections and streams under iroh's own names. No policy, retry or log; every asynchronous call
// returns a Future. Another QUIC engine may stand behind this header.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/payload.hpp"
#include "iroh/future.hpp"

namespace torch_iroh::iroh {

using EndpointId = std::array<std::byte, 32>;  // an Ed25519 public key
std::string to_hex(const EndpointId& id);
std::string short_name(const EndpointId& id);  // the first ten hex digits
std::optional<EndpointId> id_from_hex(const std::string& hex);

// "1.2.3.4:5" or "[::1]:5": what iroh takes as an address (it panics on anything else, iroh 1.2.0).
bool is_socket_address(const std::string& text);

struct EndpointAddr {
  EndpointId id{};
  std::optional<std::string> relay_url;
  std::vector<std::string> direct;  // "ip:port"
};

struct RelayServer {
  std::string url;
  std::optional<std::string> auth_token;
  bool operator==(const RelayServer&) const = default;
};

using SecretKey = std::array<std::byte, 32>;
SecretKey secret_key_of(std::string_view bytes);  // throws Error(invalid) unless they are 32
EndpointId public_key(const SecretKey& key);

struct EndpointOptions {
  std::vector<std::string> alpns;        // the protocols that are let in
  std::optional<std::string> bind_addr;  // "ip:port"; none: every interface, any port
  std::optional<SecretKey> secret_key;   // none: a fresh one
  std::vector<RelayServer> relays;       // none: no relay at all
  bool public_relays = false;            // those of iroh's makers, instead
};

struct Path {
  std::string remote_addr;
  bool selected = false;
  bool relay = false;
  std::uint64_t rtt_ms = 0;
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
  std::uint64_t lost_packets = 0;
  std::uint64_t congestion_window = 0;
  std::uint32_t mtu = 0;
};

struct ConnectionStats {
  std::int64_t sent_datagrams = 0;
  std::int64_t sent_bytes = 0;
  std::int64_t received_datagrams = 0;
  std::int64_t received_bytes = 0;
  std::int64_t lost_packets = 0;
  std::int64_t lost_bytes = 0;
};

class SendStream {  // move-only
 public:
  // Bytes are copied before this returns; the future is ready when QUIC has taken all of them.
  Future<Nothing> write_all(std::span<const std::byte> head, std::span<const std::byte> tail = {});
  Future<Nothing> finish();
  Future<Nothing> stopped();  // ready when the peer has everything, or has stopped the stream
  Future<Nothing> set_priority(std::int32_t priority);
  Future<Nothing> reset(std::uint64_t error_code);

  struct Impl;
  explicit SendStream(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

class RecvStream {  // move-only
 public:
  // Up to `limit` bytes, as they come; empty at the end of the stream.
  Future<Payload> read(std::uint32_t limit);
  Future<Payload> read_exact(std::uint32_t count);
  Future<Nothing> stop(std::uint64_t error_code);

  struct Impl;
  explicit RecvStream(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

struct BiStream {
  SendStream send;
  RecvStream receive;
};

class Connection {  // cheap to copy: all copies are one connection
 public:
  EndpointId remote_id() const;
  Future<SendStream> open_uni() const;
  Future<RecvStream> accept_uni() const;
  Future<BiStream> open_bi() const;  // the peer learns of it with its first byte
  Future<BiStream> accept_bi() const;
  Future<std::string> closed() const;  // ready when the connection has ended; why
  void close(std::uint32_t error_code, const std::string& reason) const;
  void set_max_concurrent_uni_streams(std::uint64_t count) const;
  void set_max_concurrent_bi_streams(std::uint64_t count) const;
  std::string alpn() const;
  std::vector<Path> paths() const;
  ConnectionStats stats() const;

  struct Impl;
  Connection() = default;
  explicit Connection(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  explicit operator bool() const { return impl_ != nullptr; }
  bool operator==(const Connection&) const = default;

 private:
  std::shared_ptr<Impl> impl_;
};

class Accepting {  // an attempt that was let in, in the middle of its handshake
 public:
  Future<Connection> handshake() const;

  struct Impl;
  explicit Accepting(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

class Incoming {  // a connection attempt that nobody has answered yet; dropped, it is refused
 public:
  Future<Accepting> accept() const;

  struct Impl;
  explicit Incoming(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

class Endpoint {  // cheap to copy: all copies are one endpoint
 public:
  static Future<Endpoint> bind(const EndpointOptions& options);

  EndpointId id() const;
  EndpointAddr addr() const;
  std::vector<std::string> bound_sockets() const;
  Future<Nothing> online() const;  // ready when a relay is usable
  // "ip:port" under which this endpoint is reached from outside: offered to peers, those connected already too.
  Future<Nothing> add_external_addr(const std::string& addr) const;
  Future<Nothing> remove_external_addr(const std::string& addr) const;
  Future<Connection> connect(const EndpointAddr& peer, const std::string& alpn) const;
  Future<std::optional<Incoming>> accept_next() const;  // none once the endpoint is closed
  Future<Nothing> close() const;

  struct Impl;
  Endpoint() = default;
  explicit Endpoint(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  explicit operator bool() const { return impl_ != nullptr; }

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace torch_iroh::iroh
