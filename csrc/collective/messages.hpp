// The small control messages of a group, as bytes. Every length is checked before it is believed.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace torch_iroh::collective {

enum class MessageKind : std::uint8_t {
  // "I have begun operation `sequence`, and this is what it is": bulk data for it may come. all_to_all: `bytes` is how
  // many of its elements are for the receiver.
  call = 1,
  abort = 2,    // "the group is broken, because `text`"
  offer = 3,    // "I send message `sequence` with `tag`, `bytes` long": point to point
  grant = 4,    // "message `sequence` of yours has a receiver": the rest of it may come
  arrive = 5,   // "I have reached monitored barrier `sequence`"
  verdict = 6,  // "monitored barrier `sequence` is over", with the reason in `text` when it is not passed
};

struct Message {
  MessageKind kind = MessageKind::call;
  std::uint64_t sequence = 0;
  std::int32_t tag = 0;
  std::uint64_t bytes = 0;
  std::string text{};  // what the operation is, or what went wrong
};

inline constexpr std::size_t kMostText = 1000;

std::vector<std::byte> encode(const Message& message);

// Throws Error(protocol).
Message decode_message(std::span<const std::byte> bytes);

// A short fingerprint of an operation's description: travels with every chunk of it.
std::uint32_t signature_of(const std::string& description);

}  // namespace torch_iroh::collective
