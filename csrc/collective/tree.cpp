// Algorithm::tree: all_reduce, reduce and broadcast along two binary trees with half of the data each; gather and
// scatter along one binomial tree. Latency grows with log2 N, and every link moves a bounded number of bytes whatever
// N is. Best for small tensors in larger worlds.
//
// Words: N ranks; S elements in all; "messages" and "elements" are what one rank sends. Empty messages are not sent.
//
// The trees, on positions 1..n: a position is as high as it has factors of two; p's children are the nearest positions
// below and above that are exactly one step of its height away (above: or less, where p + step passes n). Odd positions
// are leaves. In the first tree rank r stands at r+1, in the second one further (the last rank at 1): a rank is odd in
// one of them at least, so it has children in one tree at most, and both halves move through all links alike.
//   5 ranks,  first tree:        3            second tree:      2
//                              1   4                          0   3
//                            0   2                          4   1
//
// Source: P. Sanders, J. Speck and J. L. Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and
// scan", Parallel Computing 35(12), 2009. Binomial trees: R. Thakur, R. Rabenseifner and W. Gropp, IJHPCA 19(1), 2005.
#include <algorithm>

#include "collective/builder.hpp"
#include "collective/two_trees.hpp"

namespace torch_iroh::collective {

TreeNode tree_node_of(std::int64_t rank, std::int32_t n, std::int32_t tree) {
  const auto rank_at = [&](std::int64_t position) { return wrap(position - 1 - tree, n); };
  const std::int64_t position = (rank + tree) % n + 1;
  const std::int64_t height = position & -position;
  TreeNode node;
  const std::int64_t above = (position ^ height) | (height << 1);
  if (above <= n) {
    node.parent = rank_at(above);
  } else if (position != height) {
    node.parent = rank_at(position ^ height);
  }
  if (height > 1) node.children.push_back(rank_at(position - height / 2));
  std::int64_t step = height / 2;
  while (step > 0 && position + step > n) step /= 2;
  if (step > 0) node.children.push_back(rank_at(position + step));
  return node;
}

namespace {

Slice half_of(Buffer buffer, std::uint64_t count, std::int32_t tree) {
  return slice_of(buffer, shard_of(count, 2, tree));
}

// reduce and broadcast: the root stands outside, and both trees hold all others. What the outermost root of a tree is
// connected to is the root of the operation.
struct Rooted {
  explicit Rooted(const Request& request) : request_(request), others_(request.world - 1) {}
  bool is_root() const { return request_.rank == request_.root; }
  std::int32_t rank_of(std::int32_t other) const {
    return wrap(std::int64_t{other} + request_.root + 1, request_.world);
  }
  TreeNode node(std::int32_t tree) const {
    TreeNode node;
    if (is_root()) {
      std::int32_t position = 1;
      while (position <= others_ / 2) position *= 2;
      if (others_ > 0) node.children = {rank_of(wrap(position - 1 - tree, others_))};
      return node;
    }
    node = tree_node_of(wrap(std::int64_t{request_.rank} - request_.root - 1, request_.world), others_, tree);
    node.parent = node.parent < 0 ? request_.root : rank_of(node.parent);
    for (std::int32_t& child : node.children) child = rank_of(child);
    return node;
  }

 private:
  const Request& request_;
  const std::int32_t others_;
};

}  // namespace

// In place in output, each half along its tree: partial sums go up, each rank adding its lower child's, then its upper
// child's; the root of the tree finishes; the result goes down. 4 messages and 2S elements at most; fan-out 4 at most
// (3 in the tree where it is inner, 1 in the other); about 2 log2 N hops.
// The result overwrites the partial sum that was sent up: write after read, so it waits for that send.
Schedule tree_all_reduce(const Request& request) {
  ScheduleBuilder builder;
  const TreeNode nodes[2] = {tree_node_of(request.rank, request.world, 0),
                             tree_node_of(request.rank, request.world, 1)};
  for (std::int32_t tree = 0; tree < 2; ++tree) {
    const Slice half = half_of(Buffer::output, request.count, tree);
    for (const std::int32_t child : nodes[tree].children) builder.recv_reduce(child, half, half);
    if (nodes[tree].parent < 0) {
      builder.finish(half);
    } else {
      builder.send(nodes[tree].parent, half);
    }
  }
  for (std::int32_t tree = 0; tree < 2; ++tree) {
    const Slice half = half_of(Buffer::output, request.count, tree);
    if (nodes[tree].parent >= 0) builder.recv(nodes[tree].parent, half);
    for (const std::int32_t child : nodes[tree].children) builder.send(child, half);
  }
  return builder.take();
}

// 6 ranks, root 5: the root sends the first half to 3 and the second to 2 of the picture above, from where they go
// down. 2 messages and S elements at most, also from the root.
Schedule tree_broadcast(const Request& request) {
  const Rooted rooted(request);
  ScheduleBuilder builder;
  for (std::int32_t tree = 0; tree < 2; ++tree) {
    const Slice half = half_of(Buffer::output, request.count, tree);
    const TreeNode node = rooted.node(tree);
    if (!rooted.is_root()) builder.recv(node.parent, half);
    for (const std::int32_t child : node.children) builder.send(child, half);
  }
  return builder.take();
}

// The broadcast backwards: each rank adds its own input and its children's sums. 2 messages of S/2 elements, none from
// the root. Scratch: the half of the tree where a rank has children.
// In place: the root reads its input only in the steps that write output, half by half.
Schedule tree_reduce(const Request& request) {
  const Rooted rooted(request);
  ScheduleBuilder builder;
  if (request.world == 1) builder.copy({Buffer::input, 0, request.count}, {Buffer::output, 0, request.count});
  for (std::int32_t tree = 0; tree < 2; ++tree) {
    const Slice input = half_of(Buffer::input, request.count, tree);
    const Slice output = half_of(Buffer::output, request.count, tree);
    const Slice partial{Buffer::scratch, 0, input.count};
    const TreeNode node = rooted.node(tree);
    Slice sum = input;
    for (const std::int32_t child : node.children) {
      builder.recv_reduce(child, sum, rooted.is_root() ? output : partial);
      sum = rooted.is_root() ? output : partial;
    }
    if (rooted.is_root()) {
      builder.finish(output);
    } else {
      builder.send(node.parent, sum);
      if (!node.children.empty()) builder.lend_scratch(partial.count);
    }
  }
  return builder.take();
}

namespace {

// The binomial tree of gather and scatter: places count from the root, (r - root) mod N. The parent of a place is the
// place without its lowest bit b, and its subtree is the b places from itself on. 5 ranks, root 0:
//       0 -> 4, 2, 1      2 -> 3
class Binomial {
 public:
  explicit Binomial(const Request& request)
      : request_(request),
        place_(wrap(std::int64_t{request.rank} - request.root, request.world)),
        ranges_(ranges_of(request.blocks)) {}

  bool is_root() const { return place_ == 0; }
  bool is_leaf() const { return children().empty(); }
  std::int32_t rank_at(std::int64_t place) const { return wrap(place + request_.root, request_.world); }
  std::int32_t parent() const { return rank_at(place_ & (place_ - 1)); }
  std::vector<std::int32_t> children() const {  // places, largest subtree first
    std::vector<std::int32_t> children;
    for (std::int64_t bit = 1; bit < request_.world && (place_ & bit) == 0; bit *= 2)
      if (place_ + bit < request_.world) children.push_back(static_cast<std::int32_t>(place_ + bit));
    std::reverse(children.begin(), children.end());
    return children;
  }

  // The subtree of a place as messages: one, or two where its ranks pass N-1, as they lie in the root's buffer.
  std::vector<Range> runs(std::int64_t place) const {
    const std::int64_t bit = place == 0 ? request_.world : place & -place;
    const auto length = static_cast<std::int32_t>(std::min<std::int64_t>(bit, request_.world - place));
    const std::int32_t first = rank_at(place);
    const std::int32_t whole = std::min(length, request_.world - first);
    std::vector<Range> runs = {run(first, whole)};
    if (length > whole) runs.push_back(run(0, length - whole));
    return runs;
  }

  // The same as slices: the root's buffer is in rank order, everyone else's scratch in the order of places.
  std::vector<Slice> slices(std::int64_t place, Buffer at_root) const {
    std::vector<Slice> slices;
    std::uint64_t offset = 0;
    for (std::int64_t p = place_; p < place && !is_root(); ++p) offset += request_.blocks[rank_at(p)];
    for (const Range& run : runs(place)) {
      slices.push_back(is_root() ? slice_of(at_root, run) : Slice{Buffer::scratch, offset, run.count});
      offset += run.count;
    }
    return slices;
  }
  std::uint64_t total() const {
    std::uint64_t count = 0;
    for (const Range& run : runs(place_)) count += run.count;
    return count;
  }
  Slice own_in(Buffer buffer) const { return slice_of(buffer, ranges_[request_.rank]); }

 private:
  Range run(std::int32_t from, std::int32_t length) const {
    const Range& last = ranges_[from + length - 1];
    return {ranges_[from].offset, last.offset + last.count - ranges_[from].offset};
  }

  const Request& request_;
  const std::int64_t place_;
  const std::vector<Range> ranges_;
};

}  // namespace

// Each rank collects its subtree's blocks in scratch and sends them to its parent at once. 1 message (2 if its subtree
// passes rank N-1), none from the root; the elements of its subtree; ceil(log2 N) hops. Scratch: the subtree's blocks.
// In place: the root's input is read only by its copy.
Schedule tree_gather(const Request& request) {
  const Binomial tree(request);
  const Slice own{Buffer::input, 0, request.blocks[request.rank]};
  ScheduleBuilder builder;
  if (!tree.is_root() && tree.is_leaf()) {
    builder.send(tree.parent(), own);
    return builder.take();
  }
  builder.copy(own, tree.is_root() ? tree.own_in(Buffer::output) : Slice{Buffer::scratch, 0, own.count});
  for (const std::int32_t child : tree.children())
    for (const Slice& part : tree.slices(child, Buffer::output)) builder.recv(tree.rank_at(child), part);
  if (tree.is_root()) return builder.take();
  builder.lend_scratch(tree.total());
  const std::int32_t place = wrap(std::int64_t{request.rank} - request.root, request.world);
  for (const Slice& part : tree.slices(place, Buffer::scratch)) builder.send(tree.parent(), part);
  return builder.take();
}

// The gather backwards: each rank receives its subtree's blocks, keeps its own and passes the others on, the largest
// subtree first. Root: about log2 N messages, S - block(root) elements.
// In place: the root's own input block is read only by its copy.
Schedule tree_scatter(const Request& request) {
  const Binomial tree(request);
  const Slice own{Buffer::output, 0, request.blocks[request.rank]};
  ScheduleBuilder builder;
  if (!tree.is_root() && tree.is_leaf()) {
    builder.recv(tree.parent(), own);
    return builder.take();
  }
  if (!tree.is_root()) {
    builder.lend_scratch(tree.total());
    const std::int32_t place = wrap(std::int64_t{request.rank} - request.root, request.world);
    for (const Slice& part : tree.slices(place, Buffer::scratch)) builder.recv(tree.parent(), part);
  }
  for (const std::int32_t child : tree.children())
    for (const Slice& part : tree.slices(child, Buffer::input)) builder.send(tree.rank_at(child), part);
  builder.copy(tree.is_root() ? tree.own_in(Buffer::input) : Slice{Buffer::scratch, 0, own.count}, own);
  return builder.take();
}

}  // namespace torch_iroh::collective
