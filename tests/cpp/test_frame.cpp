// Every byte that comes from a peer or a store: frame headers, hellos, control messages, membership records. Pinned in
// hex, refused field by field, and fuzzed.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "collective/messages.hpp"
#include "link/frame.hpp"
#include "support.hpp"
#include "transport/membership.hpp"

namespace {

using namespace torch_iroh;
using namespace torch_iroh::testing;
using collective::Message;
using collective::MessageKind;
using link::FrameHeader;
using link::FrameType;
using link::HelloBody;
using link::kHeaderBytes;
using transport::Record;
using Bytes = std::vector<std::byte>;

Bytes to_bytes(std::span<const std::byte> bytes) {
  return {bytes.begin(), bytes.end()};
}
Bytes to_bytes(const std::vector<std::uint8_t>& bytes) {
  return to_bytes(std::as_bytes(std::span(bytes)));
}
std::vector<std::uint8_t> to_octets(std::span<const std::byte> bytes) {
  const auto* from = reinterpret_cast<const std::uint8_t*>(bytes.data());
  return {from, from + bytes.size()};
}

FrameHeader decode_header(const Bytes& bytes) {
  return link::decode(std::span<const std::byte, kHeaderBytes>(bytes.data(), kHeaderBytes));
}

FrameHeader sample_header() {
  FrameHeader header;
  header.type = FrameType::data;
  header.length = 0x12345;
  header.group = 0x1122334455667788;
  header.sequence = 0x8000000000000007;
  header.message = 0xa1b2c3d4;
  header.chunk = 0x0a0b0c0d;
  header.signature = 0xdeadbeef;
  header.number = 0x01020304;
  return header;
}

Record sample_record() {
  Record record;
  record.chunk_bytes = 0x40000;
  record.members = "0,1";
  record.host = "ab";
  for (std::size_t i = 0; i < record.addr.id.size(); ++i) record.addr.id[i] = static_cast<std::byte>(i);
  record.addr.relay_url = "r";
  record.addr.direct = {"1.2.3.4:5", "[::1]:6"};
  record.site = "s";
  record.sharing = {"hh", 7, 8, 9, 10, 11};
  record.plan = "*=ring";
  record.probe = true;
  record.standby.emplace();
  for (std::size_t i = 0; i < record.addr.id.size(); ++i) record.standby->id[i] = static_cast<std::byte>(64 + i);
  record.standby->relay_url = "q";
  return record;
}

bool same(const Message& a, const Message& b) {
  return a.kind == b.kind && a.sequence == b.sequence && a.tag == b.tag && a.bytes == b.bytes && a.text == b.text;
}
bool same(const Record& a, const Record& b) {
  return a.wire_min == b.wire_min && a.wire_max == b.wire_max && a.chunk_bytes == b.chunk_bytes &&
         a.members == b.members && a.host == b.host && a.addr.id == b.addr.id && a.addr.relay_url == b.addr.relay_url &&
         a.addr.direct == b.addr.direct && a.site == b.site && a.sharing.host == b.sharing.host &&
         a.sharing.pid == b.sharing.pid && a.sharing.memory == b.sharing.memory && a.sharing.nonce == b.sharing.nonce &&
         a.sharing.bell == b.sharing.bell && a.sharing.bell_nonce == b.sharing.bell_nonce && a.plan == b.plan &&
         a.probe == b.probe && a.standby.has_value() == b.standby.has_value() &&
         (!a.standby || (a.standby->id == b.standby->id && a.standby->relay_url == b.standby->relay_url));
}

// The refusal must be an Error(protocol) that says `part`.
template <typename Call>
void expect_refused(Call call, const std::string& part) {
  try {
    call();
    FAIL_CHECK("accepted; wanted a refusal with: " << part);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::protocol);
    CHECK_MESSAGE(contains(error.what(), part), std::string(error.what()));
  }
}

std::string random_address(std::mt19937_64& random) {
  const auto number = [&](std::uint64_t below) { return std::to_string(random() % below); };
  const std::string port = ":" + number(65'536);
  if (random() % 2 == 0) return "[fe80::" + number(10'000) + "]" + port;
  return number(256) + "." + number(256) + "." + number(256) + "." + number(256) + port;
}

// What a reader makes of a peer's text.
std::byte shown(std::byte byte) {
  return byte < std::byte{' '} || byte > std::byte{'~'} ? std::byte{'?'} : byte;
}

std::string random_text(std::mt19937_64& random, std::size_t most) {
  std::string text(random() % (most + 1), '\0');
  for (char& c : text) c = static_cast<char>(' ' + random() % 95);
  return text;
}

// Random bytes, and `valid` ones with a few spoiled, cut off or added. `check` gets each: it throws Error(protocol) or
// returns whether what it read is what was written.
void fuzz(const std::function<Bytes(std::mt19937_64&)>& valid, const std::function<bool(const Bytes&)>& check,
          bool fixed_size) {
  constexpr std::uint64_t kSeed = 20;
  std::mt19937_64 random(kSeed);
  const TimePoint until = Clock::now() + (kSanitized ? milliseconds(500) : milliseconds(1000));
  std::uint64_t accepted = 0, refused = 0;
  for (std::uint64_t round = 0; round < 2'000'000 && Clock::now() < until; ++round) {
    Bytes bytes = valid(random);
    if (random() % 4 == 0) {
      if (!fixed_size) bytes.resize(random() % 200);
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    } else {
      for (std::uint64_t i = random() % 4; i > 0 && !bytes.empty(); --i) {
        // Mostly near the front: that is where kinds, versions and lengths are.
        const std::size_t range = random() % 2 == 0 ? std::min<std::size_t>(bytes.size(), 48) : bytes.size();
        bytes[random() % range] = static_cast<std::byte>(random() % 3 == 0 ? 0xff : random());
      }
      if (!fixed_size && random() % 4 == 0) bytes.resize(random() % (bytes.size() + 8));
    }
    try {
      if (!check(bytes))
        FAIL("seed " << kSeed << " round " << round << ": read otherwise than written: " << hex(bytes));
      ++accepted;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::protocol) {
        FAIL("seed " << kSeed << " round " << round << ": " << error.what() << " for " << hex(bytes));
      }
      ++refused;
    } catch (const std::exception& error) {
      FAIL("seed " << kSeed << " round " << round << ": " << error.what() << " for " << hex(bytes));
    }
  }
  CHECK(accepted > 100);  // or the fuzzer has found nothing but the front door
  CHECK(refused > 100);
}

}  // namespace

// ---- frames ----

TEST_CASE("frame: the header's bytes are pinned") {
  CHECK(hex(link::encode(sample_header())) ==
        "5449"
        "02"
        "02"
        "45230100"
        "8877665544332211"
        "0700000000000080"
        "d4c3b2a1"
        "0d0c0b0a"
        "efbeadde"
        "04030201");
  CHECK(hex(link::encode(FrameHeader{})) == "54490402" + std::string(72, '0'));
  CHECK(static_cast<int>(FrameType::hello) == 1);
  CHECK(static_cast<int>(FrameType::control) == 3);
  CHECK(static_cast<int>(FrameType::goodbye) == 5);
  CHECK(static_cast<int>(FrameType::closing) == 6);
  CHECK(static_cast<int>(FrameType::farewell) == 7);
  CHECK(static_cast<int>(FrameType::ack) == 8);
}

TEST_CASE("frame: every header comes back as it went") {
  std::mt19937_64 random(1);
  for (int round = 0; round < 10'000; ++round) {
    FrameHeader header;
    header.type = static_cast<FrameType>(1 + random() % 8);
    header.length = static_cast<std::uint32_t>(random() % (link::kMaxFrameBytes + 1));
    header.group = random();
    header.sequence = random();
    header.message = static_cast<std::uint32_t>(random());
    header.chunk = static_cast<std::uint32_t>(random());
    header.signature = static_cast<std::uint32_t>(random());
    header.number = static_cast<std::uint32_t>(random());
    const auto bytes = link::encode(header);
    if (link::decode(bytes) != header) FAIL("seed 1 round " << round << ": " << hex(bytes));
  }
}

TEST_CASE("frame: each wrong field is refused by name") {
  const Bytes good = to_bytes(link::encode(sample_header()));
  const auto refused = [&](std::size_t at, int value, const std::string& why) {
    Bytes bad = good;
    bad[at] = static_cast<std::byte>(value);
    expect_refused([&] { decode_header(bad); }, why);
  };
  CHECK(decode_header(good) == sample_header());
  refused(0, 'I', "magic");
  refused(1, 'T', "magic");
  for (const int type : {0, 9, 255}) refused(2, type, "unknown type " + std::to_string(type));
  for (const int version : {0, 1, 3, 255}) refused(3, version, "wire version " + std::to_string(version));

  FrameHeader header = sample_header();
  header.length = link::kMaxFrameBytes;
  CHECK(link::decode(link::encode(header)).length == link::kMaxFrameBytes);
  for (const std::uint32_t length : {link::kMaxFrameBytes + 1, 0xffffffffU}) {
    header.length = length;
    expect_refused([&] { link::decode(link::encode(header)); },
                   "length " + std::to_string(length) + " is over the limit");
  }
}

TEST_CASE("frame: a header is accepted only as the bytes it would be written as") {
  fuzz(
      [](std::mt19937_64& random) {
        FrameHeader header = sample_header();
        header.type = static_cast<FrameType>(1 + random() % 8);
        header.group = random();
        return to_bytes(link::encode(header));
      },
      [](const Bytes& bytes) {
        const FrameHeader header = decode_header(bytes);
        return header.length <= link::kMaxFrameBytes && to_bytes(link::encode(header)) == bytes;
      },
      true);
}

TEST_CASE("frame: numbers wrap around past zero, and know which comes first") {
  CHECK(link::next_number(0) == 1);
  CHECK(link::next_number(7) == 8);
  CHECK(link::next_number(0xffffffffU) == 1);
  CHECK(link::number_before(1, 2));
  CHECK_FALSE(link::number_before(2, 2));
  CHECK_FALSE(link::number_before(3, 2));
  CHECK(link::number_before(0xfffffff0U, 5));
  CHECK_FALSE(link::number_before(5, 0xfffffff0U));
}

TEST_CASE("hello: pinned, and every lane and road is either one that exists or refused") {
  CHECK(hex(link::encode(HelloBody{3, 9, 0x1122334455667788})) == "03090000000000008877665544332211");
  for (int lane = 0; lane < 256; ++lane) {
    for (int road = 0; road < 256; ++road) {
      const auto bytes = link::encode(HelloBody{static_cast<std::uint8_t>(lane), static_cast<std::uint8_t>(road), 5});
      if ((lane < HelloBody::kMaxLanes || lane == HelloBody::kPulse) && road < HelloBody::kMaxRoads) {
        const HelloBody hello = link::decode_hello(bytes);
        if (hello.lane != lane || hello.road != road || hello.session != 5) FAIL("lane " << lane << " of " << road);
      } else {
        try {
          link::decode_hello(bytes);
          FAIL("accepted lane " << lane << " of road " << road);
        } catch (const Error& error) {
          if (error.kind() != ErrorKind::protocol) FAIL(std::string(error.what()));
        }
      }
    }
  }
  for (const std::size_t size : {0, 1, 15, 17, 100}) {
    expect_refused([&] { link::decode_hello(Bytes(size, std::byte{2})); },
                   "hello of " + std::to_string(size) + " bytes");
  }
}

TEST_CASE("hello: fuzz") {
  fuzz([](std::mt19937_64& random) { return to_bytes(link::encode(HelloBody{1, 2, random()})); },
       [](const Bytes& bytes) { return to_bytes(link::encode(link::decode_hello(bytes))) == bytes; }, false);
}

TEST_CASE("ack: pinned, comes back as it went, and no lane that cannot be") {
  CHECK(hex(link::encode(std::vector<link::Ack>{{2, 0x1020304}, {64, 1}})) == "02000000040302014000000001000000");
  CHECK(link::decode_acks({}).empty());
  const auto acks = link::decode_acks(link::encode(std::vector<link::Ack>{{2, 9}, {0, 0xffffffffU}}));
  REQUIRE(acks.size() == 2);
  CHECK(acks[0].lane == 2);
  CHECK(acks[1].next == 0xffffffffU);
  expect_refused([] { link::decode_acks(link::encode(std::vector<link::Ack>{{65, 1}})); }, "ack for lane 65");
  expect_refused([] { link::decode_acks(link::encode(std::vector<link::Ack>{{1, 0}})); }, "ack for lane 1");
  expect_refused([] { link::decode_acks(Bytes(7)); }, "ack of 7 bytes");
  expect_refused([] { link::decode_acks(Bytes(66 * 8)); }, "ack of 528 bytes");
  fuzz(
      [](std::mt19937_64& random) {
        return link::encode(std::vector<link::Ack>{{1, 1 + static_cast<std::uint32_t>(random() % 99)}});
      },
      [](const Bytes& bytes) { return link::encode(link::decode_acks(bytes)) == bytes; }, false);
}

// ---- control messages ----

TEST_CASE("message: the bytes are pinned") {
  Message message{.kind = MessageKind::offer};
  message.sequence = 5;
  message.tag = -2;
  message.bytes = 0x1000;
  message.text = "hi";
  CHECK(hex(collective::encode(message)) ==
        "03"
        "0500000000000000"
        "feffffff"
        "0010000000000000"
        "0200"
        "6869");
  CHECK(static_cast<int>(MessageKind::call) == 1);
  CHECK(static_cast<int>(MessageKind::grant) == 4);
  CHECK(static_cast<int>(MessageKind::arrive) == 5);
  CHECK(static_cast<int>(MessageKind::verdict) == 6);
  // FNV-1a, as published: fnv1a_32("") and fnv1a_32("foobar").
  CHECK(collective::signature_of("") == 0x811c9dc5U);
  CHECK(collective::signature_of("foobar") == 0xbf9cf968U);
}

TEST_CASE("message: every message comes back as it went, its text cut at the limit") {
  std::mt19937_64 random(2);
  for (int round = 0; round < 2000; ++round) {
    Message message;
    message.kind = static_cast<MessageKind>(1 + random() % 6);
    message.sequence = random();
    message.tag = static_cast<std::int32_t>(random());
    message.bytes = random();
    message.text = random_text(random, 300);
    if (!same(collective::decode_message(collective::encode(message)), message)) FAIL("seed 2 round " << round);
  }
  for (const std::size_t size : {std::size_t{0}, collective::kMostText - 1, collective::kMostText,
                                 collective::kMostText + 1, std::size_t{70'000}}) {
    Message message;
    message.text.assign(size, 'x');
    const Message read = collective::decode_message(collective::encode(message));
    CHECK(read.text.size() == std::min(size, collective::kMostText));
  }
}

TEST_CASE("message, record: what a terminal would obey is shown as question marks") {
  Message message;
  message.text = "a\x1b[2Jb\n\xff";
  CHECK(collective::decode_message(collective::encode(message)).text == "a?[2Jb??");
  Record record = sample_record();
  record.host = "h\x07";
  record.members = "0\r1";
  CHECK(transport::decode_record(encode(record)).host == "h?");
  CHECK(transport::decode_record(encode(record)).members == "0?1");
}

TEST_CASE("message: unknown kinds and wrong lengths are refused") {
  Message message;
  message.text = "text";
  const Bytes good = collective::encode(message);
  for (const int kind : {0, 7, 255}) {
    Bytes bad = good;
    bad[0] = static_cast<std::byte>(kind);
    expect_refused([&] { collective::decode_message(bad); }, "unknown control message " + std::to_string(kind));
  }
  for (std::size_t size = 0; size < good.size(); ++size) {
    expect_refused([&] { collective::decode_message(std::span(good).first(size)); }, "shorter than its fields");
  }
  Bytes longer = good;
  longer.push_back(std::byte{0});
  expect_refused([&] { collective::decode_message(longer); }, "wrong length");

  Bytes over = good;  // a text over the limit, whole
  over.resize(over.size() - message.text.size() + collective::kMostText + 1);
  over[21] = static_cast<std::byte>((collective::kMostText + 1) & 0xff);
  over[22] = static_cast<std::byte>((collective::kMostText + 1) >> 8);
  expect_refused([&] { collective::decode_message(over); }, "wrong length");
}

TEST_CASE("message: fuzz") {
  fuzz(
      [](std::mt19937_64& random) {
        Message message;
        message.kind = static_cast<MessageKind>(1 + random() % 6);
        message.sequence = random() % 100;
        message.text = random_text(random, 40);
        return collective::encode(message);
      },
      [](const Bytes& bytes) {
        Bytes wanted = bytes;  // the text is last
        for (std::size_t i = 23; i < wanted.size(); ++i) wanted[i] = shown(wanted[i]);
        return collective::encode(collective::decode_message(bytes)) == wanted;
      },
      false);
}

// ---- membership records ----

TEST_CASE("record: the bytes are pinned") {
  std::string id;
  std::string standby;
  for (int i = 0; i < 32; ++i) id += hex(std::array{static_cast<std::byte>(i)});
  for (int i = 64; i < 96; ++i) standby += hex(std::array{static_cast<std::byte>(i)});
  CHECK(hex(to_bytes(encode(sample_record()))) ==
        "54495235"
        "02"
        "02"
        "00000400"
        "0300302c31"
        "02006162" +
            id +
            "010072"
            "0200"
            "0900312e322e332e343a35"
            "07005b3a3a315d3a36"
            "010073"
            "02006868"
            "07000000"
            "08000000"
            "0900000000000000"
            "0a000000"
            "0b00000000000000"
            "06002a3d72696e67"
            "04006e6f6e65"
            "01"
            "01" +
            standby + "010071");
}

TEST_CASE("record: every record comes back as it went") {
  std::mt19937_64 random(3);
  for (int round = 0; round < 500; ++round) {
    Record record;
    record.wire_min = static_cast<std::uint8_t>(random());
    record.wire_max = static_cast<std::uint8_t>(random());
    record.chunk_bytes = static_cast<std::uint32_t>(64 * (1 + random() % 16'384));
    record.members = random_text(random, 500);
    record.host = random_text(random, 50);
    for (std::byte& byte : record.addr.id) byte = static_cast<std::byte>(random());
    if (random() % 2 == 0) record.addr.relay_url = "https://" + random_text(random, 50);
    if (random() % 2 == 0) {
      record.standby.emplace();
      record.standby->relay_url = "https://" + random_text(random, 50);
    }
    for (auto left = random() % 65; left > 0; --left) record.addr.direct.push_back(random_address(random));
    if (!same(transport::decode_record(encode(record)), record)) FAIL("seed 3 round " << round);
  }
}

TEST_CASE("record: texts up to the length field's limit come back whole") {
  Record record = sample_record();
  record.members.assign(65'535, 'm');
  CHECK(same(transport::decode_record(encode(record)), record));
}

TEST_CASE("record: what is no record, cut off, too long, or lists too many addresses is refused") {
  const auto good = encode(sample_record());
  for (std::size_t size = 0; size < good.size(); ++size) {
    const std::vector<std::uint8_t> cut(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size));
    expect_refused([&] { transport::decode_record(cut); }, "shorter than its fields");
  }
  for (std::size_t at = 0; at < 4; ++at) {
    auto bad = good;
    bad[at] ^= 1;
    expect_refused([&] { transport::decode_record(bad); }, "not a torch-iroh record");
  }
  Record record = sample_record();
  record.addr.direct.assign(64, "1.2.3.4:5");
  CHECK(same(transport::decode_record(encode(record)), record));
  record.addr.direct.emplace_back("1.2.3.4:5");
  expect_refused([&] { transport::decode_record(encode(record)); }, "too many addresses");

  auto longer = good;
  longer.push_back(0);
  expect_refused([&] { transport::decode_record(longer); }, "behind its end");
}

TEST_CASE("record: addresses and chunk sizes that iroh or the group could not bear are refused") {
  for (const char* address :
       {"", ":", ":5", "1.2.3.4", "1.2.3.4:", "1.2.3:4", "1.2.3.4:65536", "1.2.3.4:123456", "1.2.3.4:-1", "1.2.3.256:1",
        "host:1", "::1:5", "[::1]", "[::1:5", "[1.2.3.4]:5", "[]:1", " 1.2.3.4:5", "1.2.3.4:5 ", "1.2.3.4:\x1b"}) {
    Record record = sample_record();
    record.addr.direct = {address};
    INFO(std::string(address));
    expect_refused([&] { transport::decode_record(encode(record)); }, "is not an address");
  }
  for (const char* address : {"0.0.0.0:0", "255.255.255.255:65535", "[::]:1", "[2001:db8::ff00:42:8329]:443"}) {
    Record record = sample_record();
    record.addr.direct = {address};
    CHECK(same(transport::decode_record(encode(record)), record));
  }
  for (const std::uint32_t bytes : {0U, 1U, 63U, 65U, (1U << 20) + 64, 0xffffffffU}) {
    Record record = sample_record();
    record.chunk_bytes = bytes;
    expect_refused([&] { transport::decode_record(encode(record)); }, "chunks of " + std::to_string(bytes) + " bytes");
  }
}

TEST_CASE("record: fuzz") {
  fuzz(
      [](std::mt19937_64& random) {
        Record record = sample_record();
        record.members = random_text(random, 20);
        if (random() % 2 == 0) record.addr.relay_url.reset();
        if (random() % 2 == 0) record.standby.reset();
        record.addr.direct.resize(random() % 3);
        return to_bytes(encode(record));
      },
      [](const Bytes& bytes) {
        const Record record = transport::decode_record(to_octets(bytes));
        const auto again = encode(record);
        return again.size() == bytes.size() && same(transport::decode_record(again), record);
      },
      false);
}
