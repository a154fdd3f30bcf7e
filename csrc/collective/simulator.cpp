#include "collective/simulator.hpp"

#include <algorithm>
#include <deque>
#include <queue>
#include <string>
#include <utility>

#include "collective/script.hpp"

namespace torch_iroh::collective {
namespace {

struct Piece {
  std::uint32_t step;
  std::uint32_t chunk;
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
  Simulation result();

  const std::vector<Player>& players_;
  const LinkModel& model_;
  const double element_bytes_;
  Script script_;
  Simulation simulation_;

  std::vector<std::uint32_t> port_owner_;  // by player: the first player of its host
  std::vector<double> up_;                 // by port and level: when it is free
  std::vector<double> down_;
  std::vector<double> processor_;  // by player
  std::vector<Output> outputs_;    // by player and level
  std::vector<double> finish_;
  std::deque<Piece> ready_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t next_order_ = 0;
  std::uint64_t steps_left_;
  double now_ = 0;
};

Simulator::Simulator(const Cast& cast, std::size_t element_bytes, const LinkModel& model)
    : players_(cast.players),
      model_(model),
      element_bytes_(static_cast<double>(element_bytes)),
      script_(script_of(cast, std::max<std::uint64_t>(1, model.chunk_bytes / element_bytes), model)),
      up_(players_.size() * kLevels),
      down_(players_.size() * kLevels),
      processor_(players_.size()),
      outputs_(players_.size() * kLevels),
      finish_(players_.size()),
      steps_left_(script_.steps.size()) {
  simulation_.pieces = script_.chunks.size();
  simulation_.messages = script_.messages;
  simulation_.bytes = script_.elements * element_bytes;
  simulation_.fan_out = script_.fan_out;
  for (std::uint32_t player = 0; player < players_.size(); ++player) {
    const bool same_host =
        player > 0 && model.host_of(players_[player].rank) == model.host_of(players_[player - 1].rank);
    port_owner_.push_back(same_host ? port_owner_.back() : player);
  }
}

double Simulator::bytes_of(const Piece& piece) const {
  const std::uint64_t offset = piece.chunk * script_.chunk_elements;
  return static_cast<double>(std::min(script_.chunk_elements, script_.steps[piece.step].count - offset)) *
         element_bytes_;
}

double Simulator::spend(std::uint32_t player, double seconds) {
  processor_[player] = std::max(now_, processor_[player]) + seconds;
  return processor_[player];
}

double Simulator::port(std::vector<double>& ports, const StepState& step, double seconds, double& begin) {
  const std::uint32_t owner = step.level == Level::host ? step.player : port_owner_[step.player];
  const Level level = model_.one_uplink && step.level == Level::site ? Level::wan : step.level;
  double& free = ports[owner * kLevels + static_cast<std::size_t>(level)];
  begin = std::max(now_, free);
  free = begin + seconds;
  return free;
}

void Simulator::consider(std::uint32_t index, std::uint32_t c) {
  const StepState& step = script_.steps[index];
  ChunkState& chunk = script_.chunks[step.first_chunk + c];
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
  const StepState& step = script_.steps[piece.step];
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
  const StepState& step = script_.steps[piece.step];
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
      for (std::uint32_t i = script_.first_fed[piece.step]; i < script_.first_fed[piece.step + 1]; ++i) {
        feed(piece, script_.fed[i]);
      }
      outputs_[step.player * kLevels + static_cast<std::size_t>(step.level)].preparing = false;
      prepare(step);
      break;
    case What::coming: at(port(down_, step, bytes_of(piece) / link.bandwidth, begin), What::came, piece); break;
    case What::came:
      at(spend(step.player, link.message_cost + bytes_of(piece) * link.byte_cost), What::received, piece);
      break;
    case What::received:
      script_.chunks[step.first_chunk + piece.chunk].arrived = true;
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
  const StepState& from = script_.steps[piece.step];
  StepState& to = script_.steps[receive];
  const Link& link = model_.link(from.level);
  to.depth = std::max(to.depth, from.depth + 1);
  const std::uint64_t chunks = script_.chunks_of(to);
  const std::uint64_t end =
      piece.chunk + 1 == script_.chunks_of(from) ? chunks : std::min<std::uint64_t>(chunks, piece.chunk + 1);
  for (std::uint64_t c = piece.chunk; c < end; ++c) {
    const Piece fed{receive, static_cast<std::uint32_t>(c)};
    at(now_ + link.latency + (link.jitter > 0 ? jitter_of(model_.seed, fed, link.jitter) : 0), What::coming, fed);
  }
}

void Simulator::complete(const Piece& piece) {
  StepState& step = script_.steps[piece.step];
  const bool step_done = --step.chunks_left == 0;
  if (step_done) --steps_left_;
  finish_[step.player] = std::max(finish_[step.player], now_);
  simulation_.depth = std::max(simulation_.depth, step.depth);
  const std::uint32_t end = piece.step + 1 < script_.steps.size()
                                ? script_.steps[piece.step + 1].first_dependent
                                : static_cast<std::uint32_t>(script_.dependents.size());
  for (std::uint32_t i = step.first_dependent; i < end; ++i) {
    const std::uint32_t index = script_.dependents[i] & ~kByChunk;
    StepState& dependent = script_.steps[index];
    dependent.depth = std::max(dependent.depth, step.depth);
    if ((script_.dependents[i] & kByChunk) != 0) {
      --script_.chunks[dependent.first_chunk + piece.chunk].waits;
      consider(index, piece.chunk);
    } else if (step_done && --dependent.waits == 0) {
      const std::uint64_t chunks = script_.chunks_of(dependent);
      for (std::uint32_t c = 0; c < chunks; ++c) consider(index, c);
    }
  }
}

Simulation Simulator::run() {
  for (std::uint32_t i = 0; i < script_.steps.size(); ++i) {
    const std::uint32_t chunks = script_.steps[i].chunks_left;
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
