#include "iroh/call.hpp"
#include "iroh/objects.hpp"

namespace torch_iroh::iroh {
namespace {

Nothing nothing() {
  return {};
}

// A received byte vector stays in the library's buffer until its last reader is done.
Payload lift_payload(abi::RustBuffer buffer) {
  const std::shared_ptr<const void> owner(buffer.data, [buffer](const void*) { abi::free_buffer(buffer); });
  if (buffer.len < 4) throw Error(ErrorKind::library, "iroh returned a byte vector without a length");
  const auto* bytes = reinterpret_cast<const std::byte*>(buffer.data);
  return {{bytes + 4, buffer.len - 4}, owner};
}

}  // namespace

Future<Nothing> SendStream::write_all(std::span<const std::byte> head, std::span<const std::byte> tail) {
  const auto& f = abi::functions();
  return make_future<Nothing>(f.method_sendstream_write_all(impl_->handle.lend(), abi::lower_bytes(head, tail)),
                              f.future_void, "write to a stream", nothing);
}

Future<Nothing> SendStream::finish() {
  const auto& f = abi::functions();
  return make_future<Nothing>(f.method_sendstream_finish(impl_->handle.lend()), f.future_void, "finish a stream",
                              nothing);
}

Future<Nothing> SendStream::stopped() {
  const auto& f = abi::functions();
  return make_future<Nothing>(f.method_sendstream_stopped(impl_->handle.lend()), f.future_rust_buffer,
                              "wait for a stream's end", [](abi::RustBuffer buffer) {
                                abi::free_buffer(buffer);
                                return Nothing{};
                              });
}

Future<Nothing> SendStream::set_priority(std::int32_t priority) {
  const auto& f = abi::functions();
  return make_future<Nothing>(f.method_sendstream_set_priority(impl_->handle.lend(), priority), f.future_void,
                              "set a stream's priority", nothing);
}

Future<Nothing> SendStream::reset(std::uint64_t error_code) {
  const auto& f = abi::functions();
  return make_future<Nothing>(f.method_sendstream_reset(impl_->handle.lend(), error_code), f.future_void,
                              "reset a stream", nothing);
}

Future<Payload> RecvStream::read(std::uint32_t limit) {
  const auto& f = abi::functions();
  return make_future<Payload>(f.method_recvstream_read(impl_->handle.lend(), limit), f.future_rust_buffer,
                              "read from a stream", lift_payload);
}

Future<Payload> RecvStream::read_exact(std::uint32_t count) {
  const auto& f = abi::functions();
  return make_future<Payload>(f.method_recvstream_read_exact(impl_->handle.lend(), count), f.future_rust_buffer,
                              "read from a stream", lift_payload);
}

Future<Nothing> RecvStream::stop(std::uint64_t error_code) {
  const auto& f = abi::functions();
  return make_future<Nothing>(f.method_recvstream_stop(impl_->handle.lend(), error_code), f.future_void,
                              "stop a stream", nothing);
}

}  // namespace torch_iroh::iroh
