#include "iroh/endpoint.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>

#include "iroh/call.hpp"
#include "iroh/objects.hpp"

namespace torch_iroh::iroh {
namespace {

constexpr char kHex[] = "0123456789abcdef";

using RelayMap = Handle<&abi::Functions::relaymap>;
using RelayMode = Handle<&abi::Functions::relaymode>;
using Builder = Handle<&abi::Functions::endpointbuilder>;
using Address = Handle<&abi::Functions::endpointaddr>;

RelayMode relay_mode(const EndpointOptions& options) {
  const auto& f = abi::functions();
  abi::CallStatus status;
  if (options.public_relays) {
    RelayMode mode(f.constructor_relaymode_default_mode(&status));
    abi::check(status, "choose the public relays");
    return mode;
  }
  if (options.relays.empty()) {
    RelayMode mode(f.constructor_relaymode_disabled(&status));
    abi::check(status, "switch relays off");
    return mode;
  }
  // Not from URLs alone: that also turns QUIC address discovery on, and costs a 3 s probe (iroh 1.2.0).
  const RelayMap map(f.constructor_relaymap_empty(&status));
  abi::check(status, "make a relay map");
  for (const RelayServer& relay : options.relays) {
    abi::Lower config;
    config.text(relay.url).tag(false).optional_text(relay.auth_token);
    f.method_relaymap_insert(map.lend(), config.buffer(), &status);
    abi::check(status, "add a relay");
  }
  RelayMode mode(f.constructor_relaymode_custom(map.lend(), &status));
  abi::check(status, "choose relays");
  return mode;
}

Builder make_builder(const EndpointOptions& options) {
  const auto& f = abi::functions();
  abi::CallStatus status;
  Builder builder(f.constructor_endpointbuilder_new(&status));
  abi::check(status, "make an endpoint");
  // Minimal: no discovery service, nobody is contacted but the peers we name.
  f.method_endpointbuilder_apply_minimal(builder.lend(), &status);
  abi::check(status, "apply the minimal preset");
  abi::Lower alpns;
  alpns.i32(static_cast<std::int32_t>(options.alpns.size()));
  for (const std::string& alpn : options.alpns) alpns.text(alpn);
  f.method_endpointbuilder_alpns(builder.lend(), alpns.buffer(), &status);
  abi::check(status, "set the protocol name");
  if (options.bind_addr) {
    f.method_endpointbuilder_bind_addr(builder.lend(), abi::Lower::raw(*options.bind_addr), &status);
    abi::check(status, "set the bind address");
  }
  if (options.secret_key) {
    f.method_endpointbuilder_secret_key(builder.lend(), abi::Lower().bytes(*options.secret_key).buffer(), &status);
    abi::check(status, "set the secret key");
  }
  f.method_endpointbuilder_relay_mode(builder.lend(), relay_mode(options).lend(), &status);
  abi::check(status, "set the relays");
  return builder;
}

abi::Handle lower_addr(const EndpointAddr& addr) {
  const auto& f = abi::functions();
  abi::CallStatus status;
  const abi::Handle id = f.constructor_endpointid_from_bytes(abi::Lower().bytes(addr.id).buffer(), &status);
  abi::check(status, "read an endpoint id");
  abi::Lower direct;
  direct.i32(static_cast<std::int32_t>(addr.direct.size()));
  for (const std::string& one : addr.direct) direct.text(one);
  const abi::Handle lowered =
      f.constructor_endpointaddr_new(id, abi::Lower().optional_text(addr.relay_url).buffer(), direct.buffer(), &status);
  abi::check(status, "make an address");
  return lowered;
}

std::vector<std::string> lift_texts(abi::RustBuffer buffer) {
  abi::Lift lift(buffer);
  std::vector<std::string> texts;
  for (std::int32_t left = lift.i32(); left > 0; --left) texts.push_back(lift.text());
  return texts;
}

}  // namespace

std::string to_hex(const EndpointId& id) {
  std::string hex;
  for (const std::byte byte : id) {
    hex += kHex[std::to_integer<unsigned>(byte) >> 4];
    hex += kHex[std::to_integer<unsigned>(byte) & 15];
  }
  return hex;
}

std::string short_name(const EndpointId& id) {
  return to_hex(id).substr(0, 10);
}

bool is_socket_address(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon + 1 == text.size() || text.size() - colon > 6) return false;
  if (text.find_first_not_of("0123456789", colon + 1) != std::string::npos) return false;
  if (std::stoi(text.substr(colon + 1)) > 65535) return false;
  unsigned char bytes[16];
  const bool six = colon > 1 && text.front() == '[' && text[colon - 1] == ']';
  const std::string host = six ? text.substr(1, colon - 2) : text.substr(0, colon);
  return inet_pton(six ? AF_INET6 : AF_INET, host.c_str(), bytes) == 1;
}

std::optional<EndpointId> id_from_hex(const std::string& hex) {
  EndpointId id{};
  if (hex.size() != 2 * id.size()) return std::nullopt;
  for (std::size_t i = 0; i < hex.size(); ++i) {
    const char* digit = std::find(kHex, kHex + 16, hex[i]);
    if (digit == kHex + 16) return std::nullopt;
    id[i / 2] = (id[i / 2] << 4) | static_cast<std::byte>(digit - kHex);
  }
  return id;
}

EndpointId lift_id(abi::Handle endpoint_id) {
  abi::CallStatus status;
  const abi::RustBuffer buffer = abi::functions().method_endpointid_to_bytes(endpoint_id, &status);
  abi::check(status, "read an endpoint id");
  const auto bytes = abi::Lift(buffer).bytes();
  EndpointId id{};
  if (bytes.size() != id.size()) throw Error(ErrorKind::library, "iroh returned an endpoint id of another length");
  std::copy(bytes.begin(), bytes.end(), id.begin());
  return id;
}

SecretKey secret_key_of(std::string_view bytes) {
  SecretKey key{};
  if (bytes.size() != key.size()) throw Error(ErrorKind::invalid, "a secret key has 32 bytes");
  std::memcpy(key.data(), bytes.data(), key.size());
  return key;
}

EndpointId public_key(const SecretKey& key) {
  const auto& f = abi::functions();
  abi::CallStatus status;
  const Handle<&abi::Functions::secretkey> secret(
      f.constructor_secretkey_from_bytes(abi::Lower().bytes(key).buffer(), &status));
  abi::check(status, "read a secret key");
  const abi::Handle id = f.method_secretkey_public(secret.lend(), &status);
  abi::check(status, "derive a public key");
  return lift_id(id);
}

Future<Endpoint> Endpoint::bind(const EndpointOptions& options) {
  const auto& f = abi::functions();
  return make_future<Endpoint>(f.method_endpointbuilder_bind(make_builder(options).lend()), f.future_u64,
                               "bind an endpoint", adopt<Endpoint>);
}

EndpointId Endpoint::id() const {
  abi::CallStatus status;
  const abi::Handle id = abi::functions().method_endpoint_id(impl_->handle.lend(), &status);
  abi::check(status, "read the endpoint's id");
  return lift_id(id);
}

EndpointAddr Endpoint::addr() const {
  const auto& f = abi::functions();
  abi::CallStatus status;
  const Address addr(f.method_endpoint_addr(impl_->handle.lend(), &status));
  abi::check(status, "read the endpoint's address");
  EndpointAddr lifted;
  lifted.id = id();
  lifted.direct = lift_texts(f.method_endpointaddr_direct_addresses(addr.lend(), &status));
  abi::check(status, "read the direct addresses");
  lifted.relay_url = abi::Lift(f.method_endpointaddr_relay_url(addr.lend(), &status)).optional_text();
  abi::check(status, "read the relay URL");
  return lifted;
}

std::vector<std::string> Endpoint::bound_sockets() const {
  abi::CallStatus status;
  const abi::RustBuffer buffer = abi::functions().method_endpoint_bound_sockets(impl_->handle.lend(), &status);
  abi::check(status, "read the bound sockets");
  return lift_texts(buffer);
}

Future<Nothing> Endpoint::online() const {
  const auto& f = abi::functions();
  return make_future<Nothing>(f.method_endpoint_online(impl_->handle.lend()), f.future_void, "wait for a relay",
                              [] { return Nothing{}; });
}

Future<Nothing> Endpoint::add_external_addr(const std::string& addr) const {
  const auto& f = abi::functions();
  return make_future<Nothing>(f.method_endpoint_add_external_addr(impl_->handle.lend(), abi::Lower::raw(addr)),
                              f.future_void, "add an external address", [] { return Nothing{}; });
}

Future<Nothing> Endpoint::remove_external_addr(const std::string& addr) const {
  const auto& f = abi::functions();
  return make_future<Nothing>(f.method_endpoint_remove_external_addr(impl_->handle.lend(), abi::Lower::raw(addr)),
                              f.future_void, "remove an external address", [] { return Nothing{}; });
}

Future<Connection> Endpoint::connect(const EndpointAddr& peer, const std::string& alpn) const {
  const auto& f = abi::functions();
  return make_future<Connection>(
      f.method_endpoint_connect(impl_->handle.lend(), lower_addr(peer), abi::Lower().text(alpn).buffer()), f.future_u64,
      "connect", adopt<Connection>);
}

Future<std::optional<Incoming>> Endpoint::accept_next() const {
  const auto& f = abi::functions();
  return make_future<std::optional<Incoming>>(f.method_endpoint_accept_next(impl_->handle.lend()), f.future_rust_buffer,
                                              "accept a connection",
                                              [](abi::RustBuffer buffer) -> std::optional<Incoming> {
                                                abi::Lift lift(buffer);
                                                if (lift.u8() == 0) return std::nullopt;
                                                return adopt<Incoming>(lift.u64());
                                              });
}

Future<Nothing> Endpoint::close() const {
  const auto& f = abi::functions();
  return make_future<Nothing>(f.method_endpoint_close(impl_->handle.lend()), f.future_void, "close an endpoint",
                              [] { return Nothing{}; });
}

Future<Accepting> Incoming::accept() const {
  const auto& f = abi::functions();
  return make_future<Accepting>(f.method_incoming_accept(impl_->handle.lend()), f.future_u64, "accept a connection",
                                adopt<Accepting>);
}

Future<Connection> Accepting::handshake() const {
  const auto& f = abi::functions();
  return make_future<Connection>(f.method_accepting_connect(impl_->handle.lend()), f.future_u64, "finish a handshake",
                                 adopt<Connection>);
}

}  // namespace torch_iroh::iroh
