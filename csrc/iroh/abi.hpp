// The UniFFI C ABI of the iroh wheel 1.2.x: types, the symbols we use with their checksums, lowering and lifting.
// Private to csrc/iroh: nothing outside this folder includes it or speaks its words.
//
// Facts that the rest of the folder relies on (checked by running them, iroh 1.2.0, contract version 30):
// a method consumes the handle it is given, so it gets a clone; async functions return a future handle that is polled
// by whoever likes, and run on the polling thread; byte vectors are lifted and lowered one element at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"

namespace torch_iroh::iroh::abi {

struct RustBuffer {
  std::uint64_t capacity;
  std::uint64_t len;
  std::uint8_t* data;
};

struct CallStatus {
  std::int8_t code = 0;  // 0 ok, 1 error (a boxed IrohError handle), 2 panic (text), 3 cancelled
  RustBuffer error{0, 0, nullptr};
};

using Handle = std::uint64_t;
using PollCallback = void (*)(std::uint64_t data, std::int8_t code);
inline constexpr std::int8_t kPollReady = 0;

inline constexpr std::uint32_t kContractVersion = 30;
inline constexpr const char* kSupportedVersions = "1.2.x";

// X(symbol without its prefix, checksum, result, arguments)
#define TORCH_IROH_ABI_FUNCTIONS(X)                                                                      \
  X(func_set_log_level, 52619, void, (RustBuffer, CallStatus*))                                          \
  X(constructor_endpointbuilder_new, 16347, Handle, (CallStatus*))                                       \
  X(method_endpointbuilder_apply_minimal, 3398, void, (Handle, CallStatus*))                             \
  X(method_endpointbuilder_alpns, 55626, void, (Handle, RustBuffer, CallStatus*))                        \
  X(method_endpointbuilder_bind_addr, 50528, void, (Handle, RustBuffer, CallStatus*))                    \
  X(method_endpointbuilder_relay_mode, 17405, void, (Handle, Handle, CallStatus*))                       \
  X(method_endpointbuilder_secret_key, 1964, void, (Handle, RustBuffer, CallStatus*))                    \
  X(method_endpointbuilder_bind, 5850, Handle, (Handle))                                                 \
  X(constructor_relaymode_disabled, 42542, Handle, (CallStatus*))                                        \
  X(constructor_relaymode_default_mode, 17157, Handle, (CallStatus*))                                    \
  X(constructor_relaymode_custom, 51396, Handle, (Handle, CallStatus*))                                  \
  X(constructor_relaymap_empty, 49514, Handle, (CallStatus*))                                            \
  X(method_relaymap_insert, 45587, void, (Handle, RustBuffer, CallStatus*))                              \
  X(method_endpoint_accept_next, 38336, Handle, (Handle))                                                \
  X(method_endpoint_add_external_addr, 65222, Handle, (Handle, RustBuffer))                              \
  X(method_endpoint_remove_external_addr, 28593, Handle, (Handle, RustBuffer))                           \
  X(method_endpoint_addr, 25271, Handle, (Handle, CallStatus*))                                          \
  X(method_endpoint_bound_sockets, 64249, RustBuffer, (Handle, CallStatus*))                             \
  X(method_endpoint_close, 8483, Handle, (Handle))                                                       \
  X(method_endpoint_connect, 28652, Handle, (Handle, Handle, RustBuffer))                                \
  X(method_endpoint_id, 21819, Handle, (Handle, CallStatus*))                                            \
  X(method_endpoint_online, 27176, Handle, (Handle))                                                     \
  X(method_incoming_accept, 17830, Handle, (Handle))                                                     \
  X(method_accepting_connect, 4822, Handle, (Handle))                                                    \
  X(method_connection_accept_bi, 24717, Handle, (Handle))                                                \
  X(method_connection_accept_uni, 14498, Handle, (Handle))                                               \
  X(method_connection_alpn, 24307, RustBuffer, (Handle, CallStatus*))                                    \
  X(method_connection_open_bi, 7884, Handle, (Handle))                                                   \
  X(method_connection_open_uni, 45141, Handle, (Handle))                                                 \
  X(method_connection_close, 4437, void, (Handle, std::int64_t, RustBuffer, CallStatus*))                \
  X(method_connection_closed, 47559, Handle, (Handle))                                                   \
  X(method_connection_paths, 29415, RustBuffer, (Handle, CallStatus*))                                   \
  X(method_connection_remote_id, 30142, Handle, (Handle, CallStatus*))                                   \
  X(method_connection_stats, 46010, RustBuffer, (Handle, CallStatus*))                                   \
  X(method_connection_set_max_concurrent_bi_streams, 50250, void, (Handle, std::uint64_t, CallStatus*))  \
  X(method_connection_set_max_concurrent_uni_streams, 26941, void, (Handle, std::uint64_t, CallStatus*)) \
  X(method_bistream_recv, 64172, Handle, (Handle, CallStatus*))                                          \
  X(method_bistream_send, 17421, Handle, (Handle, CallStatus*))                                          \
  X(method_sendstream_write_all, 64390, Handle, (Handle, RustBuffer))                                    \
  X(method_sendstream_finish, 43289, Handle, (Handle))                                                   \
  X(method_sendstream_stopped, 18559, Handle, (Handle))                                                  \
  X(method_sendstream_reset, 6025, Handle, (Handle, std::uint64_t))                                      \
  X(method_sendstream_set_priority, 18123, Handle, (Handle, std::int32_t))                               \
  X(method_recvstream_read, 19153, Handle, (Handle, std::uint32_t))                                      \
  X(method_recvstream_read_exact, 6617, Handle, (Handle, std::uint32_t))                                 \
  X(method_recvstream_stop, 6249, Handle, (Handle, std::uint64_t))                                       \
  X(constructor_endpointaddr_new, 40386, Handle, (Handle, RustBuffer, RustBuffer, CallStatus*))          \
  X(method_endpointaddr_direct_addresses, 63199, RustBuffer, (Handle, CallStatus*))                      \
  X(method_endpointaddr_relay_url, 24207, RustBuffer, (Handle, CallStatus*))                             \
  X(constructor_endpointid_from_bytes, 63462, Handle, (RustBuffer, CallStatus*))                         \
  X(method_endpointid_to_bytes, 28032, RustBuffer, (Handle, CallStatus*))                                \
  X(constructor_secretkey_from_bytes, 61009, Handle, (RustBuffer, CallStatus*))                          \
  X(method_secretkey_public, 4129, Handle, (Handle, CallStatus*))                                        \
  X(method_iroherror_kind, 11512, RustBuffer, (Handle, CallStatus*))                                     \
  X(method_iroherror_message, 60838, RustBuffer, (Handle, CallStatus*))

// Objects: each has a clone and a free function.
#define TORCH_IROH_ABI_OBJECTS(X) \
  X(endpointbuilder)              \
  X(relaymode)                    \
  X(relaymap)                     \
  X(endpoint)                     \
  X(incoming)                     \
  X(accepting)                    \
  X(connection) X(bistream) X(sendstream) X(recvstream) X(endpointaddr) X(endpointid) X(secretkey) X(iroherror)

// Results of futures: each kind has its own poll, cancel, complete and free.
#define TORCH_IROH_ABI_FUTURES(X) X(u64, std::uint64_t) X(rust_buffer, RustBuffer) X(void, void)

template <typename T>
struct FutureFunctions {
  void (*poll)(Handle future, PollCallback callback, std::uint64_t data) = nullptr;
  void (*cancel)(Handle future) = nullptr;
  T (*complete)(Handle future, CallStatus* status) = nullptr;
  void (*free)(Handle future) = nullptr;
};

struct ObjectFunctions {
  Handle (*clone)(Handle object, CallStatus* status) = nullptr;
  void (*free)(Handle object, CallStatus* status) = nullptr;
};

struct Functions {
#define X(name, checksum, result, arguments) result(*name) arguments = nullptr;
  TORCH_IROH_ABI_FUNCTIONS(X)
#undef X
#define X(name) ObjectFunctions name;
  TORCH_IROH_ABI_OBJECTS(X)
#undef X
#define X(name, type) FutureFunctions<type> future_##name;
  TORCH_IROH_ABI_FUTURES(X)
#undef X
  RustBuffer (*buffer_alloc)(std::uint64_t size, CallStatus* status) = nullptr;
  void (*buffer_free)(RustBuffer buffer, CallStatus* status) = nullptr;
};

// The loaded table. Throws Error(library) when no library was opened, or in a child forked after it was.
const Functions& functions();
// As above, but nullptr instead of an exception: for destructors.
const Functions* functions_or_null() noexcept;

// Throws the error that `status` carries, with iroh's kind and text.
void check(CallStatus& status, const char* doing);
Error error_of(CallStatus& status, const char* doing);

void free_buffer(RustBuffer buffer) noexcept;

// Lowering: big-endian fields, i32 counts, a tag byte before an optional.
class Lower {
 public:
  Lower& i32(std::int32_t value);
  Lower& text(std::string_view text);
  Lower& optional_text(const std::optional<std::string>& text);
  Lower& bytes(std::span<const std::byte> bytes);
  Lower& tag(bool present);
  RustBuffer buffer() const;
  static RustBuffer raw(std::string_view text);  // a lone string argument is its bytes, without a count

 private:
  std::vector<std::uint8_t> out_;
};

// A byte vector argument made of two parts, copied once.
RustBuffer lower_bytes(std::span<const std::byte> head, std::span<const std::byte> tail);

// Lifting: owns the buffer, checks every length against what is there.
class Lift {
 public:
  explicit Lift(RustBuffer buffer) : buffer_(buffer) {}
  ~Lift() { free_buffer(buffer_); }
  Lift(const Lift&) = delete;
  Lift& operator=(const Lift&) = delete;

  std::uint8_t u8();
  std::int32_t i32();
  std::uint64_t u64();
  std::string text();  // with its count
  std::optional<std::string> optional_text();
  std::vector<std::byte> bytes();
  std::string rest();  // a lone string result

 private:
  const std::uint8_t* take(std::size_t count);

  RustBuffer buffer_;
  std::size_t at_ = 0;
};

}  // namespace torch_iroh::iroh::abi
