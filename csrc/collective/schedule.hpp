// What one rank does in one collective, as data. Pure: no socket, thread, clock or pointer.
//
// Words: a *step* is one action of one rank on one element range; a *message* is what one send step gives to the
// matching receive step; a *shard* is one rank's part of a tensor; a *chunk* is the piece of a step that the executor
// moves at once. Makers speak of steps and shards; only the executor cuts steps into chunks.
//
// Order: a step sees the effect of every earlier step of its rank that touches an overlapping range of the same
// buffer (read after write, write after read, write after write). Nothing else orders steps.
// Pairing: the k-th message from rank a to rank b meets b's k-th receive from a (`message` is that k).
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace torch_iroh::collective {

enum class Op : std::uint8_t {
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  gather,
  scatter,
  all_to_all,
  barrier,
};

enum class Algorithm : std::uint8_t { ring, direct, ring_bidirectional, tree, butterfly, bruck, hierarchical };
inline constexpr int kAlgorithmCount = 7;

class Hierarchy;

constexpr bool reduces(Op op) {
  return op == Op::all_reduce || op == Op::reduce || op == Op::reduce_scatter;
}

std::string_view name_of(Op op);
std::string_view name_of(Algorithm algorithm);

enum class Buffer : std::uint8_t { input, output, scratch };

struct Slice {
  Buffer buffer = Buffer::output;
  std::uint64_t offset = 0;  // elements
  std::uint64_t count = 0;   // elements
  bool operator==(const Slice&) const = default;
};

enum class StepKind : std::uint8_t {
  send,         // `from` goes to `peer`
  recv,         // `to` = what came from `peer`
  recv_reduce,  // `to` = reduce(`from`, what came from `peer`); `from` may equal `to`
  copy,         // `to` = `from`
  finish,       // last touch of a reduced range `to`: AVG divides by the world, every other op does nothing
};

struct Step {
  StepKind kind = StepKind::copy;
  std::int32_t peer = -1;
  std::uint32_t message = 0;
  Slice from;
  Slice to;
};

struct Schedule {
  std::vector<Step> steps;
  std::uint64_t scratch_count = 0;  // elements the executor must lend as Buffer::scratch
};

// What is asked for. Buffers by operation (all in elements):
//   all_reduce, broadcast   output[count], in place; input is not used
//   reduce                  input[count] everywhere (never written), output[count] at the root only (may be the input)
//   all_gather              input = own block, output = blocks in rank order
//   reduce_scatter          input = blocks in rank order (never written), output = own block
//   gather                  input = own block; root: output = blocks in rank order
//   scatter                 root: input = blocks in rank order; output = own block
//   all_to_all              input = send_blocks in rank order, output = blocks (received) in rank order
//   barrier                 none: a few empty messages
struct Request {
  Op op = Op::barrier;
  Algorithm algorithm = Algorithm::ring;
  std::int32_t rank = 0;
  std::int32_t world = 1;
  std::int32_t root = 0;
  std::uint64_t count = 0;                       // all_reduce, reduce, broadcast
  std::vector<std::uint64_t> blocks;             // per rank: all_gather, reduce_scatter, gather, scatter, all_to_all
  std::vector<std::uint64_t> send_blocks;        // per rank: all_to_all
  bool even = false;                             // all_to_all: all ranks know that all blocks of all ranks are equal
  std::shared_ptr<const Hierarchy> hierarchy{};  // of this world, equal on all ranks; for Algorithm::hierarchical
  // Who takes part; none: the world. This rank and a root are among them, there is one block for each of them, and AVG
  // divides by the world all the same: theirs are sums of what others gave them.
  std::shared_ptr<const std::vector<std::int32_t>> members{};
};

inline std::int32_t participants(const Request& request) {
  return request.members ? static_cast<std::int32_t>(request.members->size()) : request.world;
}

// Whether `algorithm` has a maker of its own for `request`. Depends only on what all ranks know alike.
//                      all_reduce  reduce  broadcast  all_gather  reduce_scatter  gather  scatter  all_to_all  barrier
//   ring                   x         x         x          x             x
//   direct                 x         x         x          x             x           x        x         x          x
//   ring_bidirectional     x                              x             x
//   tree                   x         x         x                                    x        x
//   butterfly              x                              x             x
//   bruck                                                 x                                          even
//   hierarchical           x         x         x          x             x           x        x                    x
// (direct's barrier is by dissemination; hierarchical needs Request::hierarchy)
bool supports(Algorithm algorithm, const Request& request);

// `wanted` where it is supported, else its nearest kin that is: ring for ring_bidirectional; tree, then butterfly, for
// the other one and for bruck; at last direct, which does everything.
Algorithm nearest(Algorithm wanted, const Request& request);

// The maker for `request`, by `nearest` of its algorithm. Throws std::invalid_argument when a field is out of range
// (rank, root, wrong number of blocks, a hierarchy of another world, members without this rank).
Schedule make_schedule(const Request& request);

// An edge of the order above: `step` must wait for `on`. When `by_chunk`, both touch exactly the same number of
// elements at the same place, so chunk c waits for chunk c only.
struct Dependency {
  std::uint32_t on = 0;
  bool by_chunk = false;
};
std::vector<std::vector<Dependency>> dependencies_of(const Schedule& schedule);

// The balanced split that every maker uses: the first `count % world` shards hold one element more.
struct Range {
  std::uint64_t offset = 0;
  std::uint64_t count = 0;
};
Range shard_of(std::uint64_t count, std::int32_t world, std::int32_t index);

}  // namespace torch_iroh::collective
