#include "iroh/abi.hpp"

#include <algorithm>
#include <array>

namespace torch_iroh::iroh::abi {
namespace {

constexpr std::array kKinds = {"invalid input", "bind",           "connect", "connection", "alpn",
                               "key parsing",   "ticket parsing", "relay",   "stream",     "datagram",
                               "callback",      "closed",         "timeout", "internal"};

RustBuffer buffer_of(std::span<const std::uint8_t> bytes) {
  CallStatus status;
  RustBuffer buffer = functions().buffer_alloc(bytes.size(), &status);
  std::copy(bytes.begin(), bytes.end(), buffer.data);
  buffer.len = bytes.size();
  return buffer;
}

void store_i32(std::uint8_t* at, std::int32_t value) {
  const auto bits = static_cast<std::uint32_t>(value);
  at[0] = static_cast<std::uint8_t>(bits >> 24);
  at[1] = static_cast<std::uint8_t>(bits >> 16);
  at[2] = static_cast<std::uint8_t>(bits >> 8);
  at[3] = static_cast<std::uint8_t>(bits);
}

}  // namespace

void free_buffer(RustBuffer buffer) noexcept {
  if (buffer.data == nullptr && buffer.capacity == 0) return;
  if (const Functions* f = functions_or_null()) {
    CallStatus status;
    f->buffer_free(buffer, &status);
  }
}

Error error_of(CallStatus& status, const char* doing) {
  const RustBuffer carried = status.error;
  status.error = {0, 0, nullptr};
  const std::string prefix = std::string("iroh: ") + doing + ": ";
  if (status.code == 3) {
    free_buffer(carried);
    return {ErrorKind::aborted, prefix + "cancelled"};
  }
  if (status.code != 1) return {ErrorKind::library, prefix + "panic: " + Lift(carried).rest()};

  const auto& f = functions();
  const Handle error = Lift(carried).u64();
  CallStatus inner;
  const auto kind =
      static_cast<std::size_t>(Lift(f.method_iroherror_kind(f.iroherror.clone(error, &inner), &inner)).i32() - 1);
  const std::string text = Lift(f.method_iroherror_message(f.iroherror.clone(error, &inner), &inner)).rest();
  f.iroherror.free(error, &inner);
  return {ErrorKind::network, prefix + text + " [" + (kind < kKinds.size() ? kKinds[kind] : "unknown kind") + "]"};
}

void check(CallStatus& status, const char* doing) {
  if (status.code != 0) throw error_of(status, doing);
}

Lower& Lower::i32(std::int32_t value) {
  std::uint8_t bytes[4];
  store_i32(bytes, value);
  out_.insert(out_.end(), bytes, bytes + 4);
  return *this;
}

Lower& Lower::text(std::string_view text) {
  return bytes(std::as_bytes(std::span(text.data(), text.size())));
}

Lower& Lower::optional_text(const std::optional<std::string>& text) {
  tag(text.has_value());
  if (text) this->text(*text);
  return *this;
}

Lower& Lower::bytes(std::span<const std::byte> bytes) {
  i32(static_cast<std::int32_t>(bytes.size()));
  const auto* from = reinterpret_cast<const std::uint8_t*>(bytes.data());
  out_.insert(out_.end(), from, from + bytes.size());
  return *this;
}

Lower& Lower::tag(bool present) {
  out_.push_back(present ? 1 : 0);
  return *this;
}

RustBuffer Lower::buffer() const {
  return buffer_of(out_);
}

RustBuffer Lower::raw(std::string_view text) {
  return buffer_of({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
}

RustBuffer lower_bytes(std::span<const std::byte> head, std::span<const std::byte> tail) {
  CallStatus status;
  const std::size_t count = head.size() + tail.size();
  RustBuffer buffer = functions().buffer_alloc(count + 4, &status);
  store_i32(buffer.data, static_cast<std::int32_t>(count));
  if (!head.empty()) std::memcpy(buffer.data + 4, head.data(), head.size());
  if (!tail.empty()) std::memcpy(buffer.data + 4 + head.size(), tail.data(), tail.size());
  buffer.len = count + 4;
  return buffer;
}

const std::uint8_t* Lift::take(std::size_t count) {
  if (count > buffer_.len - at_) throw Error(ErrorKind::library, "iroh returned a record that is too short");
  const std::uint8_t* from = buffer_.data + at_;
  at_ += count;
  return from;
}

std::uint8_t Lift::u8() {
  return *take(1);
}

std::int32_t Lift::i32() {
  const std::uint8_t* b = take(4);
  return static_cast<std::int32_t>(std::uint32_t{b[0]} << 24 | std::uint32_t{b[1]} << 16 | std::uint32_t{b[2]} << 8 |
                                   std::uint32_t{b[3]});
}

std::uint64_t Lift::u64() {
  const std::uint8_t* b = take(8);
  std::uint64_t value = 0;
  for (int i = 0; i < 8; ++i) value = value << 8 | b[i];
  return value;
}

std::string Lift::text() {
  const auto count = static_cast<std::uint32_t>(i32());
  const std::uint8_t* from = take(count);
  return {reinterpret_cast<const char*>(from), count};
}

std::optional<std::string> Lift::optional_text() {
  if (u8() == 0) return std::nullopt;
  return text();
}

std::vector<std::byte> Lift::bytes() {
  const auto count = static_cast<std::uint32_t>(i32());
  const auto* from = reinterpret_cast<const std::byte*>(take(count));
  return {from, from + count};
}

std::string Lift::rest() {
  const std::size_t count = buffer_.len - at_;
  return {reinterpret_cast<const char*>(take(count)), count};
}

}  // namespace torch_iroh::iroh::abi
