// Proves schedules right without moving a byte: runs all ranks of one collective symbolically and says what is wrong.
// Knows schedules and what each operation promises; knows no algorithm, dtype, clock or network.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collective/schedule.hpp"

namespace torch_iroh::collective {

struct VerifyOptions {
  std::uint64_t chunk = 3;     // elements that a step moves at once
  std::uint32_t orders = 4;    // executions to try: newest ready chunk first, then random; half of them by rendezvous
  std::uint64_t seed = 1;      // of the random orders
  bool in_place = false;       // the own block of input and of output is one memory (reduce: at the root, all of it)
  bool happens_before = true;  // also prove every pair of conflicting accesses ordered (up to kProvenChunks chunks)
  static constexpr std::uint64_t kProvenChunks = 2000;
};

// `ok`, or `why` names rank, step and element of the first fault. The rest is measured on the schedules as they are.
struct Verdict {
  bool ok = true;
  std::string why;
  std::uint64_t fan_out_max = 0;        // peers one rank sends to
  std::uint64_t messages_sent_max = 0;  // of one rank
  std::uint64_t elements_sent_max = 0;  // of one rank
  std::uint64_t scratch_max = 0;        // elements one rank borrows
};

// What one rank runs. Made by `programs_of`; a test may spoil one to see the verifier complain.
struct Program {
  Request request;
  Schedule schedule;
  std::vector<std::vector<Dependency>> dependencies;
};

// Every rank's program for `request`, whose own rank does not matter. An all_to_all must be even (all blocks equal).
std::vector<Program> programs_of(const Request& request);

// Every rank's program for an all_to_all where rank i sends counts[i][j] elements to rank j.
std::vector<Program> programs_of(const std::vector<std::vector<std::uint64_t>>& counts);

// What is proved, for every order that the dependencies permit and that was tried:
// - the two ends of every pair of ranks agree on messages and counts; steps lie inside their buffers and are not empty;
// - no deadlock, whether a send completes at once or only when the peer receives; every message is consumed;
// - no step reads what nobody wrote, nobody writes input, no two unordered accesses conflict;
// - every output element is what the operation promises: the one source element, or every rank's contribution exactly
//   once, finished exactly once, last, by one owner, summed in one order that is the same at all ranks in every run;
// - a barrier's rank ends only after every rank has begun.
Verdict verify(const std::vector<Program>& programs, const VerifyOptions& options = {});
Verdict verify(const Request& request, const VerifyOptions& options = {});
Verdict verify(const std::vector<std::vector<std::uint64_t>>& counts, const VerifyOptions& options = {});

}  // namespace torch_iroh::collective
