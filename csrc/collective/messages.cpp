#include "collective/messages.hpp"

#include "base/bytes.hpp"

namespace torch_iroh::collective {

std::vector<std::byte> encode(const Message& message) {
  ByteWriter out;
  out.put(message.kind).put(message.sequence).put(message.tag).put(message.bytes);
  out.put_text(std::string_view(message.text).substr(0, kMostText));
  return out.take();
}

Message decode_message(std::span<const std::byte> bytes) {
  ByteReader in(bytes);
  Message message;
  const auto kind = in.get<std::uint8_t>();
  if (kind < static_cast<std::uint8_t>(MessageKind::call) || kind > static_cast<std::uint8_t>(MessageKind::verdict)) {
    throw Error(ErrorKind::protocol, "unknown control message " + std::to_string(kind));
  }
  message.kind = static_cast<MessageKind>(kind);
  message.sequence = in.get<std::uint64_t>();
  message.tag = in.get<std::int32_t>();
  message.bytes = in.get<std::uint64_t>();
  message.text = printable(in.get_text());
  if (message.text.size() > kMostText || in.left() != 0) {
    throw Error(ErrorKind::protocol, "a control message of the wrong length");
  }
  return message;
}

std::uint32_t signature_of(const std::string& description) {
  std::uint32_t hash = 2166136261U;  // FNV-1a
  for (const char c : description) hash = (hash ^ static_cast<std::uint8_t>(c)) * 16777619U;
  return hash;
}

}  // namespace torch_iroh::collective
