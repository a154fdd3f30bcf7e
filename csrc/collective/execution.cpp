#include "collective/execution.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "collective/reduce.hpp"

namespace torch_iroh::collective {
namespace {

bool receives(const Step& step) {
  return step.kind == StepKind::recv || step.kind == StepKind::recv_reduce;
}

}  // namespace

std::uint64_t input_elements(const Request& request) {
  if (request.op == Op::reduce) return request.count;
  std::uint64_t count = 0;
  for (const std::uint64_t block : request.blocks) count += block;
  return count;
}

Execution::Execution(const Request& request, const Work& work, std::size_t chunk_bytes, std::uint64_t sequence,
                     std::uint32_t signature, Send send)
    : work_(work),
      element_(size_of(work.dtype)),
      chunk_count_(std::max<std::uint64_t>(1, chunk_bytes / element_)),
      world_(request.world),
      sequence_(sequence),
      signature_(signature),
      send_(std::move(send)),
      schedule_(make_schedule(request)),
      states_(schedule_.steps.size()),
      receives_(static_cast<std::size_t>(request.world)),
      steps_left_(schedule_.steps.size()) {
  if (schedule_.scratch_count > 0) {
    const std::size_t bytes = schedule_.scratch_count * element_;
    // A barrier sends scratch that nobody wrote: never bytes of this process's past.
    scratch_ = request.op == Op::barrier ? std::make_unique<std::byte[]>(bytes)
                                         : std::make_unique_for_overwrite<std::byte[]>(bytes);
  }
  // premul_sum scales what this rank contributes; where the schedule reads the caller's input, a scaled copy is read.
  if (work_.reduce == ReduceOp::premul_sum && reduces(request.op)) {
    if (request.op == Op::all_reduce) {
      scale(work_.dtype, work_.output, request.count, work_.premul);
    } else {
      const std::uint64_t count = input_elements(request);
      scaled_input_ = std::make_unique_for_overwrite<std::byte[]>(count * element_);
      std::memcpy(scaled_input_.get(), work_.input, count * element_);
      scale(work_.dtype, scaled_input_.get(), count, work_.premul);
    }
  }
  const auto dependencies = dependencies_of(schedule_);
  for (std::uint32_t i = 0; i < schedule_.steps.size(); ++i) {
    const Step& step = schedule_.steps[i];
    StepState& state = states_[i];
    const std::uint64_t chunks = (count_of(step) + chunk_count_ - 1) / chunk_count_;
    state.chunks.resize(chunks);
    state.chunks_left = static_cast<std::uint32_t>(chunks);
    for (const Dependency& dependency : dependencies[i]) {
      states_[dependency.on].dependents.emplace_back(i, dependency.by_chunk);
      if (dependency.by_chunk) {
        for (Chunk& chunk : state.chunks) ++chunk.waits;
      } else {
        ++state.waits;
      }
    }
    if (receives(step)) {
      auto& messages = receives_[static_cast<std::size_t>(step.peer)];
      if (messages.size() <= step.message) messages.resize(step.message + 1);
      messages[step.message] = i;
    }
    if (step.peer >= 0) peers_.push_back(step.peer);
  }
  if (accumulates_wide(work_.reduce, work_.dtype)) keep_sums_wide();
  std::sort(peers_.begin(), peers_.end());
  peers_.erase(std::unique(peers_.begin(), peers_.end()), peers_.end());
}

// A row of receives into one range, with nothing in between, is a sum that this rank sees whole.
void Execution::keep_sums_wide() {
  const auto& steps = schedule_.steps;
  absorbed_.resize(steps.size());
  for (std::size_t first = 0; first < steps.size(); ++first) {
    if (steps[first].kind != StepKind::recv_reduce) continue;
    std::size_t end = first + 1;
    while (end < steps.size() && steps[end].kind == StepKind::recv_reduce && steps[end].to == steps[first].to &&
           steps[end].from == steps[first].to) {
      ++end;
    }
    const bool divides = work_.reduce == ReduceOp::avg && end < steps.size() && steps[end].kind == StepKind::finish &&
                         steps[end].to == steps[first].to;
    if (end == first + 1 && !divides) continue;  // one addition is rounded once anyway
    sums_.push_back(std::make_unique_for_overwrite<float[]>(steps[first].to.count));
    for (std::size_t i = first; i < end; ++i) states_[i].wide = {sums_.back().get(), i == first, 0};
    states_[end - 1].wide.divisor = divides ? static_cast<float>(world_) : 1.0F;
    if (divides) absorbed_[end] = true;
    first = end - 1;
  }
}

void Execution::reduce_chunk(const Piece& piece, const Payload& payload, std::uint64_t offset, std::uint64_t count) {
  const Step& step = schedule_.steps[piece.step];
  const std::byte* received = payload.bytes().data();
  const Wide& wide = states_[piece.step].wide;
  if (wide.sum == nullptr) {
    return reduce(work_.reduce, work_.dtype, at(step.from, offset), received, at(step.to, offset), count);
  }
  float* sum = wide.sum + offset;
  if (wide.first) {
    begin_wide(work_.reduce, work_.dtype, at(step.from, offset), received, sum, count);
  } else {
    add_wide(work_.reduce, work_.dtype, sum, received, count);
  }
  if (wide.divisor != 0) end_wide(work_.dtype, sum, wide.divisor, at(step.to, offset), count);
}

std::uint64_t Execution::count_of(const Step& step) const {
  return step.kind == StepKind::send ? step.from.count : step.to.count;
}

std::byte* Execution::at(const Slice& slice, std::uint64_t element) const {
  const std::uint64_t offset = (slice.offset + element) * element_;
  switch (slice.buffer) {
    case Buffer::input:
      // Makers never write to the input: the const is cast away only to give all buffers one type.
      return (scaled_input_ ? scaled_input_.get() : const_cast<std::byte*>(work_.input)) + offset;
    case Buffer::output: return work_.output + offset;
    case Buffer::scratch: break;
  }
  return scratch_.get() + offset;
}

void Execution::start() {
  for (std::uint32_t i = 0; i < states_.size(); ++i) {
    for (std::uint32_t c = 0; c < states_[i].chunks.size(); ++c) consider(i, c);
  }
  run_ready();
}

void Execution::abandon() {
  abandoned_ = true;
  ready_.clear();
  for (StepState& state : states_) {
    for (Chunk& chunk : state.chunks) chunk.payload = {};
  }
}

void Execution::on_data(int from, const transport::Tag& tag, Payload payload) {
  const auto& messages = receives_[static_cast<std::size_t>(from)];
  if (tag.message >= messages.size()) throw Error(ErrorKind::mismatch, "it sent a message that nobody waits for");
  const std::uint32_t index = messages[tag.message];
  const Step& step = schedule_.steps[index];
  StepState& state = states_[index];
  if (tag.chunk >= state.chunks.size() || state.chunks[tag.chunk].arrived) {
    throw Error(ErrorKind::mismatch, "it sent more than this rank receives from it");
  }
  const std::uint64_t offset = tag.chunk * chunk_count_;
  const std::size_t expected = std::min(chunk_count_, step.to.count - offset) * element_;
  if (payload.size() != expected) {
    throw Error(ErrorKind::mismatch, "it sent " + std::to_string(payload.size()) + " bytes where this rank receives " +
                                         std::to_string(expected));
  }
  Chunk& chunk = state.chunks[tag.chunk];
  chunk.arrived = true;
  chunk.payload = std::move(payload);
  consider(index, tag.chunk);
  run_ready();
}

void Execution::consider(std::uint32_t step, std::uint32_t index) {
  StepState& state = states_[step];
  Chunk& chunk = state.chunks[index];
  if (chunk.begun || state.waits > 0 || chunk.waits > 0) return;
  if (receives(schedule_.steps[step]) && !chunk.arrived) return;
  chunk.begun = true;
  ready_.push_back({step, index});
}

void Execution::run_ready() {
  while (!ready_.empty()) {
    const Piece piece = ready_.front();
    ready_.pop_front();
    perform(piece);
  }
}

void Execution::perform(const Piece& piece) {
  const Step& step = schedule_.steps[piece.step];
  const std::uint64_t offset = piece.chunk * chunk_count_;
  const std::uint64_t count = std::min(chunk_count_, count_of(step) - offset);
  switch (step.kind) {
    case StepKind::send: {
      const std::span<const std::byte> bytes(at(step.from, offset), count * element_);
      send_(step.peer, {sequence_, step.message, piece.chunk, signature_}, bytes, [self = shared_from_this(), piece] {
        if (self->abandoned_) return;
        self->complete(piece);
        self->run_ready();
      });
      return;
    }
    case StepKind::recv: {
      const Payload payload = std::move(states_[piece.step].chunks[piece.chunk].payload);
      std::memcpy(at(step.to, offset), payload.bytes().data(), payload.size());
      break;
    }
    case StepKind::recv_reduce: {
      const Payload payload = std::move(states_[piece.step].chunks[piece.chunk].payload);
      reduce_chunk(piece, payload, offset, count);
      break;
    }
    case StepKind::copy: {
      std::byte* to = at(step.to, offset);
      const std::byte* from = at(step.from, offset);
      if (to != from) std::memmove(to, from, count * element_);
      break;
    }
    case StepKind::finish:
      if (!absorbed_.empty() && absorbed_[piece.step]) break;
      finish(work_.reduce, work_.dtype, at(step.to, offset), count, world_);
      break;
  }
  complete(piece);
}

void Execution::complete(const Piece& piece) {
  StepState& state = states_[piece.step];
  const bool step_done = --state.chunks_left == 0;
  if (step_done) --steps_left_;
  for (const auto& [index, by_chunk] : state.dependents) {
    StepState& dependent = states_[index];
    if (by_chunk) {
      --dependent.chunks[piece.chunk].waits;
      consider(index, piece.chunk);
    } else if (step_done && --dependent.waits == 0) {
      for (std::uint32_t c = 0; c < dependent.chunks.size(); ++c) consider(index, c);
    }
  }
}

bool Execution::waits_for(int rank) const {
  const auto& messages = receives_[static_cast<std::size_t>(rank)];
  return std::any_of(messages.begin(), messages.end(), [&](std::uint32_t step) {
    const auto& chunks = states_[step].chunks;
    return std::any_of(chunks.begin(), chunks.end(), [](const Chunk& chunk) { return !chunk.arrived; });
  });
}

bool Execution::sends_to(int rank) const {
  return std::any_of(schedule_.steps.begin(), schedule_.steps.end(),
                     [&](const Step& step) { return step.kind == StepKind::send && step.peer == rank; });
}

std::vector<int> Execution::waiting_for() const {
  std::vector<int> ranks;
  for (const int peer : peers_) {
    if (waits_for(peer)) ranks.push_back(peer);
  }
  return ranks;
}

}  // namespace torch_iroh::collective
