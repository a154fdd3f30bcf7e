#include "iroh/call.hpp"
#include "iroh/objects.hpp"

namespace torch_iroh::iroh {
namespace {

BiStream adopt_both(abi::Handle handle) {
  const auto& f = abi::functions();
  abi::CallStatus status;
  const Handle<&abi::Functions::bistream> both(handle);
  const abi::Handle send = f.method_bistream_send(both.lend(), &status);
  abi::check(status, "take a stream's sending half");
  auto sending = adopt<SendStream>(send);
  const abi::Handle receive = f.method_bistream_recv(both.lend(), &status);
  abi::check(status, "take a stream's receiving half");
  return {std::move(sending), adopt<RecvStream>(receive)};
}

}  // namespace

EndpointId Connection::remote_id() const {
  abi::CallStatus status;
  const abi::Handle id = abi::functions().method_connection_remote_id(impl_->handle.lend(), &status);
  abi::check(status, "read the peer's id");
  return lift_id(id);
}

Future<SendStream> Connection::open_uni() const {
  const auto& f = abi::functions();
  return make_future<SendStream>(f.method_connection_open_uni(impl_->handle.lend()), f.future_u64, "open a stream",
                                 adopt<SendStream>);
}

Future<RecvStream> Connection::accept_uni() const {
  const auto& f = abi::functions();
  return make_future<RecvStream>(f.method_connection_accept_uni(impl_->handle.lend()), f.future_u64, "accept a stream",
                                 adopt<RecvStream>);
}

Future<BiStream> Connection::open_bi() const {
  const auto& f = abi::functions();
  return make_future<BiStream>(f.method_connection_open_bi(impl_->handle.lend()), f.future_u64, "open a stream",
                               adopt_both);
}

Future<BiStream> Connection::accept_bi() const {
  const auto& f = abi::functions();
  return make_future<BiStream>(f.method_connection_accept_bi(impl_->handle.lend()), f.future_u64, "accept a stream",
                               adopt_both);
}

std::string Connection::alpn() const {
  abi::CallStatus status;
  const abi::RustBuffer buffer = abi::functions().method_connection_alpn(impl_->handle.lend(), &status);
  abi::check(status, "read a connection's protocol");
  const auto bytes = abi::Lift(buffer).bytes();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Future<std::string> Connection::closed() const {
  const auto& f = abi::functions();
  return make_future<std::string>(f.method_connection_closed(impl_->handle.lend()), f.future_rust_buffer,
                                  "wait for a connection's end",
                                  [](abi::RustBuffer buffer) { return abi::Lift(buffer).rest(); });
}

void Connection::close(std::uint32_t error_code, const std::string& reason) const {
  abi::CallStatus status;
  abi::functions().method_connection_close(impl_->handle.lend(), error_code, abi::Lower().text(reason).buffer(),
                                           &status);
  abi::check(status, "close a connection");
}

void Connection::set_max_concurrent_uni_streams(std::uint64_t count) const {
  abi::CallStatus status;
  abi::functions().method_connection_set_max_concurrent_uni_streams(impl_->handle.lend(), count, &status);
  abi::check(status, "set the stream limit");
}

void Connection::set_max_concurrent_bi_streams(std::uint64_t count) const {
  abi::CallStatus status;
  abi::functions().method_connection_set_max_concurrent_bi_streams(impl_->handle.lend(), count, &status);
  abi::check(status, "set the stream limit");
}

std::vector<Path> Connection::paths() const {
  abi::CallStatus status;
  const abi::RustBuffer buffer = abi::functions().method_connection_paths(impl_->handle.lend(), &status);
  abi::check(status, "read a connection's paths");
  abi::Lift lift(buffer);
  std::vector<Path> paths;
  for (std::int32_t left = lift.i32(); left > 0; --left) {
    Path path;
    lift.text();  // iroh's own name of the path
    path.selected = lift.u8() != 0;
    path.remote_addr = lift.text();
    lift.u8();  // whether it is an IP path: the next field says the opposite
    path.relay = lift.u8() != 0;
    path.rtt_ms = lift.u64();
    lift.u64();  // the same round-trip time, again
    lift.u64();  // datagrams sent
    path.sent_bytes = lift.u64();
    lift.u64();  // datagrams received
    path.received_bytes = lift.u64();
    path.congestion_window = lift.u64();
    lift.u64();  // congestion events
    path.lost_packets = lift.u64();
    lift.u64();  // bytes lost
    path.mtu = static_cast<std::uint32_t>(lift.i32());
    paths.push_back(std::move(path));
  }
  return paths;
}

ConnectionStats Connection::stats() const {
  abi::CallStatus status;
  const abi::RustBuffer buffer = abi::functions().method_connection_stats(impl_->handle.lend(), &status);
  abi::check(status, "read a connection's statistics");
  abi::Lift lift(buffer);
  ConnectionStats stats;
  for (std::int64_t* field : {&stats.sent_datagrams, &stats.sent_bytes, &stats.received_datagrams,
                              &stats.received_bytes, &stats.lost_packets, &stats.lost_bytes}) {
    *field = static_cast<std::int64_t>(lift.u64());
  }
  return stats;
}

}  // namespace torch_iroh::iroh
