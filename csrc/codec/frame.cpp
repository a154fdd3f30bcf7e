#include "codec/frame.hpp"

#include <bit>
#include <cstring>

#include "base/bytes.hpp"
#include "codec/parameters.hpp"

namespace torch_iroh::codec {

namespace {

constexpr std::uint32_t kMagic = 0x66634954;  // "TIcf"
constexpr std::uint8_t kVersion = 1;
constexpr std::size_t kChecksumAt = 24;

struct Header {
  std::uint32_t magic = kMagic;
  std::uint8_t version = kVersion;
  std::uint8_t kind = 0;
  std::uint8_t log2_block = 0;
  std::uint8_t wide_scale = 0;
  std::uint64_t count = 0;
  std::uint64_t density_bits = 0;

  bool operator==(const Header&) const = default;
};
static_assert(sizeof(Header) == kChecksumAt && std::has_unique_object_representations_v<Header>);

Header header_of(const Codec& codec, std::uint64_t count) {
  Header header;
  header.kind = static_cast<std::uint8_t>(codec.kind);
  if (takes_block(codec.kind)) header.log2_block = static_cast<std::uint8_t>(std::countr_zero(codec.block));
  header.wide_scale = takes_scale(codec.kind) && codec.wide_scale ? 1 : 0;
  header.count = count;
  if (is_sparse(codec.kind)) header.density_bits = std::bit_cast<std::uint64_t>(codec.density);
  return header;
}

Header read_header(std::span<const std::byte> frame) {
  Header header;
  std::memcpy(&header, frame.data(), sizeof header);
  return header;
}

std::string described(const Header& header) {
  const auto name = name_of(static_cast<Kind>(header.kind));
  std::string text = name.empty() ? "an unknown codec (" + std::to_string(header.kind) + ")" : std::string(name);
  std::string more;
  const auto say = [&](const std::string& part) { more += (more.empty() ? "" : ", ") + part; };
  if (header.log2_block != 0) say("block " + (header.log2_block < 32 ? std::to_string(1u << header.log2_block) : "?"));
  if (header.wide_scale != 0) say("fp32 scales");
  if (header.density_bits != 0) say("density " + number_text(std::bit_cast<double>(header.density_bits)));
  return text + (more.empty() ? "" : " (" + more + ")");
}

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorKind::protocol, "codec: " + text);
}

// ---- checksum ----

constexpr std::uint64_t kOdd = 0x9fb21c651e98df25u;

std::uint64_t step(std::uint64_t lane, std::uint64_t word) {
  return std::rotl((lane ^ word) * kOdd, 29);
}

// Bytes in stripes of eight words; the last stripe is filled with zeros, which the length tells from bytes.
class Hash {
 public:
  void absorb(std::span<const std::byte> bytes) {
    length_ += bytes.size();
    const std::byte* at = bytes.data();
    for (; bytes.size() >= kStripe; bytes = bytes.subspan(kStripe), at += kStripe) stripe(at);
    if (bytes.empty()) return;
    std::byte last[kStripe] = {};
    std::memcpy(last, bytes.data(), bytes.size());
    stripe(last);
  }
  std::uint64_t value() const {
    std::uint64_t sum = length_;
    for (const std::uint64_t lane : lanes_) sum = step(sum, lane);
    sum ^= sum >> 32;
    sum *= kOdd;
    return sum ^ (sum >> 29);
  }

 private:
  static constexpr std::size_t kLanes = 8, kStripe = 8 * kLanes;

  void stripe(const std::byte* at) {
    std::uint64_t words[kLanes];
    std::memcpy(words, at, sizeof words);
    for (std::size_t i = 0; i < kLanes; ++i) lanes_[i] = step(lanes_[i], words[i]);
  }

  std::uint64_t lanes_[kLanes] = {1, 2, 3, 4, 5, 6, 7, 8};
  std::uint64_t length_ = 0;
};

std::uint64_t checksum_of_frame(std::span<const std::byte> frame) {
  Hash hash;
  hash.absorb(frame.first(kChecksumAt));
  hash.absorb(frame.subspan(kHeaderBytes));
  return hash.value();
}

}  // namespace

std::uint64_t checksum(std::span<const std::byte> bytes) {
  Hash hash;
  hash.absorb(bytes);
  return hash.value();
}

void write_header(const Codec& codec, std::uint64_t count, std::span<std::byte> frame) {
  const Header header = header_of(codec, count);
  std::memcpy(frame.data(), &header, sizeof header);
}

void seal(std::span<std::byte> frame) {
  const std::uint64_t sum = checksum_of_frame(frame);
  std::memcpy(frame.data() + kChecksumAt, &sum, sizeof sum);
}

void check_frame(const Codec& codec, std::uint64_t count, std::size_t bytes, std::span<const std::byte> frame) {
  const Header expected = header_of(codec, count);
  const std::string wanted = described(expected) + " for " + std::to_string(count);
  const bool has_header = frame.size() >= kHeaderBytes;
  const Header found = has_header ? read_header(frame) : expected;
  const bool readable = found.magic == kMagic && found.version == kVersion;
  if (frame.size() != bytes && (!readable || found == expected)) {
    refuse("a frame of " + std::to_string(frame.size()) + " bytes, expected the " + std::to_string(bytes) + " of " +
           wanted);
  }
  if (found.magic != kMagic) refuse("these bytes are no frame of a codec (wrong magic), expected " + wanted);
  if (found.version != kVersion) {
    refuse("a frame of version " + std::to_string(found.version) + ", this build reads version " +
           std::to_string(kVersion));
  }
  if (found != expected) {
    refuse("a frame of " + described(found) + " for " + std::to_string(found.count) + " values, expected " + wanted);
  }
  std::uint64_t sum;
  std::memcpy(&sum, frame.data() + kChecksumAt, sizeof sum);
  if (sum != checksum_of_frame(frame)) {
    refuse("a frame of " + wanted + " values: its checksum is wrong: it was changed on its way");
  }
}

}  // namespace torch_iroh::codec
