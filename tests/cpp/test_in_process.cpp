// The real group over the in-process transport, with real data: every collective and message against references in
// double, failures and the words they end with, and a transport that delays and reorders, to show that results do not
// depend on timing.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/workers.hpp"
#include "collective/group.hpp"
#include "collective/hierarchy.hpp"
#include "support.hpp"
#include "transport/gate.hpp"
#include "transport/in_process.hpp"

namespace {

using namespace torch_iroh;
using namespace torch_iroh::testing;
using collective::Algorithm;
using collective::Group;
using collective::GroupOptions;
using collective::Op;
using transport::Tag;
using Bytes = std::vector<std::byte>;

const std::vector<int> kWorlds = {1, 2, 3, 5, 7};
const std::vector<Op> kOps = {Op::all_reduce, Op::reduce,  Op::broadcast,  Op::all_gather, Op::reduce_scatter,
                              Op::gather,     Op::scatter, Op::all_to_all, Op::barrier};
const std::vector<Algorithm> kAlgorithms = {Algorithm::ring, Algorithm::direct};
const std::vector<Algorithm> kOthers = {Algorithm::ring_bidirectional, Algorithm::tree, Algorithm::butterfly,
                                        Algorithm::bruck, Algorithm::hierarchical};

// What does not depend on the algorithm is looked for under sanitizers with two of them only. (Without a hierarchy,
// hierarchical is direct.)
std::vector<Algorithm> all_algorithms() {
  std::vector<Algorithm> all = kAlgorithms;
  if (!kSanitized) all.insert(all.end(), kOthers.begin(), kOthers.end() - 1);
  return all;
}

// ---- a transport that delays and reorders ----

// Between a group and its in-process end. Data is held for a random while, so that chunks of all messages overtake each
// other and the control messages; control messages of one sender keep their order, and a goodbye comes last. Payloads
// are copied, as a network does: senders get their memory back long before the receiver has looked at it.
class Jitter final : public transport::Transport,
                     public transport::Receiver,
                     public std::enable_shared_from_this<Jitter> {
 public:
  Jitter(std::shared_ptr<transport::Transport> inner, unsigned seed, Duration longest)
      : inner_(std::move(inner)),
        longest_us_(std::chrono::duration_cast<std::chrono::microseconds>(longest).count()),
        strand_(std::make_shared<Strand>(workers())),
        random_(seed),
        senders_(static_cast<std::size_t>(inner_->world())) {}
  ~Jitter() override { close({}); }

  int rank() const override { return inner_->rank(); }
  int world() const override { return inner_->world(); }
  void start(Receiver& receiver) override {
    gate_.open(receiver);
    inner_->start(*this);
  }
  void send(int peer, const Tag& tag, std::span<const std::byte> bytes, transport::SendDone done) override {
    inner_->send(peer, tag, bytes, std::move(done));
  }
  void send_control(int peer, std::vector<std::byte> bytes) override { inner_->send_control(peer, std::move(bytes)); }
  void connect(int peer) override { inner_->connect(peer); }
  bool connected(int peer) const override { return inner_->connected(peer); }
  bool may_wait_for_receiver() const override { return false; }  // it delivers on the threads that receivers run on
  void close(Duration linger) override {
    if (closed_.exchange(true)) return;
    gate_.close();
    inner_->close(linger);
  }
  std::vector<transport::PeerStats> stats() const override { return inner_->stats(); }

  void on_data(int from, const Tag& tag, Payload payload) override {
    later(from, [from, tag, copy = Payload::copy_of(payload.bytes())](Receiver& receiver) {
      receiver.on_data(from, tag, copy);
    });
  }
  void on_control(int from, Payload payload) override {
    {
      const std::lock_guard lock(mutex_);
      senders_[static_cast<std::size_t>(from)].control.push_back(std::move(payload));
    }
    later(from, [this, from](Receiver& receiver) {  // whichever timer fires, the oldest is next
      Payload next;
      {
        const std::lock_guard lock(mutex_);
        auto& control = senders_[static_cast<std::size_t>(from)].control;
        next = std::move(control.front());
        control.pop_front();
      }
      receiver.on_control(from, std::move(next));
    });
  }
  void on_lost(int rank, bool left, const Error& cause) override {
    {
      const std::lock_guard lock(mutex_);
      senders_[static_cast<std::size_t>(rank)].lost.emplace(left, cause);
    }
    later(rank, [](Receiver&) {});
  }

 private:
  struct Sender {
    std::deque<Payload> control;
    int on_their_way = 0;
    std::optional<std::pair<bool, Error>> lost;
  };

  void later(int from, std::function<void(Receiver&)> deliver) {
    std::int64_t wait_us = 0;
    {
      const std::lock_guard lock(mutex_);
      ++senders_[static_cast<std::size_t>(from)].on_their_way;
      wait_us = static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(longest_us_ + 1));
    }
    auto task = [weak = weak_from_this(), from, deliver = std::move(deliver)] {
      const auto self = weak.lock();
      if (!self) return;
      self->strand_->post([self, from, deliver] { self->gate_.with(deliver), self->arrived(from); });
    };
    workers().at(Clock::now() + std::chrono::microseconds(wait_us), std::move(task));
  }

  void arrived(int from) {
    std::optional<std::pair<bool, Error>> lost;
    {
      const std::lock_guard lock(mutex_);
      Sender& sender = senders_[static_cast<std::size_t>(from)];
      if (--sender.on_their_way == 0) lost.swap(sender.lost);
    }
    if (lost) gate_.with([&](Receiver& receiver) { receiver.on_lost(from, lost->first, lost->second); });
  }

  const std::shared_ptr<transport::Transport> inner_;
  const std::int64_t longest_us_;
  const std::shared_ptr<Strand> strand_;
  transport::ReceiverGate gate_;
  std::mutex mutex_;
  std::mt19937 random_;
  std::vector<Sender> senders_;
  std::atomic<bool> closed_{false};
};

// ---- a world of ranks ----

struct WorldOptions {
  std::size_t chunk_bytes = 1024;
  std::optional<Algorithm> algorithm{};
  std::optional<unsigned> jitter{};  // a seed
  Duration longest_delay = milliseconds(2);
};

class World {
 public:
  explicit World(int world, const WorldOptions& options = {}) : ends(transport::make_in_process(world)) {
    for (int rank = 0; rank < world; ++rank) {
      std::shared_ptr<transport::Transport> end = ends[static_cast<std::size_t>(rank)];
      if (options.jitter) {
        end = std::make_shared<Jitter>(end, *options.jitter * 100 + static_cast<unsigned>(rank), options.longest_delay);
      }
      GroupOptions group;
      group.name = "test";
      group.chunk_bytes = options.chunk_bytes;
      if (options.algorithm) group.pins = collective::Pins::everything(*options.algorithm);
      groups.push_back(Group::make(std::move(end), group));
    }
  }
  ~World() { leave(); }

  Group& operator[](int rank) { return *groups[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(ends.size()); }

  void leave() {  // all at once: a rank with something in flight waits a while before it goes
    std::vector<std::thread> leaving;
    for (const auto& group : groups) leaving.emplace_back([group] { group->shutdown(); });
    for (std::thread& thread : leaving) thread.join();
    groups.clear();
  }
  void sever(int rank, const std::string& why) { transport::sever(*ends[static_cast<std::size_t>(rank)], why); }

  std::vector<std::shared_ptr<transport::Transport>> ends;
  std::vector<std::shared_ptr<Group>> groups;
};

// ---- numbers ----

bool is_unsigned(DType dtype) {
  return dtype == DType::uint8;
}
bool is_integer(DType dtype) {
  return dtype == DType::uint8 || dtype == DType::int32 || dtype == DType::int64;
}

template <typename T>
void store_as(std::byte* at, double value) {
  const T stored = static_cast<T>(value);
  std::memcpy(at, &stored, sizeof stored);
}
template <typename T>
double load_as(const std::byte* at) {
  T stored;
  std::memcpy(&stored, at, sizeof stored);
  return static_cast<double>(stored);
}

void store(DType dtype, std::byte* data, std::uint64_t i, double value) {
  std::byte* at = data + i * size_of(dtype);
  switch (dtype) {
    case DType::uint8: return store_as<std::uint8_t>(at, value);
    case DType::int32: return store_as<std::int32_t>(at, value);
    case DType::int64: return store_as<std::int64_t>(at, value);
    case DType::float64: return store_as<double>(at, value);
    case DType::bfloat16: {  // the upper half of a float; exact for what is stored here
      const auto wide = static_cast<float>(value);
      std::memcpy(at, reinterpret_cast<const std::byte*>(&wide) + 2, 2);
      return;
    }
    default: return store_as<float>(at, value);
  }
}
double load(DType dtype, const std::byte* data, std::uint64_t i) {
  const std::byte* at = data + i * size_of(dtype);
  switch (dtype) {
    case DType::uint8: return load_as<std::uint8_t>(at);
    case DType::int32: return load_as<std::int32_t>(at);
    case DType::int64: return load_as<std::int64_t>(at);
    case DType::float64: return load_as<double>(at);
    case DType::bfloat16: {
      std::array<std::byte, 4> wide{};
      std::memcpy(wide.data() + 2, at, 2);
      return load_as<float>(wide.data());
    }
    default: return load_as<float>(at);
  }
}
double tolerance(DType dtype) {
  return dtype == DType::float64 ? 1e-13 : dtype == DType::float32 ? 1e-5 : dtype == DType::bfloat16 ? 0.02 : 0.0;
}

std::uint64_t mix(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// ---- one collective ----

struct Spec {
  Op op = Op::all_reduce;
  DType dtype = DType::float32;
  ReduceOp reduce = ReduceOp::sum;
  std::uint64_t count = 0;  // of the tensor, or of an even block
  int root = 0;
  bool uneven = false;
  bool real = false;  // any numbers; else small whole ones, whose sums are exact in every dtype
  std::uint64_t seed = 0;
  Duration timeout = kPatience;
  std::shared_ptr<const collective::Hierarchy> hierarchy{};

  std::string text() const {
    return std::string(name_of(op)) + "(" + std::string(name_of(reduce)) + ", " + std::string(name_of(dtype)) +
           ", count " + std::to_string(count) + (uneven ? ", uneven" : "") + ", root " + std::to_string(root) +
           ", seed " + std::to_string(seed) + ")";
  }
  bool has_blocks() const {
    return op == Op::all_gather || op == Op::reduce_scatter || op == Op::gather || op == Op::scatter;
  }
  bool reduces() const { return op == Op::all_reduce || op == Op::reduce || op == Op::reduce_scatter; }
  bool symmetric() const { return op == Op::all_reduce || op == Op::reduce || op == Op::broadcast; }

  std::uint64_t block(int rank) const {
    const auto r = static_cast<std::uint64_t>(rank);
    return !uneven ? count : r % 3 == 1 ? 0 : count * (r % 4 + 1) / 2;
  }
  std::uint64_t cell(int from, int to) const {  // all_to_all
    return !uneven ? count : mix(seed * 31 + static_cast<std::uint64_t>(from * 16 + to)) % (count + 1);
  }
  double factor(int rank) const { return reduce == ReduceOp::premul_sum ? 0.5 * (rank + 1) : 1.0; }

  // Element i of what `rank` brings.
  double brings(int rank, std::uint64_t i) const {
    const std::uint64_t bits = mix(mix(seed * 64 + static_cast<std::uint64_t>(rank)) + i);
    if (real) return static_cast<double>(bits >> 11) * 0x1p-52 - 1.0;
    if (reduce == ReduceOp::product) return static_cast<double>(1 + bits % 2);
    return is_unsigned(dtype) ? static_cast<double>(bits % 5) : static_cast<double>(bits % 7) - 3.0;
  }
  double reduced(int world, std::uint64_t i) const {
    double result = brings(0, i) * factor(0);
    for (int rank = 1; rank < world; ++rank) {
      const double next = brings(rank, i) * factor(rank);
      const auto a = static_cast<std::int64_t>(result), b = static_cast<std::int64_t>(next);
      switch (reduce) {
        case ReduceOp::product: result *= next; break;
        case ReduceOp::min: result = std::min(result, next); break;
        case ReduceOp::max: result = std::max(result, next); break;
        case ReduceOp::band: result = static_cast<double>(a & b); break;
        case ReduceOp::bor: result = static_cast<double>(a | b); break;
        case ReduceOp::bxor: result = static_cast<double>(a ^ b); break;
        default: result += next;
      }
    }
    if (reduce == ReduceOp::avg) result = is_integer(dtype) ? std::trunc(result / world) : result / world;
    return result;
  }
};

// Memory with guards around it.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes = 0) : all_(bytes + 2 * kGuard, std::byte{0xa5}) {}
  std::byte* data() { return all_.data() + kGuard; }
  std::size_t size() const { return all_.size() - 2 * kGuard; }
  Bytes bytes() const { return {all_.begin() + kGuard, all_.end() - kGuard}; }
  bool guards_intact() const {
    const auto intact = [](std::byte byte) { return byte == std::byte{0xa5}; };
    return std::all_of(all_.begin(), all_.begin() + kGuard, intact) &&
           std::all_of(all_.end() - kGuard, all_.end(), intact);
  }

 private:
  static constexpr std::ptrdiff_t kGuard = 32;
  Bytes all_;
};

// One rank's part of a collective: its memory, its call, how it ended.
class Part : public std::enable_shared_from_this<Part> {
 public:
  Part(const Spec& spec, int rank, int world) : spec_(spec), rank_(rank), world_(world) {
    const std::uint64_t own = spec.block(rank);
    std::uint64_t blocks = 0, sent = 0, received = 0;
    for (int r = 0; r < world; ++r) {
      blocks += spec.block(r), sent += spec.cell(rank, r), received += spec.cell(r, rank);
    }
    const bool root = rank == spec.root;
    switch (spec.op) {
      case Op::all_reduce:
      case Op::broadcast: make(0, spec.count); break;
      case Op::reduce: make(spec.count, root ? spec.count : 0); break;
      case Op::all_gather: make(own, blocks); break;
      case Op::reduce_scatter: make(blocks, own); break;
      case Op::gather: make(own, root ? blocks : 0); break;
      case Op::scatter: make(root ? blocks : 0, own); break;
      case Op::all_to_all: make(sent, received); break;
      case Op::barrier: make(0, 0); break;
    }
    if (spec.op == Op::all_reduce || (spec.op == Op::broadcast && root)) fill(output_);
    fill(input_);
    input_before_ = input_.bytes();
  }

  void submit(Group& group) {
    collective::CollectiveCall call;
    call.request.op = spec_.op;
    call.request.root = spec_.root;
    if (spec_.symmetric()) call.request.count = spec_.count;
    for (int r = 0; r < world_; ++r) {
      if (spec_.has_blocks()) call.request.blocks.push_back(spec_.block(r));
      if (spec_.op != Op::all_to_all) continue;
      call.request.blocks.push_back(spec_.cell(r, rank_));
      call.request.send_blocks.push_back(spec_.cell(rank_, r));
    }
    call.request.even = spec_.op == Op::all_to_all && !spec_.uneven;
    call.request.hierarchy = spec_.hierarchy;
    call.work.dtype = spec_.dtype;
    if (spec_.reduces()) {
      call.work.reduce = spec_.reduce;
      call.work.premul = spec_.factor(rank_);
    }
    call.work.input = input_.data();
    call.work.output = output_.data();
    call.work.keep = shared_from_this();
    if (spec_.op != Op::barrier && !spec_.uneven) call.shape = "[" + std::to_string(spec_.count) + "]";
    call.timeout = spec_.timeout;
    call.done = [outcome = outcome](const Error* error) { outcome->set(error); };
    group.submit(std::move(call));
  }

  // Says what is wrong with what this rank has now; empty: nothing.
  std::string wrong() {
    if (outcome->calls() != 1) return "done was called " + std::to_string(outcome->calls()) + " times";
    if (const auto error = outcome->error()) return error->what();
    if (!input_.guards_intact() || !output_.guards_intact()) return "wrote outside its buffers";
    if (input_.bytes() != input_before_) return "wrote to its input";
    std::uint64_t at = 0;
    std::string text;
    const auto expect = [&](double wanted) {
      const double got = load(spec_.dtype, output_.data(), at);
      const bool exact = is_integer(spec_.dtype) || !(spec_.real || spec_.reduce == ReduceOp::avg);
      const double bound = exact ? 0.0 : tolerance(spec_.dtype) * std::max(1.0, std::fabs(wanted));
      if (text.empty() && !(std::fabs(got - wanted) <= bound)) {
        text = "element " + std::to_string(at) + " is " + std::to_string(got) + ", not " + std::to_string(wanted);
      }
      ++at;
    };
    const auto blocks_before = [&](int rank) {
      std::uint64_t sum = 0;
      for (int r = 0; r < rank; ++r) sum += spec_.block(r);
      return sum;
    };
    const bool root = rank_ == spec_.root;
    switch (spec_.op) {
      case Op::all_reduce:
      case Op::reduce:
        for (std::uint64_t i = 0; i < spec_.count && (root || spec_.op == Op::all_reduce); ++i) {
          expect(spec_.reduced(world_, i));
        }
        break;
      case Op::broadcast:
        for (std::uint64_t i = 0; i < spec_.count; ++i) expect(rounded(spec_.brings(spec_.root, i)));
        break;
      case Op::all_gather:
      case Op::gather:
        for (int r = 0; r < world_ && (root || spec_.op == Op::all_gather); ++r) {
          for (std::uint64_t i = 0; i < spec_.block(r); ++i) expect(rounded(spec_.brings(r, i)));
        }
        break;
      case Op::reduce_scatter:
        for (std::uint64_t i = 0; i < spec_.block(rank_); ++i) expect(spec_.reduced(world_, blocks_before(rank_) + i));
        break;
      case Op::scatter:
        for (std::uint64_t i = 0; i < spec_.block(rank_); ++i) {
          expect(rounded(spec_.brings(spec_.root, blocks_before(rank_) + i)));
        }
        break;
      case Op::all_to_all:
        for (int r = 0; r < world_; ++r) {
          std::uint64_t before = 0;
          for (int to = 0; to < rank_; ++to) before += spec_.cell(r, to);
          for (std::uint64_t i = 0; i < spec_.cell(r, rank_); ++i) expect(rounded(spec_.brings(r, before + i)));
        }
        break;
      case Op::barrier: break;
    }
    if (text.empty() && at * size_of(spec_.dtype) != output_.size()) text = "the test has forgotten elements";
    return text;
  }

  Bytes result() const { return output_.bytes(); }

  const std::shared_ptr<Outcome> outcome = std::make_shared<Outcome>();

 private:
  void make(std::uint64_t input, std::uint64_t output) {
    input_ = Guarded(input * size_of(spec_.dtype));
    output_ = Guarded(output * size_of(spec_.dtype));
  }
  void fill(Guarded& memory) {
    for (std::uint64_t i = 0; i < memory.size() / size_of(spec_.dtype); ++i) {
      store(spec_.dtype, memory.data(), i, spec_.brings(rank_, i));
    }
  }
  double rounded(double value) const {  // as it lies in memory
    std::array<std::byte, 16> element{};
    store(spec_.dtype, element.data(), 0, value);
    return load(spec_.dtype, element.data(), 0);
  }

  const Spec spec_;
  const int rank_;
  const int world_;
  Guarded input_;
  Guarded output_;
  Bytes input_before_;
};

// The same collective on every rank.
class Job {
 public:
  Job(const Spec& spec, int world) : spec(spec) {
    for (int rank = 0; rank < world; ++rank) parts.push_back(std::make_shared<Part>(spec, rank, world));
  }
  void submit(World& world) {
    for (int rank = 0; rank < world.size(); ++rank) parts[static_cast<std::size_t>(rank)]->submit(world[rank]);
  }
  bool wait() {
    return std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part->outcome->wait(); });
  }
  void expect_right(const std::string& where) {
    wait();
    const bool alike = spec.op == Op::all_reduce || spec.op == Op::broadcast || spec.op == Op::all_gather;
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      const std::string wrong = parts[rank]->wrong();
      if (!wrong.empty()) FAIL_CHECK(where << spec.text() << ", rank " << rank << ": " << wrong);
      if (alike && parts[rank]->result() != parts[0]->result()) {
        FAIL_CHECK(where << spec.text() << ": the bits of rank " << rank << " are not those of rank 0");
      }
    }
  }

  const Spec spec;
  std::vector<std::shared_ptr<Part>> parts;
};

bool meaningful(ReduceOp op, DType dtype) {
  const bool bitwise = op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
  if (op == ReduceOp::premul_sum) return !is_integer(dtype);
  if (bitwise) return is_integer(dtype);
  return true;
}

Spec random_spec(std::mt19937_64& random, int world) {
  static const std::array kDTypes = {DType::uint8,    DType::int32,   DType::int64,
                                     DType::bfloat16, DType::float32, DType::float64};
  static const std::array kReduce = {ReduceOp::sum,  ReduceOp::avg,  ReduceOp::product,
                                     ReduceOp::min,  ReduceOp::max,  ReduceOp::bor,
                                     ReduceOp::bxor, ReduceOp::band, ReduceOp::premul_sum};
  static const std::array<std::uint64_t, 8> kCounts = {0, 1, 2, 13, 63, 257, 1001, 4099};
  Spec spec;
  spec.op = kOps[random() % kOps.size()];
  do {
    spec.dtype = kDTypes[random() % kDTypes.size()];
    spec.reduce = kReduce[random() % kReduce.size()];
  } while (!meaningful(spec.reduce, spec.dtype));
  spec.count = kCounts[random() % (kSanitized ? 7 : 8)];
  spec.root = static_cast<int>(random() % static_cast<std::uint64_t>(world));
  spec.uneven = (spec.has_blocks() || spec.op == Op::all_to_all) && random() % 2 == 0;
  spec.real = (spec.dtype == DType::float32 || spec.dtype == DType::float64) && spec.reduce != ReduceOp::product &&
              random() % 2 == 0;
  spec.seed = random() % 1'000'000;
  return spec;
}

// Hosts of unequal sizes whose ranks are not side by side, in levels of at most 3.
std::shared_ptr<const collective::Hierarchy> scattered(int world) {
  std::vector<std::vector<std::int32_t>> hosts(static_cast<std::size_t>(std::max(1, world / 3)));
  for (int rank = 0; rank < world; ++rank) {
    hosts[static_cast<std::size_t>(rank * rank + 1) % hosts.size()].push_back(rank);
  }
  std::erase_if(hosts, [](const auto& host) { return host.empty(); });
  return std::make_shared<const collective::Hierarchy>(
      collective::Hierarchy::of_groups(world, {hosts}, {.fan_out = 3}));
}

std::string where(int world, const WorldOptions& options) {
  return "world " + std::to_string(world) + ", chunk " + std::to_string(options.chunk_bytes) + ", " +
         (options.algorithm ? std::string(name_of(*options.algorithm)) : std::string("auto")) +
         (options.jitter ? ", jitter " + std::to_string(*options.jitter) : "") + ": ";
}

bool says(const std::optional<Error>& error, const std::string& part) {
  return error && contains(error->what(), part);
}
std::string text_of(const std::optional<Error>& error) {
  return error ? error->what() : "no error";
}

}  // namespace

// ---- collectives ----

TEST_CASE("group: every collective equals its reference at every world, algorithm, chunk size and count") {
  for (const int world : kWorlds) {
    for (const Algorithm algorithm : kAlgorithms) {
      for (const std::size_t chunk :
           kSanitized ? std::vector<std::size_t>{1024} : std::vector<std::size_t>{64, 1024, 1 << 20}) {
        WorldOptions options{.chunk_bytes = chunk, .algorithm = algorithm};
        World ranks(world, options);
        std::vector<Job> jobs;
        std::mt19937_64 random(static_cast<std::uint64_t>(world) * 10 + chunk);
        for (const Op op : kOps) {
          for (const std::uint64_t count : {0, 1, 13, 257, kSanitized ? 1001 : 4099}) {
            Spec spec = random_spec(random, world);
            spec.op = op;
            spec.count = count;
            spec.uneven = (spec.has_blocks() || op == Op::all_to_all) && count % 4 == 1 && spec.uneven;
            jobs.emplace_back(spec, world);
            jobs.back().submit(ranks);
          }
        }
        for (Job& job : jobs) job.expect_right(where(world, options));
      }
    }
  }
}

TEST_CASE("group: every reduction and dtype equals its reference") {
  for (const Algorithm algorithm : kAlgorithms) {
    WorldOptions options{.chunk_bytes = 256, .algorithm = algorithm};
    World ranks(3, options);
    std::vector<Job> jobs;
    for (const DType dtype :
         {DType::uint8, DType::int32, DType::int64, DType::bfloat16, DType::float32, DType::float64}) {
      for (const ReduceOp reduce : {ReduceOp::sum, ReduceOp::avg, ReduceOp::product, ReduceOp::min, ReduceOp::max,
                                    ReduceOp::band, ReduceOp::bor, ReduceOp::bxor, ReduceOp::premul_sum}) {
        if (!meaningful(reduce, dtype)) continue;
        for (const Op op : {Op::all_reduce, Op::reduce, Op::reduce_scatter}) {
          jobs.emplace_back(Spec{.op = op, .dtype = dtype, .reduce = reduce, .count = 301, .root = 1, .seed = 8}, 3);
          jobs.back().submit(ranks);
        }
      }
    }
    for (Job& job : jobs) job.expect_right(where(3, options));
  }
}

TEST_CASE("group: every collective equals its reference by every other algorithm too") {
  for (const int world : kSanitized ? std::vector<int>{3, 8} : std::vector<int>{2, 3, 5, 7, 8, 9}) {
    for (const Algorithm algorithm : kOthers) {
      WorldOptions options{.chunk_bytes = world % 2 == 0 ? 64U : 1024U, .algorithm = algorithm};
      if (world == 9) options.jitter = 9, options.longest_delay = milliseconds(1);
      World ranks(world, options);
      std::vector<Job> jobs;
      std::mt19937_64 random(static_cast<std::uint64_t>(world));
      for (const Op op : kOps) {
        for (const std::uint64_t count : {0, 1, 13, 257, kSanitized ? 301 : 1001}) {
          Spec spec = random_spec(random, world);
          spec.op = op;
          spec.count = count;
          spec.uneven = (spec.has_blocks() || op == Op::all_to_all) && count % 4 == 1 && spec.uneven;
          spec.hierarchy = scattered(world);
          jobs.emplace_back(spec, world);
        }
      }
      for (const DType dtype : {DType::bfloat16, DType::float32, DType::int32}) {
        for (const ReduceOp reduce : {ReduceOp::sum, ReduceOp::avg, ReduceOp::premul_sum}) {
          if (!meaningful(reduce, dtype)) continue;
          for (const Op op : {Op::all_reduce, Op::reduce, Op::reduce_scatter}) {
            Spec spec{.op = op, .dtype = dtype, .reduce = reduce, .count = 301, .root = 1, .seed = 8};
            spec.hierarchy = scattered(world);
            jobs.emplace_back(spec, world);
          }
        }
      }
      for (Job& job : jobs) job.submit(ranks);
      for (Job& job : jobs) job.expect_right(where(world, options));
    }
  }
}

TEST_CASE("group: messages beyond the allowance wait for their receiver and arrive whole") {
  for (const int world : {2, 3}) {
    for (const std::optional<unsigned> jitter : {std::optional<unsigned>(), std::optional<unsigned>(1)}) {
      WorldOptions options{.chunk_bytes = 64 << 10, .jitter = jitter};
      World ranks(world, options);
      std::vector<Job> jobs;
      for (const Op op : {Op::broadcast, Op::all_reduce, Op::gather, Op::all_to_all, Op::broadcast}) {
        const std::uint64_t count = kSanitized ? 140'003 : 400'003;  // 1.1 or 3.2 MB
        jobs.emplace_back(Spec{.op = op, .dtype = DType::float64, .count = count, .real = true, .seed = 3}, world);
      }
      for (Job& job : jobs) job.parts[0]->submit(ranks[0]);  // runs ahead of the others, as far as it may
      std::this_thread::sleep_for(milliseconds(20));
      for (Job& job : jobs) {
        for (int rank = 1; rank < world; ++rank) job.parts[static_cast<std::size_t>(rank)]->submit(ranks[rank]);
      }
      for (Job& job : jobs) job.expect_right(where(world, options));
    }
  }
}

TEST_CASE("group: many operations queued without waiting end in order, each with its own result") {
  const int count = kSanitized ? 60 : 400;
  for (const int world : {2, 3, 7}) {
    World ranks(world);
    std::mt19937_64 random(static_cast<std::uint64_t>(world));
    std::vector<Job> jobs;
    for (int i = 0; i < count; ++i) jobs.emplace_back(random_spec(random, world), world);
    std::vector<std::thread> submitters;
    for (int rank = 0; rank < world; ++rank) {
      submitters.emplace_back([&, rank] {
        for (Job& job : jobs) job.parts[static_cast<std::size_t>(rank)]->submit(ranks[rank]);
      });
    }
    for (std::thread& submitter : submitters) submitter.join();
    CHECK(jobs.back().wait());
    for (Job& job : jobs) {
      for (const auto& part : job.parts) CHECK(part->outcome->calls() == 1);  // an earlier one ends earlier
      job.expect_right(where(world, {}));
    }
    for (int rank = 0; rank < world; ++rank) {
      CHECK(ranks[rank].submitted() == static_cast<std::uint64_t>(count));
      CHECK(ranks[rank].stats().collectives == static_cast<std::uint64_t>(count));
    }
  }
}

TEST_CASE("group: concurrent groups on the same threads do not disturb each other") {
  constexpr int kGroups = 5;
  const int count = kSanitized ? 25 : 120;
  std::vector<std::unique_ptr<World>> worlds;
  std::vector<std::vector<Job>> jobs(kGroups);
  for (int g = 0; g < kGroups; ++g) {
    const int world = 2 + g % 3;
    worlds.push_back(std::make_unique<World>(world, WorldOptions{.chunk_bytes = std::size_t{256} << g}));
    std::mt19937_64 random(static_cast<std::uint64_t>(g) + 50);
    for (int i = 0; i < count; ++i) jobs[static_cast<std::size_t>(g)].emplace_back(random_spec(random, world), world);
  }
  std::vector<std::thread> submitters;
  for (std::size_t g = 0; g < kGroups; ++g) {
    for (int rank = 0; rank < worlds[g]->size(); ++rank) {
      submitters.emplace_back([&, g, rank] {
        for (Job& job : jobs[g]) {
          job.parts[static_cast<std::size_t>(rank)]->submit((*worlds[g])[rank]);
          if (job.spec.seed % 4 == 0) job.parts[static_cast<std::size_t>(rank)]->outcome->wait();
        }
      });
    }
  }
  for (std::thread& submitter : submitters) submitter.join();
  for (std::size_t g = 0; g < kGroups; ++g) {
    for (Job& job : jobs[g]) job.expect_right("group " + std::to_string(g) + ": ");
  }
}

TEST_CASE("group: results do not depend on timing: jitter changes no bit on any rank") {
  const int count = kSanitized ? 30 : 120;
  for (const int world : {2, 3, 5}) {
    for (const Algorithm algorithm : world == 5 ? all_algorithms() : kAlgorithms) {
      const bool is_other = std::find(kOthers.begin(), kOthers.end(), algorithm) != kOthers.end();
      std::vector<std::vector<Bytes>> wanted;
      for (unsigned jitter = 0; jitter <= (kSanitized ? 2 : is_other ? 1 : 4); ++jitter) {
        WorldOptions options{.chunk_bytes = 512, .algorithm = algorithm};
        if (jitter > 0) options.jitter = jitter;
        World ranks(world, options);
        std::mt19937_64 random(static_cast<std::uint64_t>(world));
        std::vector<Job> jobs;
        for (int i = 0; i < count; ++i) {
          Spec spec = random_spec(random, world);
          if (i % 3 == 0) spec = {.op = Op::all_reduce, .count = 1001, .real = true, .seed = spec.seed};
          jobs.emplace_back(spec, world);
        }
        std::mt19937 order(jitter);
        for (Job& job : jobs) {  // each time another rank is first
          std::vector<int> by(static_cast<std::size_t>(world));
          for (int rank = 0; rank < world; ++rank) by[static_cast<std::size_t>(rank)] = rank;
          std::shuffle(by.begin(), by.end(), order);
          for (const int rank : by) job.parts[static_cast<std::size_t>(rank)]->submit(ranks[rank]);
        }
        std::vector<std::vector<Bytes>> got;
        for (Job& job : jobs) {
          job.expect_right(where(world, options));
          got.emplace_back();
          for (const auto& part : job.parts) got.back().push_back(part->result());
        }
        if (jitter == 0) wanted = got;
        CHECK_MESSAGE(got == wanted, where(world, options), "other bits than without jitter");
      }
    }
  }
}

TEST_CASE("group: a call that has no meaning fails on its rank and ends the group everywhere") {
  World ranks(2);
  Spec spec{.count = 3};
  Part good(spec, 0, 2);
  const auto mine = std::make_shared<Part>(spec, 0, 2);
  mine->submit(ranks[0]);
  spec.op = Op::broadcast;
  spec.root = 7;
  const auto bad = std::make_shared<Part>(spec, 1, 2);
  bad->submit(ranks[1]);
  CHECK(bad->outcome->wait());
  CHECK(mine->outcome->wait());
  CHECK_MESSAGE(says(bad->outcome->error(), "root 7 is outside 0..1"), text_of(bad->outcome->error()));
  CHECK(bad->outcome->error()->kind() == ErrorKind::invalid);
  CHECK_MESSAGE(says(mine->outcome->error(), "root 7 is outside 0..1"), text_of(mine->outcome->error()));
}

// ---- failures ----

TEST_CASE("group: different calls are an error that names both, on every rank") {
  struct Case {
    Spec most, other;
    std::string most_text, other_text;
  };
  const Spec base{.op = Op::all_reduce, .count = 4};
  const auto with = [&](auto change) {
    Spec spec = base;
    change(spec);
    return spec;
  };
  const std::string sum = "all_reduce(sum, float32[4]";
  const std::vector<Case> cases = {
      {base, with([](Spec& s) { s.count = 5; }), sum, "all_reduce(sum, float32[5]"},
      {base, with([](Spec& s) { s.reduce = ReduceOp::max; }), sum, "all_reduce(max, float32[4]"},
      {base, with([](Spec& s) { s.dtype = DType::int32; }), sum, "all_reduce(sum, int32[4]"},
      {base, with([](Spec& s) { s.op = Op::barrier; }), sum, "barrier()"},
      {base, with([](Spec& s) { s.op = Op::all_gather; }), sum, "all_gather(float32[4]"},
      {base, with([](Spec& s) { s.count = 1'000'000; }), sum, "all_reduce(sum, float32[1000000]"},
  };
  for (const int world : {2, 3, 5}) {
    for (const std::optional<unsigned> jitter : {std::optional<unsigned>(), std::optional<unsigned>(2)}) {
      for (const Algorithm algorithm : all_algorithms()) {
        for (std::size_t c = 0; c < cases.size(); ++c) {
          WorldOptions options{.algorithm = algorithm, .jitter = jitter};
          World ranks(world, options);
          const int odd = static_cast<int>(c) % world;
          Job before({.count = 7}, world);  // the group is in use already
          before.submit(ranks);
          before.expect_right(where(world, options));
          std::vector<std::shared_ptr<Part>> parts;
          for (int rank = 0; rank < world; ++rank) {
            parts.push_back(std::make_shared<Part>(rank == odd ? cases[c].other : cases[c].most, rank, world));
            parts.back()->submit(ranks[rank]);
          }
          for (int rank = 0; rank < world; ++rank) {
            const auto& outcome = *parts[static_cast<std::size_t>(rank)]->outcome;
            INFO(where(world, options), cases[c].other_text, ", rank ", rank, ": ", text_of(outcome.error()));
            CHECK(outcome.wait());
            const auto error = outcome.error();
            CHECK(error.has_value());
            if (!error) continue;
            // Whoever compares says mismatch; who has no link to the odd one hears it from a neighbour.
            CHECK((error->kind() == ErrorKind::mismatch || error->kind() == ErrorKind::peer_gone));
            CHECK(says(error, cases[c].most_text));
            CHECK(says(error, cases[c].other_text));
            CHECK(says(error, "rank " + std::to_string(odd) + " called " + cases[c].other_text));
            CHECK(says(error, "#1"));
          }
        }
      }
    }
  }
}

TEST_CASE("group: a severed rank is named to all, and later calls fail at once with the first cause") {
  for (const Algorithm algorithm : all_algorithms()) {
    World ranks(4, {.algorithm = algorithm});
    Job good({.count = 100}, 4);
    good.submit(ranks);
    good.expect_right("");
    Job job({.count = 1001}, 4);
    for (const int rank : {0, 1, 3}) job.parts[static_cast<std::size_t>(rank)]->submit(ranks[rank]);
    ranks.sever(2, "killed by a test");
    for (const int rank : {0, 1, 3}) {
      const auto& outcome = *job.parts[static_cast<std::size_t>(rank)]->outcome;
      CHECK(outcome.wait());
      INFO("rank ", rank, ": ", text_of(outcome.error()));
      CHECK(says(outcome.error(), "rank 2 is gone: killed by a test"));
      CHECK(says(outcome.error(), "rank " + std::to_string(rank) + ": all_reduce #1"));
      CHECK(outcome.error()->kind() == ErrorKind::peer_gone);
      CHECK(ranks[rank].failure().has_value());

      const TimePoint begin = Clock::now();
      const auto later = std::make_shared<Part>(Spec{.op = Op::barrier}, rank, 4);
      later->submit(ranks[rank]);
      CHECK(later->outcome->wait());
      CHECK(Clock::now() - begin < milliseconds(5000));
      CHECK_MESSAGE(says(later->outcome->error(), "rank 2 is gone: killed by a test"),
                    text_of(later->outcome->error()));
    }
  }
}

TEST_CASE("group: a rank that is missing is named when the deadline passes, and its silence too") {
  World ranks(3);
  Job job({.count = 10, .timeout = milliseconds(200)}, 3);
  const TimePoint begin = Clock::now();
  for (const int rank : {0, 1}) job.parts[static_cast<std::size_t>(rank)]->submit(ranks[rank]);
  bool first = false;
  for (const int rank : {0, 1}) {
    const auto& outcome = *job.parts[static_cast<std::size_t>(rank)]->outcome;
    CHECK(outcome.wait());
    INFO(text_of(outcome.error()));
    CHECK(outcome.error().has_value());
    first = first || (outcome.error()->kind() == ErrorKind::timeout &&
                      says(outcome.error(), "rank 2 never began this operation"));
    CHECK(says(outcome.error(), "Timed out"));
  }
  CHECK(first);
  CHECK(Clock::now() - begin >= milliseconds(200));
  CHECK(Clock::now() - begin < milliseconds(10'000));
}

TEST_CASE("group: the time an operation waits in the queue counts") {
  World ranks(2);
  Job blocked({.op = Op::all_reduce, .count = 10, .timeout = milliseconds(150)}, 2);
  Job queued({.op = Op::barrier}, 2);
  blocked.parts[0]->submit(ranks[0]);
  queued.parts[0]->submit(ranks[0]);
  CHECK(blocked.parts[0]->outcome->wait());
  CHECK(queued.parts[0]->outcome->wait());
  CHECK(says(blocked.parts[0]->outcome->error(), "all_reduce #0"));
  CHECK(says(queued.parts[0]->outcome->error(), "barrier #1"));
  CHECK(says(queued.parts[0]->outcome->error(), "Timed out"));
}

TEST_CASE("group: an abort ends every operation of every rank with its cause, once") {
  for (const std::optional<unsigned> jitter : {std::optional<unsigned>(), std::optional<unsigned>(3)}) {
    World ranks(5, {.algorithm = Algorithm::ring, .jitter = jitter});
    std::vector<Job> jobs;
    for (int i = 0; i < 10; ++i) jobs.emplace_back(Spec{.count = 1001}, 5);
    for (Job& job : jobs) {
      for (int rank = 0; rank < 4; ++rank) job.parts[static_cast<std::size_t>(rank)]->submit(ranks[rank]);
    }
    ranks[0].abort(Error(ErrorKind::aborted, "enough, says a test"));
    for (Job& job : jobs) {
      for (std::size_t rank = 0; rank < 4; ++rank) {
        const auto& outcome = *job.parts[rank]->outcome;
        CHECK(outcome.wait());
        CHECK_MESSAGE(says(outcome.error(), "enough, says a test"), text_of(outcome.error()));
        if (outcome.error()) {
          CHECK(outcome.error()->kind() == (rank == 0 ? ErrorKind::aborted : ErrorKind::peer_gone));
        }
      }
    }
    CHECK(eventually([&] { return ranks[4].failure().has_value(); }));
    ranks.leave();
    for (Job& job : jobs) {
      for (std::size_t rank = 0; rank < 4; ++rank) CHECK(job.parts[rank]->outcome->calls() == 1);
    }
  }
}

namespace {

// A message at one end: its memory and how it ended.
struct Parcel {
  Bytes bytes;
  Outcome outcome;
};

Bytes pattern(std::size_t size, std::uint64_t seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(mix(seed) + i * 7 + (i >> 8));
  return bytes;
}

collective::PointToPointCall call_of(const std::shared_ptr<Parcel>& parcel, int peer, int tag, std::string what,
                                     Duration timeout) {
  collective::PointToPointCall call;
  call.peer = peer;
  call.tag = tag;
  call.what = what.empty() ? std::to_string(parcel->bytes.size()) + " bytes" : std::move(what);
  call.keep = parcel;
  call.deadline = after(Clock::now(), timeout);
  call.done = [parcel](const Error* error, int source) { parcel->outcome.set(error, source); };
  return call;
}
std::shared_ptr<Parcel> send(Group& group, int peer, int tag, Bytes bytes, std::string what = "",
                             Duration timeout = kPatience) {
  auto parcel = std::make_shared<Parcel>();
  parcel->bytes = std::move(bytes);
  auto call = call_of(parcel, peer, tag, std::move(what), timeout);
  call.from = parcel->bytes;
  group.send(std::move(call));
  return parcel;
}
std::shared_ptr<Parcel> recv(Group& group, int peer, int tag, std::size_t size, std::string what = "",
                             Duration timeout = kPatience) {
  auto parcel = std::make_shared<Parcel>();
  parcel->bytes.resize(size, std::byte{0xee});
  auto call = call_of(parcel, peer, tag, std::move(what), timeout);
  call.to = parcel->bytes;
  group.recv(std::move(call));
  return parcel;
}
bool arrived(const Parcel& parcel, const Bytes& wanted, int source) {
  return parcel.outcome.calls() == 1 && !parcel.outcome.error() && parcel.outcome.source() == source &&
         parcel.bytes == wanted;
}

const std::vector<std::optional<unsigned>> kWithAndWithoutJitter = {std::nullopt, 4U};

}  // namespace

// ---- leaving ----

TEST_CASE("group: leaving with operations in flight ends them here and there") {
  World ranks(3);
  Job job({.count = 100}, 3);
  for (const int rank : {0, 1}) job.parts[static_cast<std::size_t>(rank)]->submit(ranks[rank]);
  const TimePoint begin = Clock::now();
  ranks[0].shutdown();
  CHECK(Clock::now() - begin < milliseconds(5000));
  const auto& own = *job.parts[0]->outcome;
  CHECK(own.wait());
  CHECK(own.error()->kind() == ErrorKind::aborted);
  CHECK_MESSAGE(says(own.error(), "the group was destroyed on rank 0"), text_of(own.error()));
  const auto& other = *job.parts[1]->outcome;
  CHECK(other.wait());
  CHECK_MESSAGE(says(other.error(), "rank 0"), text_of(other.error()));
  CHECK(other.error()->kind() == ErrorKind::peer_gone);

  const auto later = std::make_shared<Part>(Spec{.op = Op::barrier}, 0, 3);
  later->submit(ranks[0]);
  CHECK(later->outcome->wait());
  CHECK_MESSAGE(says(later->outcome->error(), "the group was destroyed"), text_of(later->outcome->error()));
}

TEST_CASE("group: when shutdown returns, everything in flight has ended") {
  for (int round = 0; round < (kSanitized ? 200 : 2000); ++round) {
    World ranks(2);
    const auto part = std::make_shared<Part>(Spec{.count = 100}, 0, 2);
    part->submit(ranks[0]);
    const auto parcel = recv(ranks[0], 1, 0, 10);
    ranks[0].abort(Error(ErrorKind::aborted, "enough, says a test"));
    ranks[0].shutdown();
    CHECK(part->outcome->calls() == 1);
    CHECK(parcel->outcome.calls() == 1);
  }
}

// Two executions that failed may hold chunks of each other, whose owners hold the executions.
TEST_CASE("group: the callers' memory is given back by operations that failed half way") {
  std::vector<std::weak_ptr<Part>> parts;
  for (int round = 0; round < (kSanitized ? 50 : 300); ++round) {
    World ranks(5, {.algorithm = Algorithm::direct});
    for (int rank = 0; rank < 5; ++rank) {
      const auto part = std::make_shared<Part>(Spec{.count = rank == 1 ? 5U : 4U}, rank, 5);
      part->submit(ranks[rank]);
      parts.push_back(part);
    }
  }
  CHECK(eventually(
      [&] { return std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part.expired(); }); },
      milliseconds(5000)));
}

TEST_CASE("group: leaving waits for what is about to finish") {
  for (unsigned jitter = 1; jitter <= (kSanitized ? 3U : 10U); ++jitter) {
    World ranks(3, {.jitter = jitter});
    Job job({.op = Op::all_reduce, .count = 1001, .real = true}, 3);
    job.submit(ranks);
    ranks.leave();
    job.expect_right("jitter " + std::to_string(jitter) + ": ");
  }
}

TEST_CASE("group: a rank that is done may leave while the others go on without it") {
  World ranks(3, {.jitter = 5});
  Job job({.op = Op::all_reduce, .count = 1001, .real = true}, 3);
  job.submit(ranks);
  CHECK(job.parts[0]->outcome->wait());
  ranks[0].shutdown();
  job.expect_right("");
  CHECK_FALSE(ranks[1].failure());
  const auto next = std::make_shared<Part>(Spec{.count = 1}, 1, 3);
  next->submit(ranks[1]);
  CHECK(next->outcome->wait());
  CHECK_MESSAGE(says(next->outcome->error(), "rank 0 is gone: it left the group"), text_of(next->outcome->error()));
}

TEST_CASE("group: the callers' memory is given back when the groups are gone") {
  std::vector<std::weak_ptr<Part>> parts;
  for (unsigned round = 0; round < 4; ++round) {
    World ranks(3, {.jitter = round % 2 == 0 ? std::optional<unsigned>() : std::optional<unsigned>(round)});
    for (int i = 0; i < 20; ++i) {
      Job job({.op = kOps[static_cast<std::size_t>(i) % kOps.size()], .count = 1001}, 3);
      job.submit(ranks);
      parts.insert(parts.end(), job.parts.begin(), job.parts.end());
    }
    const auto alone = std::make_shared<Part>(Spec{.count = 500'000}, 0, 3);
    alone->submit(ranks[0]);  // never finishes
    parts.push_back(alone);
    if (round >= 2) ranks.sever(1, "killed by a test");
  }
  CHECK(eventually(
      [&] { return std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part.expired(); }); }));
}

TEST_CASE("group: a root may be faster than a receiver for as long as it likes") {
  WorldOptions options{.chunk_bytes = 64 << 10, .algorithm = Algorithm::direct, .jitter = 7};
  World ranks(2, options);
  std::vector<Job> jobs;  // 100 kB each: ten are within the allowance
  for (std::uint64_t i = 0; i < 60; ++i) jobs.emplace_back(Spec{.op = Op::broadcast, .count = 25'000, .seed = i}, 2);
  std::size_t sent = 0;
  for (Job& job : jobs) {
    for (int i = 0; i < 5 && sent < jobs.size(); ++i) jobs[sent++].parts[0]->submit(ranks[0]);
    std::this_thread::sleep_for(milliseconds(10));
    job.parts[1]->submit(ranks[1]);
    job.parts[1]->outcome->wait();
  }
  for (Job& job : jobs) job.expect_right(where(2, options));
}

TEST_CASE("group: what a rank sent before it left is used by operations that begin later") {
  for (const Op op : {Op::broadcast, Op::reduce}) {
    World ranks(2, {.jitter = 8});
    Job job({.op = op, .count = 1001, .root = op == Op::broadcast ? 0 : 1, .seed = 1}, 2);
    job.parts[0]->submit(ranks[0]);
    CHECK(job.parts[0]->outcome->wait());
    ranks[0].shutdown();
    std::this_thread::sleep_for(milliseconds(50));
    job.parts[1]->submit(ranks[1]);
    job.expect_right("");
  }
}

TEST_CASE("group: a group that is dropped without a word goes away, whatever is in flight") {
  for (unsigned round = 0; round < (kSanitized ? 20U : 200U); ++round) {
    auto ends = transport::make_in_process(3);
    std::vector<std::shared_ptr<Group>> groups;
    GroupOptions options;
    options.name = "test";
    options.chunk_bytes = 256;
    for (auto& end : ends) groups.push_back(Group::make(std::move(end), options));
    std::vector<std::weak_ptr<Group>> weak(groups.begin(), groups.end());
    std::vector<Job> jobs;
    for (int i = 0; i < 5; ++i) {
      jobs.emplace_back(Spec{.count = 257}, 3);
      for (std::size_t rank = 0; rank < 3; ++rank) jobs.back().parts[rank]->submit(*groups[rank]);
    }
    if (round % 3 != 0) std::this_thread::sleep_for(std::chrono::microseconds(round * 7 % 400));
    std::mt19937 random(round);
    std::shuffle(groups.begin(), groups.end(), random);
    groups.clear();
    for (const auto& group : weak) CHECK(eventually([&] { return group.expired(); }));
  }
}

// ---- point to point ----

TEST_CASE("point to point: tags match whatever order they come in; one tag keeps its order") {
  for (const auto& jitter : kWithAndWithoutJitter) {
    World ranks(2, {.jitter = jitter});
    std::vector<std::shared_ptr<Parcel>> sent, received;
    constexpr int kCount = 30;
    const auto size = [](int i) { return static_cast<std::size_t>(i * 211 % 3001); };
    for (int i = 0; i < kCount / 2; ++i) received.push_back(recv(ranks[1], 0, i, size(i)));  // before any send
    for (int i = kCount - 1; i >= 0; --i)
      sent.push_back(send(ranks[0], 1, i, pattern(size(i), static_cast<unsigned>(i))));
    std::this_thread::sleep_for(milliseconds(5));
    for (int i = kCount / 2; i < kCount; ++i) received.push_back(recv(ranks[1], 0, i, size(i)));
    for (int i = 0; i < kCount; ++i) {
      const auto& parcel = *received[static_cast<std::size_t>(i)];
      CHECK(parcel.outcome.wait());
      CHECK(arrived(parcel, pattern(size(i), static_cast<unsigned>(i)), 0));
    }
    for (const auto& parcel : sent) CHECK((parcel->outcome.wait() && !parcel->outcome.error()));

    received.clear();
    for (int i = 0; i < kCount; ++i) {
      if (i % 2 == 0) received.push_back(recv(ranks[1], 0, 9, 100));
      send(ranks[0], 1, 9, pattern(100, static_cast<unsigned>(i)));
    }
    for (int i = 0; i < kCount / 2; ++i) received.push_back(recv(ranks[1], 0, 9, 100));
    for (int i = 0; i < kCount; ++i) {
      CHECK(received[static_cast<std::size_t>(i)]->outcome.wait());
      CHECK(arrived(*received[static_cast<std::size_t>(i)], pattern(100, static_cast<unsigned>(i)), 0));
    }
  }
}

TEST_CASE("point to point: a receive from anyone says who it was, and takes each sender's messages in order") {
  for (const auto& jitter : kWithAndWithoutJitter) {
    World ranks(4, {.jitter = jitter});
    constexpr int kEach = 20;
    std::vector<std::shared_ptr<Parcel>> received;
    for (int i = 0; i < kEach; ++i) received.push_back(recv(ranks[0], -1, 5, 64));
    std::vector<std::thread> senders;
    for (int rank = 1; rank < 4; ++rank) {
      senders.emplace_back([&, rank] {
        for (int i = 0; i < kEach; ++i) send(ranks[rank], 0, 5, pattern(64, static_cast<unsigned>(rank * 100 + i)));
      });
    }
    for (int i = 0; i < 2 * kEach; ++i) received.push_back(recv(ranks[0], -1, 5, 64));
    for (std::thread& sender : senders) sender.join();
    std::map<int, int> next;
    for (const auto& parcel : received) {
      CHECK(parcel->outcome.wait());
      const int source = parcel->outcome.source();
      CHECK((source >= 1 && source <= 3));
      CHECK(arrived(*parcel, pattern(64, static_cast<unsigned>(source * 100 + next[source]++)), source));
    }
    for (int rank = 1; rank < 4; ++rank) CHECK(next[rank] == kEach);
  }
}

TEST_CASE("point to point: large messages both ways at once, and more than the allowance, arrive whole") {
  const std::size_t large = kSanitized ? (2 << 20) + 13 : (8 << 20) + 13;
  for (const auto& jitter : kWithAndWithoutJitter) {
    World ranks(2, {.chunk_bytes = 64 << 10, .jitter = jitter});
    std::vector<std::shared_ptr<Parcel>> sent, received;
    for (int i = 0; i < 3; ++i) {
      for (int rank = 0; rank < 2; ++rank) {
        sent.push_back(send(ranks[rank], 1 - rank, i, pattern(large, static_cast<unsigned>(rank * 10 + i))));
      }
    }
    std::this_thread::sleep_for(milliseconds(5));
    for (const auto& parcel : sent) CHECK(parcel->outcome.calls() == 0);  // nobody has asked for them yet
    for (int i = 2; i >= 0; --i) {
      for (int rank = 0; rank < 2; ++rank) received.push_back(recv(ranks[rank], 1 - rank, i, large));
    }
    std::size_t at = 0;
    for (int i = 2; i >= 0; --i) {
      for (int rank = 0; rank < 2; ++rank) {
        const auto& parcel = *received[at++];
        CHECK(parcel.outcome.wait());
        CHECK(arrived(parcel, pattern(large, static_cast<unsigned>((1 - rank) * 10 + i)), 1 - rank));
      }
    }
    for (const auto& parcel : sent) CHECK((parcel->outcome.wait() && !parcel->outcome.error()));
  }
}

TEST_CASE("point to point: a message of zero bytes is a message") {
  World ranks(3);
  const auto sent = send(ranks[1], 0, 1, {});
  const auto received = recv(ranks[0], 1, 1, 0);
  const auto from_anyone = recv(ranks[0], -1, 2, 0);
  send(ranks[2], 0, 2, {});
  CHECK((sent->outcome.wait() && !sent->outcome.error()));
  CHECK(received->outcome.wait());
  CHECK(arrived(*received, {}, 1));
  CHECK(from_anyone->outcome.wait());
  CHECK(arrived(*from_anyone, {}, 2));
}

TEST_CASE("point to point: messages and collectives share a group without waiting for each other") {
  for (const auto& jitter : kWithAndWithoutJitter) {
    World ranks(3, {.jitter = jitter});
    const auto early = recv(ranks[0], 2, 7, 5000);  // answered only after everything else
    std::vector<Job> jobs;
    std::vector<std::shared_ptr<Parcel>> received;
    for (int i = 0; i < 20; ++i) {
      jobs.emplace_back(Spec{.count = 257, .seed = static_cast<std::uint64_t>(i)}, 3);
      jobs.back().submit(ranks);
      send(ranks[i % 3], (i + 1) % 3, i, pattern(2000, static_cast<unsigned>(i)));
      received.push_back(recv(ranks[(i + 1) % 3], i % 3, i, 2000));
    }
    for (int i = 0; i < 20; ++i) {
      CHECK(received[static_cast<std::size_t>(i)]->outcome.wait());
      CHECK(arrived(*received[static_cast<std::size_t>(i)], pattern(2000, static_cast<unsigned>(i)), i % 3));
      jobs[static_cast<std::size_t>(i)].expect_right("");
    }
    CHECK(early->outcome.calls() == 0);
    send(ranks[2], 0, 7, pattern(5000, 1));
    CHECK(early->outcome.wait());
    CHECK(arrived(*early, pattern(5000, 1), 2));
  }
}

TEST_CASE("point to point: a receive of another kind or size is an error that says both") {
  for (const bool send_first : {true, false}) {
    for (const bool other_size : {true, false}) {
      World ranks(2);
      std::shared_ptr<Parcel> sent, received;
      const auto do_send = [&] { sent = send(ranks[0], 1, 0, pattern(100, 1), "float32, 25 elements"); };
      if (send_first) do_send();
      received = other_size ? recv(ranks[1], 0, 0, 80, "float32, 20 elements")
                            : recv(ranks[1], 0, 0, 100, "int32, 25 elements");
      if (!send_first) do_send();
      CHECK(received->outcome.wait());
      INFO(text_of(received->outcome.error()));
      CHECK(received->outcome.error()->kind() == ErrorKind::mismatch);
      CHECK(says(received->outcome.error(), "rank 0 sends (float32, 25 elements)"));
      CHECK(says(received->outcome.error(), other_size ? "receives (float32, 20 elements)" : "(int32, 25 elements)"));
      CHECK(eventually([&] { return ranks[0].failure().has_value(); }));
      CHECK(ranks[0].failure()->kind() == ErrorKind::peer_gone);
      CHECK(says(ranks[0].failure(), "float32, 25 elements"));
    }
  }
}

TEST_CASE("point to point: what never comes is named by the deadline") {
  World ranks(3);
  const auto named = recv(ranks[0], 2, 0, 10, "", milliseconds(100));
  CHECK(named->outcome.wait());
  CHECK(named->outcome.error()->kind() == ErrorKind::timeout);
  CHECK_MESSAGE(says(named->outcome.error(), "recv from rank 2 (10 bytes), which has not sent it"),
                text_of(named->outcome.error()));
  World again(2);
  const auto anyone = recv(again[0], -1, 0, 10, "", milliseconds(100));
  CHECK(anyone->outcome.wait());
  CHECK_MESSAGE(says(anyone->outcome.error(), "recv from anyone"), text_of(anyone->outcome.error()));
  World third(2);
  const auto unasked = send(third[0], 1, 0, pattern(2 << 20, 1), "", milliseconds(100));
  CHECK(unasked->outcome.wait());
  CHECK_MESSAGE(says(unasked->outcome.error(), "send to rank 1"), text_of(unasked->outcome.error()));
}

TEST_CASE("point to point: a lost peer fails what needs it, at both ends of a message") {
  World ranks(3);
  const auto received = recv(ranks[0], 1, 0, 100);
  const auto sent = send(ranks[2], 1, 0, pattern(2 << 20, 1));
  ranks.sever(1, "killed by a test");
  for (const auto& parcel : {received, sent}) {
    CHECK(parcel->outcome.wait());
    CHECK_MESSAGE(says(parcel->outcome.error(), "rank 1 is gone: killed by a test"), text_of(parcel->outcome.error()));
  }
  const auto later = send(ranks[0], 2, 0, pattern(10, 1));
  CHECK(later->outcome.wait());
  CHECK_MESSAGE(says(later->outcome.error(), "rank 1 is gone"), text_of(later->outcome.error()));
}

TEST_CASE("point to point: a receive from anyone ends when everyone has left") {
  World ranks(3);
  const auto received = recv(ranks[0], -1, 0, 100);
  ranks[1].shutdown();
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(received->outcome.calls() == 0);  // rank 2 may still send
  ranks[2].shutdown();
  CHECK(received->outcome.wait());
  CHECK_MESSAGE(says(received->outcome.error(), "it left the group"), text_of(received->outcome.error()));
}

TEST_CASE("point to point: a message sent before its sender left is received") {
  World ranks(2, {.jitter = 6});
  const auto received = recv(ranks[1], 0, 0, 1000);
  const auto sent = send(ranks[0], 1, 0, pattern(1000, 2));
  CHECK(sent->outcome.wait());
  ranks[0].shutdown();
  CHECK(received->outcome.wait());
  CHECK_MESSAGE(arrived(*received, pattern(1000, 2), 0), text_of(received->outcome.error()));
}
