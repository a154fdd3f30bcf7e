// Bytes together with whatever keeps them alive: a library buffer, a heap block, or a sender's lent memory. Slicing
// shares the owner, so received bytes reach their destination without a copy in between.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

namespace torch_iroh {

class Payload {
 public:
  Payload() = default;
  Payload(std::span<const std::byte> bytes, std::shared_ptr<const void> owner)
      : bytes_(bytes), owner_(std::move(owner)) {}

  std::span<const std::byte> bytes() const { return bytes_; }
  std::size_t size() const { return bytes_.size(); }
  Payload slice(std::size_t offset, std::size_t count) const { return {bytes_.subspan(offset, count), owner_}; }

  // A private copy, for bytes that must outlive a large shared block.
  static Payload copy_of(std::span<const std::byte> bytes);

 private:
  std::span<const std::byte> bytes_;
  std::shared_ptr<const void> owner_;
};

inline Payload Payload::copy_of(std::span<const std::byte> bytes) {
  auto block = std::make_shared<std::byte[]>(bytes.size());
  std::copy(bytes.begin(), bytes.end(), block.get());
  const std::span<const std::byte> view(block.get(), bytes.size());
  return {view, std::move(block)};
}

// `head` and `tail` in one block.
inline Payload join(const Payload& head, const Payload& tail) {
  auto block = std::make_shared<std::byte[]>(head.size() + tail.size());
  std::copy(head.bytes().begin(), head.bytes().end(), block.get());
  std::copy(tail.bytes().begin(), tail.bytes().end(), block.get() + head.size());
  const std::span<const std::byte> view(block.get(), head.size() + tail.size());
  return {view, std::move(block)};
}

}  // namespace torch_iroh
