// WebSocket frames (RFC 6455) as a server sees them: takes masked client frames out of whatever the socket gave, and
// writes the headers of unmasked server frames. Pure: no socket, no clock. Does the upgrade neither, which is HTTP.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace torch_iroh::relay {

using Bytes = std::vector<std::byte>;
using View = std::span<const std::byte>;

enum class Opcode : std::uint8_t { more = 0, text = 1, binary = 2, close = 8, ping = 9, pong = 10 };

// The client broke the rules and is sent away with this close code (RFC 6455, section 7.4.1).
class Violation : public std::runtime_error {
 public:
  Violation(std::uint16_t code, const std::string& text) : std::runtime_error(text), code_(code) {}
  std::uint16_t code() const { return code_; }

 private:
  std::uint16_t code_;
};

inline constexpr std::uint16_t kCloseProtocol = 1002;
inline constexpr std::uint16_t kCloseData = 1003;
inline constexpr std::uint16_t kCloseTooBig = 1009;

struct Frame {
  Opcode opcode{};
  bool last = false;  // of its message
  std::uint32_t mask = 0;
  View masked;  // payload as it came; valid until the reader is used again
};

// Writes masked[from..] without its mask to `to`, which has room for masked.size() - from bytes.
void unmask(const Frame& frame, std::size_t from, std::byte* to);

class FrameReader {
 public:
  explicit FrameReader(std::size_t most_payload) : most_payload_(most_payload) {}

  // The next frame of what was kept and `input`, whose bytes are consumed; none: all of `input` is consumed. Keeps at
  // most one frame that is not complete yet. Throws Violation; the reader is of no use after that.
  std::optional<Frame> next(View& input);

 private:
  struct Header {
    std::size_t bytes;
    std::size_t payload;
  };
  std::optional<Header> header(View bytes) const;
  std::optional<Frame> complete(View bytes) const;
  bool keep(View& input, std::size_t until);

  const std::size_t most_payload_;
  Bytes kept_;         // the beginning of a frame
  bool used_ = false;  // kept_ is the frame that next() returned last
};

inline constexpr std::size_t kMostServerHeader = 10;
// Writes the header of a server's frame, and returns its length.
std::size_t put_header(Opcode opcode, std::size_t payload, std::byte* to);

}  // namespace torch_iroh::relay
