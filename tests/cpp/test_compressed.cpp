// Compressed collectives among the ranks of an in-process group: sums within the codec's bounds and with equal bits, in
// worlds and sites of every kind; frames that were changed, or are another codec's, are errors that name rank and
// codec.
#include <doctest/doctest.h>

#include <cmath>
#include <future>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "codec/frame.hpp"
#include "collective/compressed.hpp"
#include "collective/group.hpp"
#include "support.hpp"
#include "transport/in_process.hpp"

namespace {

using namespace torch_iroh;
using namespace torch_iroh::testing;
using collective::CollectiveCall;
using collective::Compression;
using collective::Group;
using collective::GroupOptions;
using collective::Hosts;
using collective::Work;

using Sites = std::vector<Hosts::Ranks>;
using Spoil = std::function<void(CollectiveCall&)>;

struct Rank {
  std::shared_ptr<Group> group;
  std::vector<float> values;
  std::vector<float> residual;
  std::promise<std::optional<Error>> ended;
};

class World {
 public:
  explicit World(std::int32_t size) : ranks(static_cast<std::size_t>(size)) {
    GroupOptions options;
    options.name = "test";
    options.chunk_bytes = 4096;
    auto ends = transport::make_in_process(size);
    for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i].group = Group::make(ends[i], options);
  }
  ~World() {
    for (Rank& rank : ranks) rank.group->shutdown();
  }

  // `spoil` changes what rank `who` sends first, after it was encoded.
  std::vector<std::optional<Error>> all_reduce(const std::string& codec, const Sites& sites, int who = -1,
                                               const Spoil& spoil = {}) {
    std::vector<std::optional<Error>> errors;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      Rank& rank = ranks[i];
      Work work;
      work.dtype = DType::float32;
      work.output = reinterpret_cast<std::byte*>(rank.values.data());
      Compression how{codec::parse(codec), Hosts(sites, static_cast<std::int32_t>(i)),
                      "all_reduce(sum, float32[" + std::to_string(rank.values.size()) + "], " + codec, 7 + i,
                      rank.residual.empty() ? nullptr : rank.residual.data()};
      auto parts = compressed_all_reduce(how, work, rank.values.size(), static_cast<std::int32_t>(ranks.size()));
      rank.ended = {};
      auto left = std::make_shared<std::size_t>(parts.size());
      auto first = std::make_shared<std::optional<Error>>();
      for (CollectiveCall& part : parts) {
        if (static_cast<int>(i) == who && part.request.op == collective::Op::all_to_all) {
          part.prepare = [spoil, prepare = std::move(part.prepare)](CollectiveCall& call) {
            prepare(call);
            spoil(call);
          };
        }
        part.done = [&rank, left, first](const Error* error) {
          if (error != nullptr && !*first) *first = *error;
          if (--*left == 0) rank.ended.set_value(*first);
        };
        rank.group->submit(std::move(part));
      }
    }
    for (Rank& rank : ranks) errors.push_back(rank.ended.get_future().get());
    return errors;
  }

  std::vector<Rank> ranks;
};

std::vector<float> normal(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> values;
  std::vector<float> made(count);
  for (float& value : made) value = values(random);
  return made;
}

Sites alone(std::int32_t world) {
  Sites sites;
  for (std::int32_t rank = 0; rank < world; ++rank) sites.push_back({rank});
  return sites;
}

}  // namespace

TEST_CASE("compressed all_reduce: equal bits, and sum and residuals hold all that was given, in every kind of world") {
  const std::vector<Sites> worlds = {alone(2),           alone(3),           alone(5),
                                     alone(7),           {{0, 1}, {2, 3}},   {{0, 2}, {1, 3}},
                                     {{0, 1, 2}, {3}},   {{0}, {1, 2}, {3}}, {{0, 1, 2}, {3, 4, 5}},
                                     {{0, 3}, {1, 2, 4}}};
  for (const Sites& sites : worlds) {
    std::size_t size = 0;
    for (const auto& site : sites) size += site.size();
    for (const char* codec : {"int8", "topk-int8:density=0.05", "sign"}) {
      for (const std::size_t count : {std::size_t{1}, std::size_t{101}, std::size_t{5003}}) {
        CAPTURE(codec);
        CAPTURE(count);
        CAPTURE(size);
        World world(static_cast<std::int32_t>(size));
        std::vector<double> given(count);
        for (std::size_t i = 0; i < size; ++i) {
          world.ranks[i].values = normal(count, static_cast<unsigned>(i + 10 * count));
          world.ranks[i].residual = normal(count, static_cast<unsigned>(i + 1));
          // Only who hands a value to other sites owes of it: elsewhere nothing is looked at.
        }
        std::vector<std::vector<float>> before;
        for (const Rank& rank : world.ranks) before.push_back(rank.residual);
        for (const Rank& rank : world.ranks) {
          for (std::size_t j = 0; j < count; ++j) given[j] += static_cast<double>(rank.values[j]);
        }
        for (const auto& error : world.all_reduce(codec, sites)) CHECK_MESSAGE(!error, error->what());
        std::size_t wrong = 0;
        for (std::size_t j = 0; j < count; ++j) {
          double owed_before = 0, owed = 0;
          for (std::size_t i = 0; i < size; ++i) {
            if (world.ranks[i].residual[j] == before[i][j]) continue;
            owed_before += static_cast<double>(before[i][j]);
            owed += static_cast<double>(world.ranks[i].residual[j]);
          }
          const double total = static_cast<double>(world.ranks[0].values[j]) + owed - owed_before;
          // A residual that happens to be what it was is a coincidence of float32.
          if (std::abs(total - given[j]) > 1e-4 * (1 + std::abs(given[j]))) ++wrong;
        }
        CHECK(wrong == 0);
        for (const Rank& rank : world.ranks) CHECK(rank.values == world.ranks[0].values);
      }
    }
  }
}

TEST_CASE("compressed all_reduce: a frame that was changed on its way names its rank and the codec on all ranks") {
  for (const char* codec : {"int8", "topk-int4", "bf16"}) {
    CAPTURE(codec);
    World world(3);
    for (Rank& rank : world.ranks) rank.values = normal(5000, 3);
    const auto errors = world.all_reduce(codec, alone(3), 1, [](CollectiveCall& call) {
      const_cast<std::byte*>(call.work.input)[100] ^= std::byte{4};  // of the frame for rank 0
    });
    REQUIRE(errors[0]);
    const std::string text = errors[0]->what();
    CHECK_MESSAGE(text.find("what rank 1 sent, compressed by " + std::string(codec)) != std::string::npos, text);
    CHECK_MESSAGE(text.find("changed on its way") != std::string::npos, text);
    for (const auto& error : errors) CHECK(error);  // nobody goes on with a sum that others do not have
  }
}

TEST_CASE("compressed all_reduce: a frame of another codec with a right checksum is refused by both names") {
  World world(2);
  for (Rank& rank : world.ranks) rank.values = normal(4096, 3);
  const auto errors = world.all_reduce("int8", alone(2), 1, [](CollectiveCall& call) {
    const std::span<std::byte> frame(const_cast<std::byte*>(call.work.input), call.request.send_blocks[0]);
    codec::write_header(codec::parse("int4"), 2048, frame);
    codec::seal(frame);
  });
  REQUIRE(errors[0]);
  const std::string text = errors[0]->what();
  CHECK_MESSAGE(text.find("rank 1") != std::string::npos, text);
  CHECK_MESSAGE(text.find("int8") != std::string::npos, text);
  CHECK_MESSAGE(text.find("int4") != std::string::npos, text);
}

TEST_CASE("compressed all_reduce: ranks with different codecs hear both before anything is read") {
  World world(2);
  for (Rank& rank : world.ranks) rank.values = normal(4096, 3);
  std::vector<std::string> codecs = {"int8", "int4"};
  std::vector<std::future<std::optional<Error>>> ends;
  for (std::size_t i = 0; i < 2; ++i) {
    Rank& rank = world.ranks[i];
    Work work;
    work.dtype = DType::float32;
    work.output = reinterpret_cast<std::byte*>(rank.values.data());
    Compression how{codec::parse(codecs[i]), Hosts(alone(2), static_cast<std::int32_t>(i)),
                    "all_reduce(sum, float32[4096], " + codecs[i]};
    auto parts = compressed_all_reduce(how, work, 4096, 2);
    auto ended = std::make_shared<std::promise<std::optional<Error>>>();
    ends.push_back(ended->get_future());
    parts.front().done = [ended](const Error* error) {
      ended->set_value(error == nullptr ? std::nullopt : std::optional(*error));
    };
    rank.group->submit(std::move(parts.front()));
  }
  for (auto& end : ends) {
    const auto error = end.get();
    REQUIRE(error);
    const std::string text = error->what();
    CHECK_MESSAGE(text.find("int8") != std::string::npos, text);
    CHECK_MESSAGE(text.find("int4") != std::string::npos, text);
  }
}
