// The checks before and after symbolic runs (symbolic_run.hpp). See verifier.hpp for what is proved.
#include "collective/verifier.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <stdexcept>
#include <utility>

#include "collective/symbolic.hpp"
#include "collective/symbolic_run.hpp"

namespace torch_iroh::collective {

namespace {

using namespace symbolic;

// One rank's steps by themselves.
void check_steps(const Program& program, std::size_t rank, const Layout& layout) {
  const auto inside = [&](const Slice& slice) {
    const std::uint64_t length = layout.length[static_cast<int>(slice.buffer)];
    return slice.offset <= length && slice.count <= length - slice.offset;
  };
  for (std::size_t i = 0; i < program.schedule.steps.size(); ++i) {
    const Step& step = program.schedule.steps[i];
    if (count_of(step) == 0) fault(place_of(rank, i) + "is empty");
    if ((reads(step) && !inside(step.from)) || (writes(step) && !inside(step.to)))
      fault(place_of(rank, i) + "reaches outside its buffer");
    if (reads(step) && writes(step) && step.from.count != step.to.count)
      fault(place_of(rank, i) + "has two different counts");
    if (writes(step) && step.to.buffer == Buffer::input) fault(place_of(rank, i) + "writes input");
  }
}

// Pairs the k-th send of every (from, to) with the k-th receive, and measures.
Peers check_pairs(const std::vector<Program>& programs, Verdict& verdict) {
  const std::size_t world = programs.size();
  using Steps = std::vector<std::uint32_t>;
  std::map<std::pair<std::size_t, std::size_t>, std::pair<Steps, Steps>> lanes;  // (from, to): sends, receives
  Peers peers(world);
  for (std::size_t rank = 0; rank < world; ++rank) {
    std::uint64_t messages = 0, elements = 0;
    std::set<std::int32_t> to;
    const auto& steps = programs[rank].schedule.steps;
    peers[rank].resize(steps.size());
    for (std::uint32_t i = 0; i < steps.size(); ++i) {
      const Step& step = steps[i];
      if (step.kind == StepKind::copy || step.kind == StepKind::finish) continue;
      const auto peer = static_cast<std::size_t>(step.peer);
      if (step.peer < 0 || peer >= world || peer == rank) fault(place_of(rank, i) + "has no such peer");
      const bool sends = step.kind == StepKind::send;
      Steps& lane = sends ? lanes[{rank, peer}].first : lanes[{peer, rank}].second;
      if (step.message != lane.size()) fault(place_of(rank, i) + "is out of turn on its lane");
      lane.push_back(i);
      if (sends) ++messages, elements += step.from.count, to.insert(step.peer);
    }
    verdict.fan_out_max = std::max<std::uint64_t>(verdict.fan_out_max, to.size());
    verdict.messages_sent_max = std::max(verdict.messages_sent_max, messages);
    verdict.elements_sent_max = std::max(verdict.elements_sent_max, elements);
    verdict.scratch_max = std::max(verdict.scratch_max, programs[rank].schedule.scratch_count);
  }
  for (const auto& [ends, lane] : lanes) {
    const std::string name = "lane " + std::to_string(ends.first) + " -> " + std::to_string(ends.second) + ": ";
    const auto& [sends, receives] = lane;
    if (sends.size() != receives.size())
      fault(name + std::to_string(sends.size()) + " sends meet " + std::to_string(receives.size()) + " receives");
    for (std::size_t k = 0; k < sends.size(); ++k) {
      const std::uint64_t sent = count_of(programs[ends.first].schedule.steps[sends[k]]);
      const std::uint64_t received = count_of(programs[ends.second].schedule.steps[receives[k]]);
      if (sent != received)
        fault(name + "message " + std::to_string(k) + " has " + std::to_string(sent) + " elements at the sender, " +
              std::to_string(received) + " at the receiver");
      peers[ends.first][sends[k]] = {static_cast<std::uint32_t>(ends.second), receives[k]};
      peers[ends.second][receives[k]] = {static_cast<std::uint32_t>(ends.first), sends[k]};
    }
  }
  return peers;
}

// What a finished run left in memory against what the operation promises.
void check_result(const std::vector<Program>& programs, const std::vector<Layout>& layouts, const Terms& terms,
                  const Execution& run) {
  const std::size_t world = programs.size();
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    const Request& q = programs[rank].request;
    const Layout& layout = layouts[rank];
    const auto expect = [&](std::uint64_t i, bool right, const std::string& wanted) {
      if (!right)
        fault("rank " + std::to_string(rank) + " output[" + std::to_string(i) + "] is " +
              terms.name(run.value(rank, Buffer::output, i)) + ", wanted " + wanted);
    };
    const auto expect_source = [&](std::uint64_t i, std::uint32_t of, std::uint64_t index) {
      expect(i, terms.is_source(run.value(rank, Buffer::output, i), of, index),
             std::to_string(of) + "[" + std::to_string(index) + "]");
    };
    const auto expect_whole = [&](std::uint64_t i, std::uint64_t index) {
      expect(i, terms.is_whole(run.value(rank, Buffer::output, i), index, world),
             "the finished sum of all [" + std::to_string(index) + "]");
    };
    const auto before = [](const std::vector<std::uint64_t>& blocks, std::int64_t end) {
      return std::accumulate(blocks.begin(), blocks.begin() + end, std::uint64_t{0});
    };
    for (std::uint64_t i = 0, source = 0, start = 0; i < layout.length[1]; ++i) {
      // `source` is the rank whose block of output holds element i.
      for (; !q.blocks.empty() && source < world && i >= start + q.blocks[source]; ++source) start += q.blocks[source];
      const auto from = static_cast<std::uint32_t>(source);
      switch (q.op) {
        case Op::all_reduce:
          expect_whole(i, i);
          expect(i, run.value(rank, Buffer::output, i) == run.value(0, Buffer::output, i), "the same order as rank 0");
          break;
        case Op::reduce: expect_whole(i, i); break;
        case Op::reduce_scatter: expect_whole(i, before(q.blocks, q.rank) + i); break;
        case Op::broadcast: expect_source(i, q.root, i); break;
        case Op::scatter: expect_source(i, q.root, before(q.blocks, q.rank) + i); break;
        case Op::all_gather:
        case Op::gather: expect_source(i, from, i - start); break;
        case Op::all_to_all:
          expect_source(i, from, before(programs[source].request.send_blocks, q.rank) + i - start);
          break;
        case Op::barrier: break;
      }
    }
    for (std::uint64_t i = 0; i < layout.length[0]; ++i) {
      const std::uint64_t cell = layout.at({Buffer::input, i, 1});
      const bool shared = cell >= layout.start[1] && cell < layout.start[1] + layout.length[1];
      if (!shared && !terms.is_source(run.value(rank, Buffer::input, i), rank, i))
        fault("rank " + std::to_string(rank) + " input[" + std::to_string(i) + "] has changed");
    }
  }
  const Request& q = programs[0].request;
  std::uint64_t elements = 0;
  if (q.op == Op::all_reduce || q.op == Op::reduce) elements = q.count;
  if (q.op == Op::reduce_scatter) elements = total(q.blocks);
  for (std::uint64_t i = 0; i < std::max<std::uint64_t>(elements, run.finished().size()); ++i) {
    const std::uint64_t times = i < run.finished().size() ? run.finished()[i] : 0;
    if (times != (i < elements ? 1 : 0))
      fault("element " + std::to_string(i) + " is finished " + std::to_string(times) + " times");
  }
}

}  // namespace

std::vector<Program> programs_of(const Request& request) {
  std::vector<Program> programs;
  for (std::int32_t rank = 0; rank < request.world; ++rank) {
    Program& program = programs.emplace_back(Program{request, {}, {}});
    program.request.rank = rank;
    program.schedule = make_schedule(program.request);
    program.dependencies = dependencies_of(program.schedule);
  }
  return programs;
}

std::vector<Program> programs_of(const std::vector<std::vector<std::uint64_t>>& counts) {
  std::vector<Program> programs;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    Request request{.op = Op::all_to_all,
                    .algorithm = Algorithm::direct,
                    .rank = static_cast<std::int32_t>(rank),
                    .world = static_cast<std::int32_t>(counts.size()),
                    .root = 0,
                    .count = 0,
                    .blocks = {},
                    .send_blocks = counts[rank]};
    for (const auto& row : counts) request.blocks.push_back(row.at(rank));
    Program& program = programs.emplace_back(Program{request, make_schedule(request), {}});
    program.dependencies = dependencies_of(program.schedule);
  }
  return programs;
}

Verdict verify(const std::vector<Program>& programs, const VerifyOptions& options) {
  Verdict verdict;
  if (programs.empty()) throw std::invalid_argument("verify: no programs");
  if (options.chunk == 0) throw std::invalid_argument("verify: chunk is 0");
  try {
    std::vector<Layout> layouts;
    for (const Program& program : programs) layouts.emplace_back(program, options.in_place);
    for (std::size_t rank = 0; rank < programs.size(); ++rank) check_steps(programs[rank], rank, layouts[rank]);
    const Peers peers = check_pairs(programs, verdict);
    Terms terms(programs.size());
    std::vector<Terms::Id> outputs;  // of the first run: all others must agree
    for (std::uint32_t order = 0; order < options.orders; ++order) {
      Execution run(programs, layouts, peers, terms, options, order);
      run.run();
      check_result(programs, layouts, terms, run);
      std::vector<Terms::Id> found;
      for (std::size_t rank = 0; rank < programs.size(); ++rank) {
        for (std::uint64_t i = 0; i < layouts[rank].length[1]; ++i) found.push_back(run.value(rank, Buffer::output, i));
        if (programs[rank].request.op != Op::barrier) continue;
        const Bits known = run.known_at_end(rank);
        for (std::size_t other = 0; other < programs.size(); ++other)
          if (!has_bit(known, other))
            fault("rank " + std::to_string(rank) + " may leave before rank " + std::to_string(other) + " has come");
      }
      if (order == 0) outputs = found;
      if (found != outputs) fault("order " + std::to_string(order) + " sums in another order than order 0");
    }
  } catch (const Fault& first) {
    verdict.ok = false;
    verdict.why = std::string(name_of(programs[0].request.op)) + ", world " + std::to_string(programs.size()) +
                  ", chunk " + std::to_string(options.chunk) + ": " + first.why;
  }
  return verdict;
}

Verdict verify(const Request& request, const VerifyOptions& options) {
  return verify(programs_of(request), options);
}

Verdict verify(const std::vector<std::vector<std::uint64_t>>& counts, const VerifyOptions& options) {
  return verify(programs_of(counts), options);
}

}  // namespace torch_iroh::collective
