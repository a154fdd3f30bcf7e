#include "collective/simulator.hpp"

#include <algorithm>
#include <array>
#include <deque>
#include <queue>
#include <string>
#include <unordered_map>
#include <utility>

namespace torch_iroh::collective {
namespace {

constexpr std::uint32_t kByChunk = 1U << 31;

struct Piece {
  std::uint32_t step;
  std::uint32_t chunk;
};

struct StepState {
  std::uint64_t count = 0;  // elements
  std::uint32_t player = 0;
  std::uint32_t first_chunk = 0;
  std::uint32_t first_dependent = 0;
  std::uint32_t waits = 0;  // whole steps
  std::uint32_t chunks_left = 0;
  std::uint32_t depth = 0;
  StepKind kind = StepKind::copy;
  Level level = Level::host;
};

struct ChunkState {
  std::uint32_t waits : 30 = 0;  // by chunk
  std::uint32_t arrived : 1 = 0;
  std::uint32_t begun : 1 = 0;
};

// A queue that owns nothing while it is empty: most of a million ranks' queues always are.
class Queue {
 public:
  bool empty() const { return head_ == pieces_.size(); }
  void push(const Piece& piece) { pieces_.push_back(piece); }
  Piece pop() {
    const Piece piece = pieces_[head_++];
    if (empty()) {
      pieces_ = {};
      head_ = 0;
    }
    return piece;
  }

 private:
  std::vector<Piece> pieces_;
  std::size_t head_ = 0;
};

enum class What : std::uint8_t { prepared, leaving, left, coming, came, received, done };

struct Event {
  double time;
  std::uint64_t order;  // events of one moment: first made, first served
  Piece piece;
  What what;
  bool operator>(const Event& other) const { return time != other.time ? time > other.time : order > other.order; }
};

double jitter_of(std::uint64_t seed, const Piece& piece, double most) {
  std::uint64_t x = seed + 0x9e3779b97f4a7c15U * ((static_cast<std::uint64_t>(piece.step) << 32 | piece.chunk) + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return most * static_cast<double>((x ^ (x >> 31)) >> 11) * 0x1.0p-53;
}

class Simulator {
 public:
  Simulator(const Cast& cast, std::size_t element_bytes, const LinkModel& model);
  Simulation run();

 private:
  struct Output {
    Queue queue;
    bool preparing = false;
  };
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

  void add(std::uint32_t player, std::vector<SendKey>& sends, std::vector<Receive>& receives);
  void connect(const Cast& cast, const std::vector<SendKey>& sends, const std::vector<std::size_t>& sends_of,
               const std::vector<Receive>& receives);

  double bytes_of(const Piece& piece) const;
  double spend(std::uint32_t player, double seconds);  // when this player's processor has done that too
  double port(std::vector<double>& ports, const StepState& step, double seconds, double& begin);
  void at(double time, What what, Piece piece) { events_.push({time, next_order_++, piece, what}); }

  void consider(std::uint32_t step, std::uint32_t chunk);
  void run_ready();
  void perform(const Piece& piece);
  void prepare(const StepState& step);
  void handle(const Event& event);
  void feed(const Piece& piece, std::uint32_t receive);
  void complete(const Piece& piece);
  std::uint64_t chunks_of(const StepState& step) const { return (step.count + chunk_count_ - 1) / chunk_count_; }
  Simulation result();

  const Request& request_;
  const std::vector<Player>& players_;
  const LinkModel& model_;
  const double element_bytes_;
  const std::uint64_t chunk_count_;  // elements
  Simulation simulation_;

  std::vector<StepState> steps_;
  std::vector<std::uint32_t> first_step_;  // by player, and one more
  std::vector<ChunkState> chunks_;
  std::vector<std::uint32_t> dependents_;  // step, with kByChunk
  std::vector<std::uint32_t> first_fed_;   // by step, and one more
  std::vector<std::uint32_t> fed_;         // the receives that a send's message reaches

  std::vector<std::uint32_t> port_owner_;  // by player: the first player of its host
  std::vector<double> up_;                 // by port and level: when it is free
  std::vector<double> down_;
  std::vector<double> processor_;  // by player
  std::vector<Output> outputs_;    // by player and level
  std::vector<double> finish_;
  std::deque<Piece> ready_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t next_order_ = 0;
  std::uint64_t steps_left_ = 0;
  double now_ = 0;
};

Simulator::Simulator(const Cast& cast, std::size_t element_bytes, const LinkModel& model)
    : request_(cast.request),
      players_(cast.players),
      model_(model),
      element_bytes_(static_cast<double>(element_bytes)),
      chunk_count_(std::max<std::uint64_t>(1, model.chunk_bytes / element_bytes)),
      up_(players_.size() * kLevels),
      down_(players_.size() * kLevels),
      processor_(players_.size()),
      outputs_(players_.size() * kLevels),
      finish_(players_.size()) {
  const Size size = size_of(request_, players_, chunk_count_, kMost);
  if (!size.within(kMost)) {
    throw TooLarge("more than " + std::to_string(kMostSteps) + " steps or " + std::to_string(kMostPieces) +
                   " chunks of steps to simulate");
  }
  simulation_.pieces = size.pieces;
  steps_.reserve(size.steps);
  chunks_.reserve(size.pieces);
  std::vector<SendKey> sends;
  std::vector<Receive> receives;
  std::vector<std::size_t> sends_of{0};
  for (std::uint32_t player = 0; player < players_.size(); ++player) {
    const bool same_host =
        player > 0 && model.host_of(players_[player].rank) == model.host_of(players_[player - 1].rank);
    port_owner_.push_back(same_host ? port_owner_.back() : player);
    first_step_.push_back(static_cast<std::uint32_t>(steps_.size()));
    add(player, sends, receives);
    sends_of.push_back(sends.size());
  }
  first_step_.push_back(static_cast<std::uint32_t>(steps_.size()));
  steps_left_ = steps_.size();
  connect(cast, sends, sends_of, receives);
}

void Simulator::add(std::uint32_t player, std::vector<SendKey>& sends, std::vector<Receive>& receives) {
  const std::int32_t rank = players_[player].rank;
  const Schedule schedule = make_schedule(for_rank(request_, rank));
  const auto base = static_cast<std::uint32_t>(steps_.size());
  std::uint64_t bytes = 0;
  const std::size_t first_send = sends.size();
  for (const Step& step : schedule.steps) {
    StepState state;
    state.count = elements_of(step);
    state.player = player;
    state.first_chunk = static_cast<std::uint32_t>(chunks_.size());
    state.chunks_left = static_cast<std::uint32_t>((state.count + chunk_count_ - 1) / chunk_count_);
    state.kind = step.kind;
    if (step.peer >= 0) state.level = model_.level_between(rank, step.peer);
    chunks_.resize(chunks_.size() + state.chunks_left);
    const auto index = static_cast<std::uint32_t>(steps_.size());
    steps_.push_back(state);
    if (step.kind == StepKind::send) {
      sends.push_back({step.peer, step.message, index});
      bytes += state.count;
    } else if (step.peer >= 0) {
      receives.push_back({index, step.peer, step.message});
    }
  }
  std::sort(
      sends.begin() + static_cast<std::ptrdiff_t>(first_send), sends.end(),
      [](const SendKey& a, const SendKey& b) { return std::pair(a.peer, a.message) < std::pair(b.peer, b.message); });
  std::uint64_t fan_out = 0;
  for (std::size_t i = first_send; i < sends.size(); ++i) {
    if (i == first_send || sends[i].peer != sends[i - 1].peer) ++fan_out;
  }
  simulation_.fan_out = std::max(simulation_.fan_out, fan_out);
  simulation_.messages = std::max<std::uint64_t>(simulation_.messages, sends.size() - first_send);
  simulation_.bytes = std::max(simulation_.bytes, bytes * static_cast<std::uint64_t>(element_bytes_));

  const auto dependencies = dependencies_of(schedule);
  std::vector<std::uint32_t> counts(schedule.steps.size() + 1);
  for (std::uint32_t i = 0; i < dependencies.size(); ++i) {
    StepState& state = steps_[base + i];
    for (const Dependency& dependency : dependencies[i]) {
      ++counts[dependency.on + 1];
      if (!dependency.by_chunk) {
        ++state.waits;
        continue;
      }
      for (std::uint32_t c = 0; c < state.chunks_left; ++c) ++chunks_[state.first_chunk + c].waits;
    }
  }
  for (std::size_t i = 1; i < counts.size(); ++i) counts[i] += counts[i - 1];
  const auto offset = static_cast<std::uint32_t>(dependents_.size());
  dependents_.resize(offset + counts.back());
  for (std::uint32_t i = 0; i < dependencies.size(); ++i) steps_[base + i].first_dependent = offset + counts[i];
  for (std::uint32_t i = 0; i < dependencies.size(); ++i) {
    for (const Dependency& dependency : dependencies[i]) {
      dependents_[offset + counts[dependency.on]++] = (base + i) | (dependency.by_chunk ? kByChunk : 0);
    }
  }
}

// Every receive knows where its message comes from; a send must know where its message goes to.
void Simulator::connect(const Cast& cast, const std::vector<SendKey>& sends, const std::vector<std::size_t>& sends_of,
                        const std::vector<Receive>& receives) {
  std::vector<std::uint32_t> origins;
  origins.reserve(receives.size());
  first_fed_.resize(steps_.size() + 1);
  for (const Receive& receive : receives) {
    const std::int32_t rank = players_[steps_[receive.step].player].rank;
    const Origin origin = cast.origin_of(rank, receive.peer, receive.message);
    std::uint32_t step = 0;
    if (origin.step >= 0) {
      step = first_step_[origin.player] + static_cast<std::uint32_t>(origin.step);
    } else {
      const auto begin = sends.begin() + static_cast<std::ptrdiff_t>(sends_of[origin.player]);
      const auto end = sends.begin() + static_cast<std::ptrdiff_t>(sends_of[origin.player + 1]);
      const auto found = std::lower_bound(begin, end, origin, [](const SendKey& key, const Origin& wanted) {
        return std::pair(key.peer, key.message) < std::pair(wanted.peer, wanted.message);
      });
      if (found == end || found->peer != origin.peer || found->message != origin.message) {
        throw std::logic_error("rank " + std::to_string(rank) + " receives what nobody sends");
      }
      step = found->step;
    }
    origins.push_back(step);
    ++first_fed_[step + 1];
  }
  for (std::size_t i = 1; i < first_fed_.size(); ++i) first_fed_[i] += first_fed_[i - 1];
  fed_.resize(receives.size());
  std::vector<std::uint32_t> next(first_fed_.begin(), first_fed_.end() - 1);
  for (std::size_t i = 0; i < receives.size(); ++i) fed_[next[origins[i]]++] = receives[i].step;
}

double Simulator::bytes_of(const Piece& piece) const {
  const std::uint64_t offset = piece.chunk * chunk_count_;
  return static_cast<double>(std::min(chunk_count_, steps_[piece.step].count - offset)) * element_bytes_;
}

double Simulator::spend(std::uint32_t player, double seconds) {
  processor_[player] = std::max(now_, processor_[player]) + seconds;
  return processor_[player];
}

double Simulator::port(std::vector<double>& ports, const StepState& step, double seconds, double& begin) {
  const std::uint32_t owner = step.level == Level::host ? step.player : port_owner_[step.player];
  double& free = ports[owner * kLevels + static_cast<std::size_t>(step.level)];
  begin = std::max(now_, free);
  free = begin + seconds;
  return free;
}

void Simulator::consider(std::uint32_t index, std::uint32_t c) {
  const StepState& step = steps_[index];
  ChunkState& chunk = chunks_[step.first_chunk + c];
  if (chunk.begun || step.waits > 0 || chunk.waits > 0) return;
  if ((step.kind == StepKind::recv || step.kind == StepKind::recv_reduce) && !chunk.arrived) return;
  chunk.begun = true;
  ready_.push_back({index, c});
}

void Simulator::run_ready() {
  while (!ready_.empty()) {
    const Piece piece = ready_.front();
    ready_.pop_front();
    perform(piece);
  }
}

void Simulator::perform(const Piece& piece) {
  const StepState& step = steps_[piece.step];
  if (step.kind == StepKind::send) {
    outputs_[step.player * kLevels + static_cast<std::size_t>(step.level)].queue.push(piece);
    prepare(step);
    return;
  }
  const double cost = step.kind == StepKind::finish ? 0 : bytes_of(piece) * model_.local_byte_cost;
  if (cost > 0) return at(spend(step.player, cost), What::done, piece);
  complete(piece);
}

void Simulator::prepare(const StepState& step) {
  Output& output = outputs_[step.player * kLevels + static_cast<std::size_t>(step.level)];
  if (output.preparing || output.queue.empty()) return;
  const Piece piece = output.queue.pop();
  output.preparing = true;
  const Link& link = model_.link(step.level);
  at(spend(step.player, link.message_cost + bytes_of(piece) * link.byte_cost), What::prepared, piece);
}

void Simulator::handle(const Event& event) {
  const Piece& piece = event.piece;
  const StepState& step = steps_[piece.step];
  const Link& link = model_.link(step.level);
  double begin = 0;
  switch (event.what) {
    case What::prepared: {
      const double end = port(up_, step, bytes_of(piece) / link.bandwidth, begin);
      at(begin, What::leaving, piece);
      at(end, What::left, piece);
      break;
    }
    case What::leaving:
      for (std::uint32_t i = first_fed_[piece.step]; i < first_fed_[piece.step + 1]; ++i) {
        feed(piece, fed_[i]);
      }
      outputs_[step.player * kLevels + static_cast<std::size_t>(step.level)].preparing = false;
      prepare(step);
      break;
    case What::coming: at(port(down_, step, bytes_of(piece) / link.bandwidth, begin), What::came, piece); break;
    case What::came:
      at(spend(step.player, link.message_cost + bytes_of(piece) * link.byte_cost), What::received, piece);
      break;
    case What::received:
      chunks_[step.first_chunk + piece.chunk].arrived = true;
      consider(piece.step, piece.chunk);
      break;
    case What::left:
    case What::done: complete(piece); break;
  }
  run_ready();
}

// Both ends of a message have equal chunks, but for a rank that stands for others whose shards are a little larger or
// smaller: then its last chunk brings what is missing.
void Simulator::feed(const Piece& piece, std::uint32_t receive) {
  const StepState& from = steps_[piece.step];
  StepState& to = steps_[receive];
  const Link& link = model_.link(from.level);
  to.depth = std::max(to.depth, from.depth + 1);
  const std::uint64_t chunks = chunks_of(to);
  const std::uint64_t end =
      piece.chunk + 1 == chunks_of(from) ? chunks : std::min<std::uint64_t>(chunks, piece.chunk + 1);
  for (std::uint64_t c = piece.chunk; c < end; ++c) {
    const Piece fed{receive, static_cast<std::uint32_t>(c)};
    at(now_ + link.latency + (link.jitter > 0 ? jitter_of(model_.seed, fed, link.jitter) : 0), What::coming, fed);
  }
}

void Simulator::complete(const Piece& piece) {
  StepState& step = steps_[piece.step];
  const bool step_done = --step.chunks_left == 0;
  if (step_done) --steps_left_;
  finish_[step.player] = std::max(finish_[step.player], now_);
  simulation_.depth = std::max(simulation_.depth, step.depth);
  const std::uint32_t end = piece.step + 1 < steps_.size() ? steps_[piece.step + 1].first_dependent
                                                           : static_cast<std::uint32_t>(dependents_.size());
  for (std::uint32_t i = step.first_dependent; i < end; ++i) {
    const std::uint32_t index = dependents_[i] & ~kByChunk;
    StepState& dependent = steps_[index];
    dependent.depth = std::max(dependent.depth, step.depth);
    if ((dependents_[i] & kByChunk) != 0) {
      --chunks_[dependent.first_chunk + piece.chunk].waits;
      consider(index, piece.chunk);
    } else if (step_done && --dependent.waits == 0) {
      const std::uint64_t chunks = chunks_of(dependent);
      for (std::uint32_t c = 0; c < chunks; ++c) consider(index, c);
    }
  }
}

Simulation Simulator::run() {
  for (std::uint32_t i = 0; i < steps_.size(); ++i) {
    const std::uint32_t chunks = steps_[i].chunks_left;
    for (std::uint32_t c = 0; c < chunks; ++c) consider(i, c);
  }
  run_ready();
  while (!events_.empty()) {
    const Event event = events_.top();
    events_.pop();
    now_ = event.time;
    handle(event);
  }
  if (steps_left_ > 0) {
    throw TooLarge("ranks of one kind wait for each other in a circle: it cannot be sampled");
  }
  return result();
}

Simulation Simulator::result() {
  std::vector<std::size_t> order(finish_.size());
  std::uint64_t ranks = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
    ranks += players_[i].stands_for;
  }
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return finish_[a] < finish_[b]; });
  std::uint64_t passed = 0;
  for (const std::size_t i : order) {
    passed += players_[i].stands_for;
    simulation_.median_seconds = finish_[i];
    if (2 * passed >= ranks) break;
  }
  simulation_.seconds = order.empty() ? 0 : finish_[order.back()];
  simulation_.finish = std::move(finish_);
  return std::move(simulation_);
}

}  // namespace

Simulation simulate(const Cast& cast, std::size_t element_bytes, const LinkModel& model) {
  return Simulator(cast, element_bytes, model).run();
}

}  // namespace torch_iroh::collective
