// One symbolic run of all ranks, in one order that the dependencies permit. Internal to verifier.cpp, which says what
// is proved; knows no operation but what lies in memory at the start.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "collective/symbolic.hpp"

namespace torch_iroh::collective::symbolic {

inline std::string place_of(std::size_t rank, std::size_t step) {
  return "rank " + std::to_string(rank) + " step " + std::to_string(step) + ": ";
}

inline bool reads(const Step& step) {
  return step.kind != StepKind::recv && step.kind != StepKind::finish;
}
inline bool writes(const Step& step) {
  return step.kind != StepKind::send;
}
inline std::uint64_t count_of(const Step& step) {
  return writes(step) ? step.to.count : step.from.count;
}

using Peers = std::vector<std::vector<std::pair<std::uint32_t, std::uint32_t>>>;  // [rank][step] = other end

// One run. A task is one chunk of one step. Order 0 takes the newest ready task, the others a random one; in odd orders
// a message passes only when both ends are ready.
class Execution {
 public:
  Execution(const std::vector<Program>& programs, const std::vector<Layout>& layouts, const Peers& peers, Terms& terms,
            const VerifyOptions& options, std::uint32_t order)
      : programs_(programs),
        layouts_(layouts),
        peers_(peers),
        terms_(terms),
        chunk_(options.chunk),
        newest_first_(order < 2),
        rendezvous_(order % 2 == 1),
        random_(options.seed * 1000003 + order) {
    lay_out_memory();
    lay_out_tasks();
    provable_ = options.happens_before && order == 0 && tasks_.size() <= VerifyOptions::kProvenChunks;
    past_.assign(tasks_.size(), Bits((programs_.size() + (provable_ ? tasks_.size() : 0) + 63) / 64));
    if (provable_) accesses_.resize(cells_);
  }

  void run() {
    for (std::uint32_t task = 0; task < tasks_.size(); ++task)
      if (waits_[task] == 0) arm(task);
    std::size_t done = 0;
    while (!ready_.empty()) {
      if (!newest_first_) std::swap(ready_[random_() % ready_.size()], ready_.back());
      const std::uint32_t task = ready_.back();
      ready_.pop_back();
      execute(task);
      ++done;
      if (rendezvous_ && step_of(task).kind == StepKind::send) {
        execute(other_end(task));
        ++done;
        complete(other_end(task));
      }
      complete(task);
    }
    if (done == tasks_.size()) return;
    const auto stuck = std::find(executed_.begin(), executed_.end(), false) - executed_.begin();
    fault(place(static_cast<std::uint32_t>(stuck)) + "never runs (deadlock)");
  }

  Terms::Id value(std::size_t rank, Buffer buffer, std::uint64_t index) const {
    return memory_[rank][layouts_[rank].at({buffer, index, 1})];
  }
  const std::vector<std::uint64_t>& finished() const { return finished_; }

  // The ranks whose begin lies before this rank's end.
  Bits known_at_end(std::size_t rank) const {
    Bits known((programs_.size() + 63) / 64);
    set_bit(known, rank);
    for (std::uint32_t task = 0; task < tasks_.size(); ++task)
      if (tasks_[task].rank == rank)
        for (std::size_t i = 0; i < known.size(); ++i) known[i] |= past_[task][i];
    return known;
  }

 private:
  struct Task {
    std::uint32_t rank, step;
    std::uint64_t chunk;
  };
  struct Accesses {  // of one memory element, for the happens-before proof
    std::int64_t writer = -1;
    std::vector<std::uint32_t> readers;
  };

  void lay_out_memory() {
    for (std::uint32_t rank = 0; rank < programs_.size(); ++rank) {
      const Layout& layout = layouts_[rank];
      const Request& q = programs_[rank].request;
      first_cell_.push_back(cells_);
      cells_ += layout.size;
      auto& memory = memory_.emplace_back(layout.size, 0);
      Buffer filled = Buffer::input;
      if (q.op == Op::all_reduce || (q.op == Op::broadcast && q.rank == q.root)) filled = Buffer::output;
      if (q.op == Op::barrier) filled = Buffer::scratch;  // a token means nothing, whatever it is
      for (std::uint64_t i = 0; i < layout.length[static_cast<int>(filled)]; ++i)
        memory[layout.at({filled, i, 1})] = terms_.source(rank, i);
    }
  }

  void lay_out_tasks() {
    const std::size_t world = programs_.size();
    first_task_.resize(world), followers_.resize(world), left_.resize(world);
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      const auto& steps = programs_[rank].schedule.steps;
      for (std::uint32_t i = 0; i < steps.size(); ++i) {
        first_task_[rank].push_back(static_cast<std::uint32_t>(tasks_.size()));
        left_[rank].push_back((count_of(steps[i]) + chunk_ - 1) / chunk_);
        for (std::uint64_t chunk = 0; chunk < left_[rank][i]; ++chunk) {
          tasks_.push_back({rank, i, chunk});
          waits_.push_back(programs_[rank].dependencies[i].size());
        }
      }
      followers_[rank].resize(steps.size());
      for (std::uint32_t i = 0; i < steps.size(); ++i) {
        for (const Dependency& dependency : programs_[rank].dependencies[i]) {
          if (dependency.on >= i) fault(place_of(rank, i) + "depends on a later step");
          if (dependency.by_chunk && count_of(steps[i]) != count_of(steps[dependency.on]))
            fault(place_of(rank, i) + "depends by chunk on a step of another length");
          followers_[rank][dependency.on].push_back({i, dependency.by_chunk});
        }
      }
    }
    armed_.assign(tasks_.size(), false), executed_.assign(tasks_.size(), false);
    mail_.resize(tasks_.size());
  }

  const Step& step_of(std::uint32_t task) const {
    return programs_[tasks_[task].rank].schedule.steps[tasks_[task].step];
  }
  std::string place(std::uint32_t task) const { return place_of(tasks_[task].rank, tasks_[task].step); }
  bool is_message(std::uint32_t task) const { return step_of(task).peer >= 0; }
  std::uint32_t other_end(std::uint32_t task) const {
    const auto [rank, step] = peers_[tasks_[task].rank][tasks_[task].step];
    return first_task_[rank][step] + static_cast<std::uint32_t>(tasks_[task].chunk);
  }

  // Everything before `task` on its own rank is done; a message may still miss its other end.
  void arm(std::uint32_t task) {
    armed_[task] = true;
    if (!is_message(task)) return ready_.push_back(task);
    const bool sends = step_of(task).kind == StepKind::send;
    const std::uint32_t other = other_end(task);
    if (rendezvous_) {
      if (armed_[other]) ready_.push_back(sends ? task : other);
    } else if (sends || executed_[other]) {
      ready_.push_back(task);
    }
  }

  void execute(std::uint32_t task) {
    const Task at = tasks_[task];
    const Step& step = step_of(task);
    const std::uint64_t begin = at.chunk * chunk_;
    const std::uint64_t end = std::min(begin + chunk_, count_of(step));
    const std::uint64_t from = layouts_[at.rank].at(step.from);
    const std::uint64_t to = layouts_[at.rank].at(step.to);
    auto& memory = memory_[at.rank];
    executed_[task] = true;
    remember_past(task);
    try {
      for (std::uint64_t i = begin; i < end; ++i) {
        Terms::Id value = reads(step) ? memory[from + i] : memory[to + i];
        if (reads(step)) touch(task, from + i, false);
        if (writes(step)) touch(task, to + i, true);
        if (reads(step) && value == 0) fault("reads an element that was never written");
        switch (step.kind) {
          case StepKind::send: mail_[task].push_back(value); break;
          case StepKind::recv: memory[to + i] = mail_[other_end(task)][i - begin]; break;
          case StepKind::recv_reduce: memory[to + i] = terms_.sum(value, mail_[other_end(task)][i - begin]); break;
          case StepKind::copy: memory[to + i] = value; break;
          case StepKind::finish: {
            memory[to + i] = terms_.finish(value);
            const std::uint64_t index = terms_.index_of(value);
            if (finished_.size() <= index) finished_.resize(index + 1);
            ++finished_[index];
            break;
          }
        }
      }
    } catch (const Fault& inner) {
      fault(place(task) + inner.why);
    }
    if (!rendezvous_ && step.kind == StepKind::send && armed_[other_end(task)]) ready_.push_back(other_end(task));
  }

  void complete(std::uint32_t task) {
    const Task at = tasks_[task];
    const bool last = --left_[at.rank][at.step] == 0;
    for (const Dependency& follower : followers_[at.rank][at.step]) {
      const std::uint32_t first = first_task_[at.rank][follower.on];
      const auto chunks = (count_of(programs_[at.rank].schedule.steps[follower.on]) + chunk_ - 1) / chunk_;
      if (follower.by_chunk) {
        if (--waits_[first + at.chunk] == 0) arm(static_cast<std::uint32_t>(first + at.chunk));
      } else if (last) {
        for (std::uint64_t chunk = 0; chunk < chunks; ++chunk)
          if (--waits_[first + chunk] == 0) arm(static_cast<std::uint32_t>(first + chunk));
      }
    }
  }

  // The begins of ranks and (if provable) the tasks that precede `task`, by dependencies and messages alone.
  void remember_past(std::uint32_t task) {
    const Task at = tasks_[task];
    Bits& past = past_[task];
    const auto follow = [&](std::uint32_t earlier) {
      unite(past, past_[earlier]);
      if (provable_) set_bit(past, programs_.size() + earlier);
    };
    set_bit(past, at.rank);
    for (const Dependency& dependency : programs_[at.rank].dependencies[at.step]) {
      const std::uint32_t first = first_task_[at.rank][dependency.on];
      if (dependency.by_chunk) {
        follow(first + static_cast<std::uint32_t>(at.chunk));
      } else {
        for (std::uint32_t i = first; i < tasks_.size() && tasks_[i].rank == at.rank && tasks_[i].step == dependency.on;
             ++i)
          follow(i);
      }
    }
    if (is_message(task) && step_of(task).kind != StepKind::send) follow(other_end(task));
  }

  void touch(std::uint32_t task, std::uint64_t cell, bool is_write) {
    if (!provable_) return;
    Accesses& accesses = accesses_[first_cell_[tasks_[task].rank] + cell];
    const auto after = [&](std::uint32_t earlier) {
      if (earlier != task && !has_bit(past_[task], programs_.size() + earlier))
        fault("is not ordered with " + place(earlier) + "which touches the same element");
    };
    if (accesses.writer >= 0) after(static_cast<std::uint32_t>(accesses.writer));
    if (!is_write) return accesses.readers.push_back(task);
    for (const std::uint32_t reader : accesses.readers) after(reader);
    accesses = {task, {}};
  }

  const std::vector<Program>& programs_;
  const std::vector<Layout>& layouts_;
  const Peers& peers_;
  Terms& terms_;
  const std::uint64_t chunk_;
  const bool newest_first_;
  const bool rendezvous_;
  bool provable_ = false;
  std::mt19937_64 random_;

  std::vector<std::vector<Terms::Id>> memory_;  // [rank][cell]
  std::vector<std::uint64_t> first_cell_;       // of each rank, among all ranks' cells
  std::uint64_t cells_ = 0;
  std::vector<std::uint64_t> finished_;  // [index]: how often

  std::vector<Task> tasks_;
  std::vector<std::vector<std::uint32_t>> first_task_;           // [rank][step]
  std::vector<std::vector<std::vector<Dependency>>> followers_;  // [rank][step]; `on` is the follower
  std::vector<std::vector<std::uint64_t>> left_;                 // [rank][step]: chunks to go
  std::vector<std::uint64_t> waits_;                             // per task: dependencies to go
  std::vector<bool> armed_, executed_;
  std::vector<std::vector<Terms::Id>> mail_;  // per sending task
  std::vector<std::uint32_t> ready_;
  std::vector<Bits> past_;  // per task
  std::vector<Accesses> accesses_;
};

}  // namespace torch_iroh::collective::symbolic
