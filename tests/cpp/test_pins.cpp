// Pins: what their text means, which rule decides, and what is refused in words.
#include <string>
#include <string_view>

#include <doctest/doctest.h>

#include "base/error.hpp"
#include "collective/chooser.hpp"
#include "collective/pins.hpp"
#include "support.hpp"

namespace torch_iroh::collective {
namespace {

using testing::contains;

void expect_refused(std::string_view text, std::string_view part) {
  INFO(std::string(text));
  try {
    Pins::parse(text);
    FAIL_CHECK("accepted");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::invalid);
    CHECK_MESSAGE(contains(error.what(), std::string(part)), std::string(error.what()));
  }
}

}  // namespace

TEST_CASE("pins: the first rule that holds decides") {
  const Pins pins =
      Pins::parse("all_reduce<=64KiB=tree, all_reduce<=1MiB=butterfly/64KiB, all_reduce=ring/1MiB, *=auto");
  CHECK(pins.find(Op::all_reduce, 0).algorithm == Algorithm::tree);
  CHECK(pins.find(Op::all_reduce, 65'536).algorithm == Algorithm::tree);
  CHECK(pins.find(Op::all_reduce, 65'537).algorithm == Algorithm::butterfly);
  CHECK(pins.find(Op::all_reduce, 65'537).chunk_bytes == 65'536);
  CHECK(pins.find(Op::all_reduce, (1 << 20) + 1).algorithm == Algorithm::ring);
  CHECK(pins.find(Op::all_reduce, (1 << 20) + 1).chunk_bytes == 1 << 20);
  CHECK(!pins.find(Op::broadcast, 1).algorithm);
  CHECK(pins.find(Op::broadcast, 1).chunk_bytes == 0);
  CHECK(pins.names(Algorithm::tree));
  CHECK(!pins.names(Algorithm::bruck));
}

TEST_CASE("pins: a size that the ranks do not know alike meets rules without one only") {
  const Pins pins = Pins::parse("*<=1GiB=auto/4KiB, all_to_all=direct/2KiB");
  Request request;
  request.op = Op::all_to_all;
  request.world = 2;
  request.blocks = request.send_blocks = {1, 2};
  CHECK(pin_for(pins, request, 4).chunk_bytes == 2048);
  request.blocks = request.send_blocks = {2, 2};
  request.even = true;
  CHECK(known_bytes(request, 4) == 16);
  CHECK(pin_for(pins, request, 4).chunk_bytes == 4096);
}

TEST_CASE("pins: one meaning has one text, and no meaning none") {
  CHECK(Pins::parse(" all_reduce <= 65536 = tree ,*=ring/ 2048B").text() == "all_reduce<=64KiB=tree, *=ring/2KiB");
  CHECK(Pins::parse("reduce<=0=tree, reduce<=1000=direct").text() == "reduce<=0B=tree, reduce<=1000B=direct");
  CHECK(Pins::parse("*=ring").text() == Pins::everything(Algorithm::ring).text());
  for (const char* text : {"*=auto", "all_reduce<=1MiB=auto, gather=auto"}) {
    CHECK(Pins::parse(text).empty());
    CHECK(Pins::parse(text).text().empty());
  }
  CHECK(!Pins::parse("*=auto/64KiB").empty());
  const Pins pins = Pins::parse("all_reduce<=3GiB=auto/1KiB, scatter<=1B=tree, *=hierarchical");
  CHECK(Pins::parse(pins.text()).text() == pins.text());
}

TEST_CASE("pins: every wrong text is refused by its rule, with what is allowed") {
  expect_refused("", "an empty text");
  expect_refused("  ", "an empty text");
  expect_refused(std::string(kMostPinBytes + 1, 'x'), "at most 1000");
  expect_refused("all_reduce", "rule 1: 'all_reduce' is no rule");
  expect_refused("all_reduce<=4KiB", "rule 1: 'all_reduce<=4KiB' is no rule");
  expect_refused("*=auto,", "rule 2: '' is no rule");
  expect_refused("*=ring, ,*=tree", "rule 2: '' is no rule");
  expect_refused("allreduce=ring", "rule 1: 'allreduce' is no collective; allowed: *, all_reduce, reduce, broadcast");
  expect_refused("=ring", "'' is no collective");
  expect_refused("\x1b[2J=ring", "'?[2J' is no collective");
  expect_refused("all_reduce=tree, broadcast=oak", "rule 2: 'oak' is no algorithm; allowed: auto, ring, direct");
  expect_refused("all_reduce==ring", "'=ring' is no algorithm");
  expect_refused("all_reduce=", "'' is no algorithm");
  expect_refused("all_reduce<=-1=ring", "'-1' is no size");
  expect_refused("all_reduce<==ring", "'' is no size");
  expect_refused("all_reduce<=64kb=ring", "'64kb' is no size; allowed: a whole number of B, KiB, MiB or GiB");
  expect_refused("all_reduce<=1.5MiB=ring", "'1.5MiB' is no size");
  expect_refused("all_reduce<=99999999999999999999=ring", "is no size");
  expect_refused("all_reduce<=18014398509481984KiB=ring", "is no size");
  expect_refused("all_reduce=bruck", "bruck cannot run all_reduce; allowed for it: auto, ring, direct");
  expect_refused("all_to_all=hierarchical", "hierarchical cannot run all_to_all; allowed for it: auto, direct");
  expect_refused("all_to_all=bruck", "bruck cannot run all_to_all");
  expect_refused("all_to_all<=1KiB=direct", "gives a size for all_to_all");
  expect_refused("*=ring/", "'' is no size");
  expect_refused("*=ring/1000", "allowed: 1KiB to 1MiB, a multiple of 64B");
  expect_refused("*=ring/1025", "allowed: 1KiB to 1MiB, a multiple of 64B");
  expect_refused("*=ring/2MiB", "allowed: 1KiB to 1MiB, a multiple of 64B");
  expect_refused("*=ring, all_reduce=tree", "rule 2: never holds, because rule 1 comes first");
  expect_refused("all_reduce<=2KiB=ring, gather=tree, all_reduce<=1KiB=tree", "rule 3: never holds, because rule 1");
  expect_refused("all_reduce=ring, all_reduce<=1KiB=tree", "rule 2: never holds");
}

TEST_CASE("pins: noise is read or refused, never more") {
  std::uint64_t state = 7;
  const auto next = [&](std::uint64_t below) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return (state >> 33) % below;
  };
  constexpr std::string_view kParts[] = {"all_reduce", "*",  "<=",  "=", "ring", "auto", ",",
                                         "/",          "64", "KiB", " ", "x",    "-"};
  for (int round = 0; round < 20'000; ++round) {
    std::string text;
    for (auto left = next(12); left > 0; --left) text += kParts[next(std::size(kParts))];
    try {
      const Pins pins = Pins::parse(text);
      if (!pins.empty() && Pins::parse(pins.text()).text() != pins.text()) FAIL("'" << text << "'");
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::invalid) FAIL("'" << text << "': " << std::string(error.what()));
    }
  }
}

}  // namespace torch_iroh::collective
