// Little-endian fields in byte buffers, read with bounds checks. The one place where wire integers are taken apart.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/error.hpp"

namespace torch_iroh {

static_assert(std::endian::native == std::endian::little, "torch-iroh supports little-endian machines only");

class ByteWriter {
 public:
  template <typename T>
  ByteWriter& put(T value) {
    static_assert(std::is_integral_v<T> || std::is_enum_v<T>);
    const auto* from = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), from, from + sizeof value);
    return *this;
  }
  ByteWriter& put_bytes(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  ByteWriter& put_text(std::string_view text) {  // u16 length + bytes
    put(static_cast<std::uint16_t>(text.size()));
    return put_bytes(std::as_bytes(std::span(text.data(), text.size())));
  }
  std::span<const std::byte> bytes() const { return bytes_; }
  std::vector<std::byte> take() { return std::move(bytes_); }
  std::vector<std::uint8_t> octets() const {  // as a key-value store wants them
    const auto* from = reinterpret_cast<const std::uint8_t*>(bytes_.data());
    return {from, from + bytes_.size()};
  }

 private:
  std::vector<std::byte> bytes_;
};

// Text of a peer as it may be shown to a person: what is not printable ASCII becomes a question mark.
inline std::string printable(std::string text) {
  for (char& c : text) {
    if (c < ' ' || c > '~') c = '?';
  }
  return text;
}

class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : left_(bytes) {}
  template <typename T>
  T get() {
    static_assert(std::is_integral_v<T>);
    T value;
    const auto from = get_bytes(sizeof value);
    std::memcpy(&value, from.data(), sizeof value);
    return value;
  }
  std::span<const std::byte> get_bytes(std::size_t count) {
    if (count > left_.size()) throw Error(ErrorKind::protocol, "message is shorter than its fields");
    const auto head = left_.first(count);
    left_ = left_.subspan(count);
    return head;
  }
  std::string get_text() {
    const auto bytes = get_bytes(get<std::uint16_t>());
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  std::size_t left() const { return left_.size(); }

 private:
  std::span<const std::byte> left_;
};

}  // namespace torch_iroh
