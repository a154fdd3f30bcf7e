// The relay's hub without sockets: websocket frames in any pieces, what becomes of a datagram, whose session receives,
// what a slow receiver loses, and what a hostile client can send.
#include "relay/hub.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>

#include "support.hpp"

namespace {

using namespace torch_iroh;
using namespace torch_iroh::testing;
using relay::Bytes;
using relay::ClientId;
using relay::Fed;
using relay::Hub;
using relay::Key;
using relay::Opcode;
using relay::View;

constexpr std::size_t kCap = 4096;
constexpr int kBinary = 0x82;

Bytes to_bytes(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

Bytes from_hex(std::string_view text) {
  Bytes bytes;
  std::string digits;
  std::copy_if(text.begin(), text.end(), std::back_inserter(digits), [](char c) { return c != ' '; });
  for (std::size_t i = 0; i < digits.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoi(digits.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

Key key_of(int number) {
  Key key{};
  key.fill(static_cast<std::byte>(number));
  return key;
}

Bytes joined(std::initializer_list<View> parts) {
  Bytes all;
  for (const View part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

// A client's frame, written as RFC 6455 has it, apart from the code under test.
Bytes framed(View payload, int first = kBinary, std::uint32_t mask = 0x01e2c3a4) {
  Bytes frame{static_cast<std::byte>(first)};
  const std::size_t size = payload.size();
  const int length_bytes = size < 126 ? 0 : size < 65536 ? 2 : 8;
  frame.push_back(static_cast<std::byte>(0x80 | (length_bytes == 0 ? size : length_bytes == 2 ? 126 : 127)));
  for (int i = length_bytes - 1; i >= 0; --i) frame.push_back(static_cast<std::byte>(size >> (8 * i)));
  std::byte masks[4];
  for (int i = 0; i < 4; ++i) frame.push_back(masks[i] = static_cast<std::byte>(mask >> (8 * i)));
  for (std::size_t i = 0; i < size; ++i) frame.push_back(payload[i] ^ masks[i % 4]);
  return frame;
}

Bytes message(int type, View body) {
  const std::byte first{static_cast<unsigned char>(type)};
  return joined({View(&first, 1), body});
}

struct World {
  Hub hub{kCap, 12345};
  ClientId add(int number) {
    const ClientId client = hub.open();
    hub.confirm(client, key_of(number));
    read(client);
    return client;
  }
  Bytes read(ClientId client, std::size_t limit = 1 << 20) {
    Bytes all(hub.next_size(client, limit));
    hub.take_into(client, all.data(), all.size());
    return all;
  }
  Fed send(ClientId from, int to, std::string_view packet) {
    return hub.feed(from, framed(message(4, joined({key_of(to), to_bytes("\x02"), to_bytes(packet)}))));
  }
};

std::string violation_of(const Bytes& frame) {
  World world;
  const ClientId client = world.add(1);
  const Fed fed = world.hub.feed(client, frame);
  CHECK(fed.leaves == !fed.violation.empty());
  return fed.violation;
}

}  // namespace

TEST_CASE("relay: frames as iroh pins them") {
  // Key, ECN 3, segment size 6, "Hello World!": the hex of iroh-relay's own snapshot tests, from types 5 and 4 to 7
  // and 6.
  const std::string iroh_key = "197f6b23e16c8532c6abc838facd5ea789be0c76b292033403 9bfa8b3d368d61";
  Key key;
  std::ranges::copy(from_hex(iroh_key), key.begin());
  World world;
  const ClientId iroh = world.hub.open();
  world.hub.confirm(iroh, key);
  CHECK(hex(world.read(iroh)) == "820102");  // ServerConfirmsAuth
  const ClientId other = world.add(9);
  for (const auto& [out, in, rest] : {std::tuple("05", "07", "03 0006 48656c6c6f20576f726c6421"),
                                      std::tuple("04", "06", "03 48656c6c6f20576f726c6421")}) {
    const Bytes sent = from_hex(std::string(out) + iroh_key + rest);
    CHECK(world.hub.feed(other, framed(sent)).violation.empty());
    const Bytes expected = joined({from_hex(in), key_of(9), from_hex(rest)});
    const Bytes got = world.read(iroh);
    CHECK(hex(got) == hex(joined({from_hex("82"), message(static_cast<int>(expected.size()), expected)})));
    world.hub.feed(iroh, framed(joined({from_hex(out), key_of(9), from_hex(rest)})));
    CHECK(hex(world.read(other)).substr(4) == hex(from_hex(std::string(in) + iroh_key + rest)));
  }
  world.hub.feed(other, framed(from_hex("092a2a2a2a2a2a2a2a")));
  CHECK(hex(world.read(other)) == "82090a2a2a2a2a2a2a2a2a");
  world.hub.close(iroh);
  CHECK(hex(world.read(other)) == "822108" + hex(key));
  CHECK(world.hub.counters().gone_notices == 1);
}

TEST_CASE("relay: frames in any pieces, of all sizes and masks, come out whole") {
  std::mt19937 random(20261201);
  World world;
  const ClientId from = world.hub.open();
  world.hub.confirm(from, key_of(1));
  Hub wide(64 << 20, 7);
  const ClientId a = wide.open();
  const ClientId b = wide.open();
  wide.confirm(a, key_of(1));
  wide.confirm(b, key_of(2));
  Bytes stream;
  Bytes expected = from_hex("820102");
  for (const std::size_t size : {0u, 1u, 7u, 8u, 90u, 91u, 92u, 93u, 125u, 126u, 1200u, 12000u, 65470u, 65503u}) {
    Bytes packet(size);
    for (auto& byte : packet) byte = static_cast<std::byte>(random());
    const Bytes sent = joined({key_of(2), to_bytes("\x01"), packet});
    const Bytes frame = framed(message(4, sent), kBinary, random());
    stream.insert(stream.end(), frame.begin(), frame.end());
    // The same in three parts with a ping of the websocket between them.
    const Bytes whole = message(4, sent);
    const std::size_t cut = random() % whole.size();
    for (const Bytes& part : {framed(View(whole).first(cut), 0x02, random()), framed(to_bytes("hi"), 0x89, random()),
                              framed(View(whole).subspan(cut), 0x00, random()), framed({}, 0x80, random())}) {
      stream.insert(stream.end(), part.begin(), part.end());
    }
    const Bytes received = message(6, joined({key_of(1), to_bytes("\x01"), packet}));
    std::byte header[relay::kMostServerHeader];
    const std::size_t header_bytes = relay::put_header(Opcode::binary, received.size(), header);
    for (int i = 0; i < 2; ++i) {
      expected.insert(expected.end(), header, header + header_bytes);
      expected.insert(expected.end(), received.begin(), received.end());
    }
  }
  const int rounds = kSanitized ? 3 : 12;
  for (int round = 0; round < rounds; ++round) {
    View left = stream;
    while (!left.empty()) {
      const std::size_t most = round == 0 ? 1 : round == 1 ? left.size() : 1 + random() % (1 << (random() % 18));
      const std::size_t count = std::min(most, left.size());
      const Fed fed = wide.feed(a, left.first(count));
      REQUIRE_MESSAGE(fed.violation.empty(), fed.violation);
      left = left.subspan(count);
    }
    Bytes got;
    while (const std::size_t size = wide.next_size(b, 100000)) {
      const std::size_t before = got.size();
      got.resize(before + size);
      wide.take_into(b, got.data() + before, size);
    }
    REQUIRE(got.size() == expected.size());
    CHECK((got == expected));
    expected.erase(expected.begin(), expected.begin() + (round == 0 ? 3 : 0));
  }
}

TEST_CASE("relay: what a client must not send is refused, and nothing else") {
  const Bytes ping = message(9, to_bytes("12345678"));
  CHECK(violation_of(framed(ping)).empty());
  CHECK(contains(violation_of(framed(ping, 0xc2)), "reserved bits"));
  Bytes unmasked = framed(ping);
  unmasked[1] &= std::byte{0x7f};
  CHECK(contains(violation_of(unmasked), "without a mask"));
  CHECK(contains(violation_of(framed(ping, 0x83)), "opcode 3"));
  CHECK(contains(violation_of(framed(ping, 0x8b)), "opcode 11"));
  CHECK(contains(violation_of(framed(ping, 0x81)), "text"));
  CHECK(contains(violation_of(framed(ping, 0x80)), "never began"));
  CHECK(contains(violation_of(joined({framed(ping, 0x02), framed(ping)})), "inside another"));
  CHECK(contains(violation_of(framed({})), "empty"));
  CHECK(contains(violation_of(framed(Bytes(126), 0x89)), "control frame"));
  CHECK(contains(violation_of(framed({}, 0x09)), "control frame"));
  CHECK(contains(violation_of(framed(message(9, to_bytes("1234567")))), "another length"));
  CHECK(contains(violation_of(framed(message(4, key_of(2)))), "shorter"));
  CHECK(contains(violation_of(framed(message(5, joined({key_of(2), to_bytes("12")})))), "shorter"));
  for (const int type : {0, 1, 2, 3, 6, 7, 8, 11, 12, 13, 14, 0x44, 255}) {
    CHECK(contains(violation_of(framed(message(type, Bytes(40)))), "type " + std::to_string(type)));
  }
  // Refused by the length alone: none of the bytes has come, nothing is set aside for them.
  CHECK(contains(violation_of(from_hex("82 ff 7fffffffffffffff")), "at most 65537"));
  CHECK(contains(violation_of(from_hex("82 ff 0000000000010002")), "65538 bytes"));
  CHECK(contains(violation_of(joined({framed(Bytes(40000), 0x02), framed(Bytes(40000), 0x00)})), "in parts"));
  World world;
  const ClientId client = world.add(1);
  CHECK(world.hub.feed(client, framed(to_bytes("\x03\xe8"), 0x88)).leaves);
  CHECK(hex(world.read(client)) == "880203e8");
}

TEST_CASE("relay: before a client has proved its key it can say one thing only") {
  World world;
  const ClientId client = world.hub.open();
  const Fed fed = world.hub.feed(client, framed(message(1, to_bytes("proof"))));
  REQUIRE(fed.hello);
  CHECK((*fed.hello == to_bytes("proof")));
  CHECK_FALSE(fed.leaves);
  CHECK(contains(world.hub.feed(client, framed(message(1, to_bytes("proof")))).violation, "before"));
  for (const Bytes& first : {message(4, Bytes(100)), message(9, Bytes(8)), message(1, Bytes(1024))}) {
    const ClientId other = world.hub.open();
    CHECK(contains(world.hub.feed(other, framed(first)).violation, "before"));
    CHECK(hex(world.read(other)) == "880203ea");
  }
  CHECK(world.hub.endpoints() == 0);
}

TEST_CASE("relay: the newest session of a key receives, the one before it again when that leaves") {
  World world;
  const ClientId sender = world.add(2);
  const ClientId first = world.add(1);
  const ClientId second = world.add(1);
  CHECK(hex(world.read(first)) == "82020d01");
  world.send(sender, 1, "for the second");
  CHECK(world.read(first).empty());
  CHECK(contains(hex(world.read(second)), hex(to_bytes("for the second"))));
  world.send(first, 2, "an older one may send");
  CHECK(contains(hex(world.read(sender)), hex(to_bytes("an older one may send"))));
  world.hub.close(second);
  CHECK(hex(world.read(first)) == "82020d00");
  world.send(sender, 1, "for the first");
  CHECK(contains(hex(world.read(first)), hex(to_bytes("for the first"))));
  CHECK(world.hub.counters().gone_notices == 0);
  world.hub.close(first);
  CHECK(hex(world.read(sender)) == "822108" + hex(key_of(1)));
  CHECK(world.hub.counters().replaced == 1);
  // Of many sessions of one key the oldest is given back.
  std::vector<ClientId> many;
  for (int i = 0; i < 6; ++i) {
    many.push_back(world.hub.open());
    const auto surplus = world.hub.confirm(many.back(), key_of(3));
    CHECK(surplus.has_value() == (i >= 4));
    if (surplus) {
      CHECK(*surplus == many[static_cast<std::size_t>(i) - 4]);
      world.hub.close(*surplus);
    }
  }
}

TEST_CASE("relay: only those who exchanged packets hear that one is gone") {
  World world;
  std::vector<ClientId> all;
  for (int i = 1; i <= 4; ++i) all.push_back(world.add(i));
  world.send(all[0], 2, "x");
  world.send(all[2], 1, "x");
  world.send(all[0], 9, "x");
  CHECK(world.hub.counters().dropped_unknown_frames == 1);
  for (const ClientId one : all) world.read(one);
  world.hub.close(all[0]);
  CHECK(hex(world.read(all[1])) == "822108" + hex(key_of(1)));
  CHECK(hex(world.read(all[2])) == "822108" + hex(key_of(1)));
  CHECK(world.read(all[3]).empty());
  // The sender that had its receiver in mind does not reach who has left.
  world.send(all[1], 1, "x");
  CHECK(world.hub.counters().dropped_unknown_frames == 2);
  CHECK(world.hub.clients() == 3);
  CHECK(world.hub.endpoints() == 3);
}

TEST_CASE("relay: a slow receiver loses its oldest datagrams, never an answer, and its queue stays bounded") {
  World world;
  const ClientId sender = world.add(1);
  const ClientId slow = world.add(2);
  const std::string filler(500, 'x');
  for (int i = 0; i < 100; ++i) {
    world.send(sender, 2, std::to_string(1000 + i) + filler);
    CHECK(world.hub.queued_bytes() <= kCap);
    if (i == 50) world.hub.feed(slow, framed(message(9, to_bytes("12345678"))));
  }
  const auto& counters = world.hub.counters();
  const Bytes got = world.read(slow);
  const std::size_t frame = 4 + 1 + 32 + 1 + 504;
  const std::size_t kept = (got.size() - 11) / frame;
  CHECK(kept == (kCap - 11) / frame);
  CHECK(hex(View(got).first(11)) == "82090a" + hex(to_bytes("12345678")));
  for (std::size_t i = 0; i < kept; ++i) {
    const View one = View(got).subspan(11 + i * frame, frame);
    CHECK(hex(one.subspan(38, 4)) == hex(to_bytes(std::to_string(1100 - kept + i))));
  }
  CHECK(counters.relayed_frames == 100);
  CHECK(counters.dropped_slow_frames == 100 - kept);
  CHECK(counters.dropped_slow_bytes == (100 - kept) * frame);
  // In small portions too: whole frames, at least one.
  for (int i = 0; i < 7; ++i) world.send(sender, 2, filler);
  std::size_t portions = 0;
  for (Bytes piece; !(piece = world.read(slow, 1)).empty(); ++portions) CHECK(piece.size() == frame - 4);
  CHECK(portions == 7);
  // Answers that nobody reads have a bound as well.
  for (int i = 0; i < 10000; ++i) world.hub.feed(slow, framed(message(9, to_bytes("12345678"))));
  CHECK(world.hub.queued_bytes() <= 64 * 1024);
}

TEST_CASE("relay: the queue of a client that lags behind is what it reads in a fifth of a second") {
  Hub hub(1 << 20, 1);
  const ClientId sender = hub.open();
  const ClientId slow = hub.open();
  hub.confirm(sender, key_of(1));
  hub.confirm(slow, key_of(2));
  const Bytes frame = framed(message(4, joined({key_of(2), Bytes(10001)})));
  const auto fill = [&] {
    for (int i = 0; i < 150; ++i) hub.feed(sender, frame);
    return hub.queued_bytes();
  };
  const auto read = [&](std::size_t bytes) {
    for (std::size_t got = 0; got < bytes;) {
      Bytes piece(hub.next_size(slow, 20000));
      hub.take_into(slow, piece.data(), piece.size());
      got += piece.size();
    }
  };
  constexpr std::size_t about = 11000;  // one frame, or what the sender's answer takes
  CHECK(fill() > (1 << 20) - about);
  hub.adapt(milliseconds(1000));
  read(1000000);
  CHECK(fill() > (1 << 20) - about);  // the rate of a whole interval is not known yet
  hub.adapt(milliseconds(1000));
  CHECK(fill() <= 200000 + about);
  CHECK(hub.queued_bytes() > 200000 - about);
  hub.adapt(milliseconds(1000));  // read nothing: the least
  CHECK(fill() <= relay::kLeastQueue + about);
  // Who has caught up gets its room back, step by step.
  for (int i = 0; i < 4; ++i) {
    while (hub.next_size(slow, 1) > 0) read(1);
    hub.adapt(milliseconds(1000));
  }
  CHECK(fill() > (1 << 20) - about);
}

TEST_CASE("relay: ready clients are named once, and not after they left") {
  World world;
  const ClientId a = world.add(1);
  const ClientId b = world.add(2);
  world.hub.take_ready();
  for (int i = 0; i < 5; ++i) world.send(a, 2, "x");
  CHECK(world.hub.take_ready() == std::vector<ClientId>{b});
  CHECK(world.hub.take_ready().empty());
  world.send(a, 2, "x");
  world.hub.close(b);
  CHECK(world.hub.take_ready() == std::vector<ClientId>{a});  // which hears that b is gone
}

TEST_CASE("relay: hostile bytes end in a violation or wait, and memory stays bounded") {
  std::mt19937 random(6);
  const int rounds = kSanitized ? 4000 : 20000;
  std::size_t refused = 0;
  for (int round = 0; round < rounds; ++round) {
    World world;
    const ClientId client = world.add(1);
    world.add(2);
    Bytes bytes;
    // Valid messages, of which some bytes are then changed, cut out or doubled.
    for (int i = 0; i < 4; ++i) {
      Bytes body(random() % 80);
      for (auto& byte : body) byte = static_cast<std::byte>(random());
      const Bytes whole =
          random() % 2 ? message(4, joined({key_of(2), body})) : message(static_cast<int>(random() % 15), body);
      const Bytes frame = framed(whole, random() % 8 ? kBinary : static_cast<int>(random() % 256), random());
      bytes.insert(bytes.end(), frame.begin(), frame.end());
    }
    for (unsigned i = random() % 4; i > 0; --i) bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    if (random() % 4 == 0) bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(random() % bytes.size()));
    View left = bytes;
    bool leaves = false;
    while (!left.empty() && !leaves) {
      const std::size_t count = std::min<std::size_t>(left.size(), 1 + random() % 100);
      const Fed fed = world.hub.feed(client, left.first(count));
      leaves = fed.leaves;
      refused += fed.violation.empty() ? 0 : 1;
      left = left.subspan(count);
    }
    CHECK(world.hub.queued_bytes() <= kCap + 64 * 1024);
    world.hub.close(client);
  }
  CHECK(refused > static_cast<std::size_t>(rounds) / 10);
}
