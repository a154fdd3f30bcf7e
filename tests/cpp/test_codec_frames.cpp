// Frames of codecs as bytes: their pinned form, their size, and that nothing but a whole frame of the expected codec is
// read. And the texts of codecs.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "codec/codec.hpp"
#include "codec/frame.hpp"
#include "codec/parameters.hpp"
#include "codec/positions.hpp"
#include "support.hpp"

namespace {

using namespace torch_iroh;
using namespace torch_iroh::testing;
using namespace torch_iroh::codec;
using Bytes = std::vector<std::byte>;
using Values = std::vector<float>;

Values normal_values(std::size_t count) {
  std::mt19937_64 random(count);
  std::normal_distribution<float> normal;
  Values values(count);
  for (float& value : values) value = normal(random);
  return values;
}

Bytes encoded(const Codec& codec, const Values& values) {
  Bytes frame(frame_bytes(codec, values.size()));
  encode(codec, values, 1, frame);
  return frame;
}

template <typename Call>
void expect_refused(Call call, ErrorKind kind, const std::string& part) {
  try {
    call();
    FAIL_CHECK("accepted; wanted a refusal with: " << part);
  } catch (const Error& error) {
    CHECK(error.kind() == kind);
    CHECK_MESSAGE(contains(error.what(), part), std::string(error.what()));
  }
}

void expect_no_frame(const std::string& codec, std::size_t count, const Bytes& frame, const std::string& part) {
  Values values(count, 5.0f);
  expect_refused([&] { decode(parse(codec), frame, values); }, ErrorKind::protocol, part);
  expect_refused([&] { add(parse(codec), frame, values); }, ErrorKind::protocol, part);
  CHECK(std::count(values.begin(), values.end(), 5.0f) == static_cast<std::ptrdiff_t>(count));
}

std::vector<Codec> all_kinds() {
  std::vector<Codec> all;
  for (int kind = 0; kind <= static_cast<int>(kLastKind); ++kind) {
    Codec codec;
    codec.kind = static_cast<Kind>(kind);
    codec.block = 16;
    codec.density = 0.1;
    all.push_back(codec);
  }
  return all;
}

}  // namespace

TEST_CASE("codec frame: the bytes are pinned") {
  const auto body = [](const std::string& codec, const Values& values) {
    return hex(encoded(parse(codec), values)).substr(2 * kHeaderBytes);
  };
  CHECK(hex(encoded(parse("topk-int8:block=64,density=0.5,scale=fp32"), Values(3))).substr(0, 48) ==
        "54496366"
        "01"
        "08"
        "06"
        "01"
        "0300000000000000"
        "000000000000e03f");
  CHECK(hex(encoded(parse("bf16"), {})).substr(0, 48) == "5449636601010000" + std::string(32, '0'));
  CHECK(body("none", {1}) == "0000803f");
  CHECK(body("bf16", {1, -2}) == "803f00c0");
  CHECK(body("fp8", {448, -1}) == "803f7eb8");
  CHECK(body("fp8-e5m2", {57344, -1}) == "803f7bbc");
  CHECK(body("int8", {255, 0, 1}) == "803f00ff0001");
  CHECK(body("int8", {127, -128}) == "803f80ff00");
  CHECK(body("int8", {NAN, 1}) == "c07ff17f78");
  CHECK(body("int4", {8, -7, 1}) == "803f078f00");
  CHECK(body("int4", {INFINITY, -INFINITY, 1}) == "c07f000102");
  CHECK(body("sign", {1, -1, 1}) == "803f02");
  CHECK(body("topk:density=0.4", {1, 5, 0, -6, 2}) == "0000a0400000c0c00a");
  CHECK(checksum({}) == 0x4ec29966342efaf2u);
  CHECK(checksum(std::as_bytes(std::span("torch-iroh", 10))) == 0x4763b21909d096a3u);
}

TEST_CASE("codec frame: the size follows from codec and count") {
  const auto size = [](const std::string& codec, std::uint64_t count) { return frame_bytes(parse(codec), count); };
  for (const Codec& codec : all_kinds()) CHECK(frame_bytes(codec, 0) == kHeaderBytes);
  CHECK(size("none", 1000) == 32 + 4000);
  CHECK(size("bf16", 1000) == 32 + 2000);
  CHECK(size("fp8", 1000) == 32 + 1000 + 8 * 2);
  CHECK(size("int8", 1000) == 32 + 1000 + 8 * 3);
  CHECK(size("int8:scale=fp32,block=16", 1001) == 32 + 1001 + 63 * 5);
  CHECK(size("int4", 129) == 32 + 64 + 3 + 1 + 3);
  CHECK(size("sign", 129) == 32 + 16 + 2 + 1 + 2);
  CHECK(size("topk", 1000) == 32 + 4 * 10 + (10 * 7 + (990 >> 6) + 7) / 8);
  CHECK(kept(parse("topk"), 1) == 1);
  CHECK(kept(parse("topk"), 100) == 1);
  CHECK(kept(parse("topk"), 101) == 2);
  CHECK(kept(parse("topk:density=1"), 77) == 77);
  CHECK(kept(parse("int8"), 77) == 77);
  expect_refused([&] { size("int8", std::uint64_t{1} << 60); }, ErrorKind::invalid, "int8 takes at most");
  expect_refused([&] { size("topk", std::uint64_t{1} << 32); }, ErrorKind::invalid, "takes at most 4294967295 values");
  expect_refused(
      [&] {
        Bytes frame(40);
        encode(Codec{}, Values(3), 0, frame);
      },
      ErrorKind::invalid, "40 bytes for a frame of 44");
}

TEST_CASE("codec frame: another codec or count, a part or more, and any changed bit are refused") {
  const Bytes frame = encoded(parse("int8:block=64"), normal_values(100));
  expect_no_frame("int4", 100, frame, "a frame of int8 (block 64) for 100 values, expected int4 (block 128) for 100");
  expect_no_frame("int8:block=64", 99, frame, "int8 (block 64) for 100 values, expected int8 (block 64) for 99");
  expect_no_frame("int8:block=32", 100, frame, "expected int8 (block 32) for 100");
  expect_no_frame("int8:block=64,scale=fp32", 100, frame, "expected int8 (block 64, fp32 scales) for 100");
  expect_no_frame("topk", 100, encoded(parse("topk:density=0.02"), Values(100)),
                  "a frame of topk (density 0.02) for 100 values, expected topk (density 0.01) for 100");
  // Of equal size: only the header tells.
  expect_no_frame("fp8", 100, encoded(parse("fp8-e5m2"), Values(100)), "a frame of fp8-e5m2 (block 128) for 100");
  for (const std::size_t size : {std::size_t{0}, std::size_t{31}, frame.size() - 1, frame.size() + 1}) {
    Bytes other = frame;
    other.resize(size);
    expect_no_frame("int8:block=64", 100, other,
                    "a frame of " + std::to_string(size) + " bytes, expected the 138 of int8 (block 64) for 100");
  }
  const auto with = [&](std::size_t at, int value) {
    Bytes bad = frame;
    bad[at] = static_cast<std::byte>(value);
    seal(bad);
    return bad;
  };
  expect_no_frame("int8:block=64", 100, with(0, 'X'), "wrong magic");
  expect_no_frame("int8:block=64", 100, with(4, 2), "version 2, this build reads version 1");
  expect_no_frame("int8:block=64", 100, with(5, 77), "unknown codec (77)");
  expect_no_frame("int8:block=64", 100, with(6, 200), "block ?");
  expect_no_frame("int8:block=64", 100, with(7, 2), "fp32 scales");
  expect_no_frame("int8:block=64", 100, with(20, 1), "density");

  for (const Codec& codec : all_kinds()) {
    Bytes bytes = encoded(codec, normal_values(100));
    Values values(100);
    for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
      bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
      try {
        decode(codec, bytes, values);
        FAIL(to_string(codec) << ": bit " << bit);
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::protocol) FAIL(std::string(error.what()));
        if (bit >= 8 * 24 && !contains(error.what(), "its checksum is wrong: it was changed on its way")) {
          FAIL(std::string(error.what()));
        }
      }
      bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    }
    decode(codec, bytes, values);
  }
}

TEST_CASE("codec frame: fuzz, with a right checksum too") {
  constexpr std::uint64_t kSeed = 31;
  std::mt19937_64 random(kSeed);
  const TimePoint until = Clock::now() + (kSanitized ? milliseconds(1500) : milliseconds(1000));
  std::uint64_t accepted = 0, refused = 0;
  const std::vector<Codec> kinds = all_kinds();
  for (std::uint64_t round = 0; round < 2'000'000 && Clock::now() < until; ++round) {
    Codec codec = kinds[random() % kinds.size()];
    codec.block = 16u << random() % 9;
    codec.wide_scale = random() % 2 == 0;
    codec.density = random() % 3 == 0 ? 1e-3 : static_cast<double>(1 + random() % 100) / 100;
    const std::size_t count = random() % 600;
    Bytes frame(frame_bytes(codec, count));
    for (std::byte& byte : frame) byte = static_cast<std::byte>(random());
    const bool sealed = random() % 8 != 0;
    if (sealed) {
      write_header(codec, count, frame);
      // Half of them with positions such as a sender writes.
      if (random() % 2 == 0) encode(codec, normal_values(count), 0, frame);
      for (std::uint64_t i = random() % 4; i > 0 && frame.size() > kHeaderBytes; --i) {
        frame[kHeaderBytes + random() % (frame.size() - kHeaderBytes)] = static_cast<std::byte>(random());
      }
      seal(frame);
    } else {
      frame.resize(random() % (frame.size() + 8));
    }
    Values values(count), sums(count);
    try {
      decode(codec, frame, values);
      add(codec, frame, sums);
      ++accepted;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::protocol) FAIL("seed " << kSeed << " round " << round << ": " << error.what());
      ++refused;
    }
  }
  CHECK(accepted > 100);
  CHECK(refused > 100);
}

TEST_CASE("codec positions: every set comes back, in the bytes that (kept, count) say, near the entropy at 1 %") {
  std::mt19937_64 random(5);
  for (int round = 0; round < 3000; ++round) {
    const std::uint64_t count = round % 10 == 0 ? 0xffffffff - random() % 3 : 1 + random() % 3000;
    std::vector<std::uint32_t> positions;
    for (std::uint64_t i = 1 + random() % 40; i > 0; --i) {
      const std::uint64_t edge = random() % 3;  // both ends, and anywhere
      const std::uint64_t at = edge == 0 ? random() % std::min<std::uint64_t>(count, 9) : random() % count;
      positions.push_back(
          static_cast<std::uint32_t>(edge == 1 ? count - 1 - at % std::min<std::uint64_t>(count, 9) : at));
    }
    std::sort(positions.begin(), positions.end());
    positions.erase(std::unique(positions.begin(), positions.end()), positions.end());
    Bytes bytes(position_bytes(positions.size(), count), std::byte{0xff});
    write_positions(positions, count, bytes);
    std::vector<std::uint32_t> found(positions.size());
    read_positions(bytes, count, found);
    if (found != positions) FAIL("seed 5 round " << round);
  }
  const double bits = static_cast<double>(position_bits(10'000, 1'000'000)) / 10'000;
  const double entropy = 100 * (-0.01 * std::log2(0.01) - 0.99 * std::log2(0.99));
  CHECK(bits == doctest::Approx(8.5468));
  CHECK(bits - entropy < 0.5);
}

TEST_CASE("codec positions: what does not stay below the count, or is not padded by zeros, is refused") {
  const auto refused = [](const Bytes& bytes, std::size_t kept, std::uint64_t count, const std::string& why) {
    std::vector<std::uint32_t> positions(kept);
    expect_refused([&] { read_positions(bytes, count, positions); }, ErrorKind::protocol, why);
  };
  const std::size_t size = position_bytes(10, 1000);
  refused(Bytes(size, std::byte{0}), 10, 1000, "end too early");
  Bytes far(size, std::byte{0});
  far[7] = std::byte{1};
  refused(far, 10, 1000, "are not below its count");
  std::vector<std::uint32_t> first(10);
  for (std::uint32_t i = 0; i < 10; ++i) first[i] = i;
  Bytes padded(size);
  write_positions(first, 1000, padded);
  padded.back() |= std::byte{0x80};
  refused(padded, 10, 1000, "bits that are not zero");
}

TEST_CASE("codec text: what is written is read as the same codec, and is as short as it can be") {
  for (const char* text :
       {"none", "bf16", "fp8", "fp8-e5m2", "int8", "int4", "sign", "topk", "topk-int8", "topk-int4", "int8:block=64",
        "int8:block=16,scale=fp32,rounding=stochastic,nonfinite=raise", "topk:density=0.001", "topk-int4:density=1e-07",
        "topk:density=0.3333333333333333", "none:nonfinite=raise", "sign:scale=fp32", "topk-int8:block=32,density=1"}) {
    CHECK(to_string(parse(text)) == text);
  }
  CHECK(to_string(parse("fp8-e4m3")) == "fp8");
  CHECK(to_string(parse("int8:scale=bf16,block=128,nonfinite=keep,rounding=nearest")) == "int8");
  CHECK(to_string(parse("topk:density=1e-2")) == "topk");
  CHECK(parse("int8") == Codec{.kind = Kind::int8});
}

TEST_CASE("codec text: what has no meaning is refused, with what has") {
  const auto refused = [](const std::string& text, const std::string& why) {
    expect_refused([&] { parse(text); }, ErrorKind::invalid, why);
  };
  refused("int9",
          "unknown codec 'int9'; known: none, bf16, fp8, fp8-e5m2, int8, int4, sign, topk, topk-int8, topk-int4");
  refused("", "unknown codec ''; known: ");
  refused("INT8", "unknown codec 'INT8'");
  refused("bf16:block=64", "bf16 has no parameter 'block'; it has: nonfinite=keep or raise");
  refused("sign:rounding=nearest",
          "sign has no parameter 'rounding'; it has: block=16 to 4096, scale=bf16 or fp32, non");
  refused("int8:density=0.1", "int8 has no parameter 'density'");
  refused("topk:scale=fp32", "topk has no parameter 'scale'; it has: density=above 0 to 1, nonfinite=keep or raise");
  for (const char* block : {"0", "8", "100", "8192", "-64", "64.5", "x", "", "1e99", "nan", " 64", "64 "}) {
    refused("int8:block=" + std::string(block), "block is a power of two from 16 to 4096, not '");
  }
  for (const char* density : {"0", "-0.1", "1.01", "nan", "inf", "x", ""}) {
    refused("topk:density=" + std::string(density), "density is a number above 0 and at most 1, not '");
  }
  refused("int8:scale=fp16", "int8: scale is bf16 or fp32, not 'fp16'");
  refused("int8:rounding=up", "int8: rounding is nearest or stochastic, not 'up'");
  refused("int8:nonfinite=", "int8: nonfinite is keep or raise, not ''");
  refused("int8:", "'' in 'int8:' is no parameter=value");
  refused("int8:block=64,", "'' in 'int8:block=64,' is no parameter=value");
  refused("int8:block", "'block' in 'int8:block' is no parameter=value");
  refused("int8:block=64,block=64", "parameter 'block' is given twice");
  Codec codec{.kind = Kind::int8, .block = 100};
  expect_refused([&] { frame_bytes(codec, 1); }, ErrorKind::invalid, "int8: block is a power of two");
  codec = {.kind = Kind::topk, .density = 0};
  expect_refused([&] { kept(codec, 1); }, ErrorKind::invalid, "topk: density is a number above 0");
  codec.kind = static_cast<Kind>(99);
  expect_refused([&] { frame_bytes(codec, 1); }, ErrorKind::invalid, "unknown codec 99");
}
