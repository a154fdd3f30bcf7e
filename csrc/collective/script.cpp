#include "collective/script.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace torch_iroh::collective {
namespace {

class Writer {
 public:
  Writer(const Cast& cast, std::uint64_t chunk_elements, const LinkModel& model);
  Script take() { return std::move(script_); }

 private:
  struct SendKey {
    std::int32_t peer;
    std::uint32_t message;
    std::uint32_t step;
  };
  struct Receive {
    std::uint32_t step;
    std::int32_t peer;
    std::uint32_t message;
  };

  void add(std::uint32_t player);
  void connect();

  const Cast& cast_;
  const LinkModel& model_;
  Script script_;
  std::vector<std::uint32_t> first_step_;  // by player
  std::vector<SendKey> sends_;             // by player, sorted
  std::vector<std::size_t> sends_of_{0};   // where each player's begin, and one more
  std::vector<Receive> receives_;
};

Writer::Writer(const Cast& cast, std::uint64_t chunk_elements, const LinkModel& model) : cast_(cast), model_(model) {
  script_.chunk_elements = chunk_elements;
  const Size size = size_of(cast.request, cast.players, chunk_elements, kMost);
  if (!size.within(kMost)) {
    throw TooLarge("more than " + std::to_string(kMostSteps) + " steps or " + std::to_string(kMostPieces) +
                   " chunks of steps to simulate");
  }
  script_.steps.reserve(size.steps);
  script_.chunks.reserve(size.pieces);
  for (std::uint32_t player = 0; player < cast.players.size(); ++player) {
    first_step_.push_back(static_cast<std::uint32_t>(script_.steps.size()));
    add(player);
    sends_of_.push_back(sends_.size());
  }
  connect();
}

void Writer::add(std::uint32_t player) {
  const std::int32_t rank = cast_.players[player].rank;
  const Schedule schedule = make_schedule(for_rank(cast_.request, rank));
  const auto base = static_cast<std::uint32_t>(script_.steps.size());
  std::uint64_t elements = 0;
  const std::size_t first_send = sends_.size();
  for (const Step& step : schedule.steps) {
    StepState state;
    state.count = elements_of(step);
    state.player = player;
    state.first_chunk = static_cast<std::uint32_t>(script_.chunks.size());
    state.chunks_left = static_cast<std::uint32_t>((state.count + script_.chunk_elements - 1) / script_.chunk_elements);
    state.kind = step.kind;
    if (step.peer >= 0) state.level = model_.level_between(rank, step.peer);
    script_.chunks.resize(script_.chunks.size() + state.chunks_left);
    const auto index = static_cast<std::uint32_t>(script_.steps.size());
    script_.steps.push_back(state);
    if (step.kind == StepKind::send) {
      sends_.push_back({step.peer, step.message, index});
      elements += state.count;
    } else if (step.peer >= 0) {
      receives_.push_back({index, step.peer, step.message});
    }
  }
  std::sort(
      sends_.begin() + static_cast<std::ptrdiff_t>(first_send), sends_.end(),
      [](const SendKey& a, const SendKey& b) { return std::pair(a.peer, a.message) < std::pair(b.peer, b.message); });
  std::uint64_t fan_out = 0;
  for (std::size_t i = first_send; i < sends_.size(); ++i) {
    if (i == first_send || sends_[i].peer != sends_[i - 1].peer) ++fan_out;
  }
  script_.fan_out = std::max(script_.fan_out, fan_out);
  script_.messages = std::max<std::uint64_t>(script_.messages, sends_.size() - first_send);
  script_.elements = std::max(script_.elements, elements);

  const auto dependencies = dependencies_of(schedule);
  std::vector<std::uint32_t> counts(schedule.steps.size() + 1);
  for (std::uint32_t i = 0; i < dependencies.size(); ++i) {
    StepState& state = script_.steps[base + i];
    for (const Dependency& dependency : dependencies[i]) {
      ++counts[dependency.on + 1];
      if (!dependency.by_chunk) {
        ++state.waits;
        continue;
      }
      for (std::uint32_t c = 0; c < state.chunks_left; ++c) ++script_.chunks[state.first_chunk + c].waits;
    }
  }
  for (std::size_t i = 1; i < counts.size(); ++i) counts[i] += counts[i - 1];
  const auto offset = static_cast<std::uint32_t>(script_.dependents.size());
  script_.dependents.resize(offset + counts.back());
  for (std::uint32_t i = 0; i < dependencies.size(); ++i) script_.steps[base + i].first_dependent = offset + counts[i];
  for (std::uint32_t i = 0; i < dependencies.size(); ++i) {
    for (const Dependency& dependency : dependencies[i]) {
      script_.dependents[offset + counts[dependency.on]++] = (base + i) | (dependency.by_chunk ? kByChunk : 0);
    }
  }
}

// Every receive knows where its message comes from; a send must know where its message goes to.
void Writer::connect() {
  std::vector<std::uint32_t> origins;
  origins.reserve(receives_.size());
  script_.first_fed.resize(script_.steps.size() + 1);
  for (const Receive& receive : receives_) {
    const std::int32_t rank = cast_.players[script_.steps[receive.step].player].rank;
    const Origin origin = cast_.origin_of(rank, receive.peer, receive.message);
    std::uint32_t step = 0;
    if (origin.step >= 0) {
      step = first_step_[origin.player] + static_cast<std::uint32_t>(origin.step);
    } else {
      const auto begin = sends_.begin() + static_cast<std::ptrdiff_t>(sends_of_[origin.player]);
      const auto end = sends_.begin() + static_cast<std::ptrdiff_t>(sends_of_[origin.player + 1]);
      const auto found = std::lower_bound(begin, end, origin, [](const SendKey& key, const Origin& wanted) {
        return std::pair(key.peer, key.message) < std::pair(wanted.peer, wanted.message);
      });
      if (found == end || found->peer != origin.peer || found->message != origin.message) {
        throw std::logic_error("rank " + std::to_string(rank) + " receives what nobody sends");
      }
      step = found->step;
    }
    origins.push_back(step);
    ++script_.first_fed[step + 1];
  }
  for (std::size_t i = 1; i < script_.first_fed.size(); ++i) script_.first_fed[i] += script_.first_fed[i - 1];
  script_.fed.resize(receives_.size());
  std::vector<std::uint32_t> next(script_.first_fed.begin(), script_.first_fed.end() - 1);
  for (std::size_t i = 0; i < receives_.size(); ++i) script_.fed[next[origins[i]]++] = receives_[i].step;
}

}  // namespace

Script script_of(const Cast& cast, std::uint64_t chunk_elements, const LinkModel& model) {
  return Writer(cast, chunk_elements, model).take();
}

}  // namespace torch_iroh::collective
