// The frame that travels on every stream: a fixed header and a payload. Knows its bytes, not who sends them.
//
//   0 u16 magic "TI"     2 u8 type        3 u8 wire version   4 u32 payload length (at most kMaxFrameBytes)
//   8 u64 group         16 u64 sequence  24 u32 message      28 u32 chunk
//  32 u32 signature     36 u32 number    all little-endian
//
// Frames of a lane are numbered 1, 2, ... (modulo 2^32, past 0) by their sender, whatever connection carries them: that
// is how a lane moves to another connection and loses or doubles nothing. Hello, heartbeat and ack have number 0: they
// belong to their connection.
//
// The version comes before anything that could change with it; the length is judged before anything is allocated.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace torch_iroh::link {

inline constexpr std::size_t kHeaderBytes = 40;
inline constexpr std::uint32_t kMaxFrameBytes = 1 << 20;
inline constexpr std::uint8_t kWireVersionMin = 2;
inline constexpr std::uint8_t kWireVersionMax = 2;
inline constexpr const char* kAlpn = "torch-iroh/2";

enum class FrameType : std::uint8_t {
  hello = 1,      // first on every stream; payload: HelloBody
  data = 2,       // a chunk of a message of a group
  control = 3,    // a small message of a group, in order (all on lane 0)
  heartbeat = 4,  // a sign of life, empty; sequence: 0, or the sender's clock to be sent back with chunk 1;
                  // message: the road that it asks about
  goodbye = 5,    // the sender leaves `group`; the group's last on every lane, message: how many lanes
  closing = 6,    // the sender wants to end the link; the last on every lane, message: how many lanes
  farewell = 7,   // the sender has read `closing` on every lane, and so all that came before
  ack = 8,        // how far the sender has come on each lane; payload: list of Ack
};

struct FrameHeader {
  FrameType type = FrameType::heartbeat;
  std::uint8_t version = kWireVersionMax;
  std::uint32_t length = 0;
  std::uint64_t group = 0;
  std::uint64_t sequence = 0;
  std::uint32_t message = 0;
  std::uint32_t chunk = 0;
  std::uint32_t signature = 0;
  std::uint32_t number = 0;

  bool operator==(const FrameHeader&) const = default;
};

std::array<std::byte, kHeaderBytes> encode(const FrameHeader& header);

// Throws Error(protocol) naming the field that is wrong.
FrameHeader decode(std::span<const std::byte, kHeaderBytes> bytes);

// Whether a frame has a number in its lane.
bool is_numbered(FrameType type);
// The number after `number`, and whether `left` comes before `right`; both know that numbers wrap around.
std::uint32_t next_number(std::uint32_t number);
bool number_before(std::uint32_t left, std::uint32_t right);

// What a stream says about itself before anything else.
struct HelloBody {
  std::uint8_t lane = 0;      // 0: control, 1...: data, kPulse: heartbeats and acks of the connection
  std::uint8_t road = 0;      // which of the sender's roads its connection is
  std::uint64_t session = 0;  // of the sender's end of the link: another one is another link
  static constexpr std::size_t kBytes = 16;
  static constexpr std::uint8_t kMaxLanes = 65;
  static constexpr std::uint8_t kMaxRoads = 17;
  static constexpr std::uint8_t kPulse = 255;
};

// The receiver of `lane` has every frame before `next`.
struct Ack {
  std::uint8_t lane = 0;
  std::uint32_t next = 1;
  static constexpr std::size_t kBytes = 8;
};
std::vector<std::byte> encode(const std::vector<Ack>& acks);
std::vector<Ack> decode_acks(std::span<const std::byte> bytes);

std::array<std::byte, HelloBody::kBytes> encode(const HelloBody& hello);
HelloBody decode_hello(std::span<const std::byte> bytes);

}  // namespace torch_iroh::link
