// A rank of an in-process group, over Python buffers (NumPy arrays). One blocking call per collective.
#include <algorithm>
#include <array>
#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "base/fork.hpp"
#include "collective/group.hpp"
#include "collective/reduce.hpp"
#include "python/module.hpp"
#include "transport/in_process.hpp"

namespace py = pybind11;

namespace torch_iroh::python {
namespace {

using collective::Op;

template <typename Enum>
Enum by_name(const std::string& name, const char* what, int count) {
  std::string known;
  for (int i = 0; i < count; ++i) {
    const auto value = static_cast<Enum>(i);
    if (name_of(value) == name) return value;
    known += (i == 0 ? "" : ", ") + std::string(name_of(value));
  }
  throw Error(ErrorKind::invalid, std::string("unknown ") + what + " '" + name + "'; known: " + known);
}

// Blocks until the core calls back.
class Waiter {
 public:
  void done(const Error* error, int source) {
    const std::lock_guard lock(mutex_);
    if (error != nullptr) failed_ = *error;
    source_ = source;
    finished_ = true;
    changed_.notify_all();
  }
  int wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return finished_; });
    if (failed_) throw *failed_;
    return source_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Error> failed_;
  int source_ = -1;
  bool finished_ = false;
};

class Rank {
 public:
  explicit Rank(std::shared_ptr<transport::Transport> transport, std::size_t chunk_bytes,
                std::optional<collective::Algorithm> algorithm)
      : transport_(transport) {
    collective::GroupOptions options;
    options.name = "in process";
    options.chunk_bytes = chunk_bytes;
    if (algorithm) options.pins = collective::Pins::everything(*algorithm);
    group_.assign(collective::Group::make(std::move(transport), options));
  }

  void collective(const std::string& op, const std::string& dtype, const std::string& reduce, double factor, int root,
                  const std::optional<py::buffer>& input, const std::optional<py::buffer>& output,
                  std::vector<std::uint64_t> blocks, std::vector<std::uint64_t> send_blocks, double timeout) {
    collective::CollectiveCall call;
    call.request.op = by_name<Op>(op, "collective", 9);
    call.request.root = root;
    call.work.dtype = by_name<DType>(dtype, "dtype", 16);
    call.work.reduce = by_name<ReduceOp>(reduce, "reduce op", 9);
    if (collective::reduces(call.request.op) && !collective::supports(call.work.reduce, call.work.dtype)) {
      throw Error(ErrorKind::invalid, "reduce op " + reduce + " has no meaning for dtype " + dtype);
    }
    call.work.premul = factor;
    call.request.blocks = std::move(blocks);
    call.request.send_blocks = std::move(send_blocks);
    std::optional<py::buffer_info> in;
    std::optional<py::buffer_info> out;
    if (input) in = contiguous(*input, false);
    if (output) out = contiguous(*output, true);
    if (in) call.work.input = static_cast<const std::byte*>(in->ptr);
    if (out) call.work.output = static_cast<std::byte*>(out->ptr);
    const auto& sized = out ? out : in;
    if (sized) {
      call.request.count = static_cast<std::uint64_t>(sized->size * sized->itemsize) / size_of(call.work.dtype);
    }
    const bool symmetric =
        call.request.op == Op::all_reduce || call.request.op == Op::broadcast || call.request.op == Op::reduce;
    if (symmetric) {
      call.shape = "[" + std::to_string(call.request.count) + "]";
    } else {
      call.request.count = 0;
    }
    call.timeout = to_duration(timeout);
    collective::Group& target = group();
    Waiter waiter;
    call.done = [&waiter](const Error* error) { waiter.done(error, -1); };
    const py::gil_scoped_release release;
    target.submit(std::move(call));
    waiter.wait();
  }

  void send(const py::buffer& data, int peer, int tag, const std::string& what, double timeout) {
    const py::buffer_info in = contiguous(data, false);
    collective::PointToPointCall call = point_to_point(peer, 0, tag, what, timeout);
    call.from = {static_cast<const std::byte*>(in.ptr), static_cast<std::size_t>(in.size * in.itemsize)};
    run(std::move(call), true);
  }

  int recv(const py::buffer& data, int peer, int tag, const std::string& what, double timeout) {
    const py::buffer_info out = contiguous(data, true);
    collective::PointToPointCall call = point_to_point(peer, kAnyone, tag, what, timeout);
    call.to = {static_cast<std::byte*>(out.ptr), static_cast<std::size_t>(out.size * out.itemsize)};
    return run(std::move(call), false);
  }

  void abort(const std::string& why) { group().abort(Error(ErrorKind::aborted, why)); }
  void sever(const std::string& why) { transport::sever(*transport_, why); }
  void close() {
    if (group_.in_child()) return;
    const py::gil_scoped_release release;
    group_->shutdown();
  }
  int rank() const { return group_->rank(); }
  int world() const { return group_->world(); }

 private:
  static py::buffer_info contiguous(const py::buffer& buffer, bool writable) {
    py::buffer_info info = buffer.request(writable);
    py::ssize_t expected = info.itemsize;
    for (auto i = info.ndim; i-- > 0;) {
      if (info.shape[static_cast<std::size_t>(i)] > 1 && info.strides[static_cast<std::size_t>(i)] != expected) {
        throw Error(ErrorKind::invalid, "the array is not C-contiguous. Try: numpy.ascontiguousarray");
      }
      expected *= info.shape[static_cast<std::size_t>(i)];
    }
    return info;
  }

  static Duration to_duration(double seconds) {
    return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
  }

  static constexpr int kAnyone = -1;

  collective::Group& group() const {
    if (group_.in_child())
      throw Error(ErrorKind::invalid, "this process was forked after its in-process world was made");
    return *group_;
  }

  collective::PointToPointCall point_to_point(int peer, int lowest, int tag, const std::string& what,
                                              double timeout) const {
    if (peer < lowest || peer >= world() || peer == rank())
      throw Error(ErrorKind::invalid, "no such peer: " + std::to_string(peer));
    collective::PointToPointCall call;
    call.peer = peer;
    call.tag = tag;
    call.what = what;
    call.deadline = after(Clock::now(), to_duration(timeout));
    return call;
  }

  int run(collective::PointToPointCall call, bool sends) {
    collective::Group& target = group();
    Waiter waiter;
    call.done = [&waiter](const Error* error, int source) { waiter.done(error, source); };
    const py::gil_scoped_release release;
    if (sends) {
      target.send(std::move(call));
    } else {
      target.recv(std::move(call));
    }
    return waiter.wait();
  }

  std::shared_ptr<transport::Transport> transport_;
  ParentOwned<collective::Group> group_;
};

std::vector<std::unique_ptr<Rank>> make_world(int world, std::size_t chunk_bytes, const std::string& algorithm) {
  if (world < 1) throw Error(ErrorKind::invalid, "a world of " + std::to_string(world) + " ranks");
  if (chunk_bytes < 64 || chunk_bytes > (1 << 20) || chunk_bytes % 16 != 0) {
    throw Error(ErrorKind::invalid, "chunk_bytes must be a multiple of 16 from 64 to 1048576");
  }
  std::optional<collective::Algorithm> pinned;
  // The last, hierarchical, needs levels, which these ranks have none of.
  static_assert(static_cast<int>(collective::Algorithm::hierarchical) == collective::kAlgorithmCount - 1);
  constexpr int known = collective::kAlgorithmCount - 1;
  if (algorithm != "auto") pinned = by_name<collective::Algorithm>(algorithm, "algorithm", known);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (auto& transport : transport::make_in_process(world)) {
    ranks.push_back(std::make_unique<Rank>(std::move(transport), chunk_bytes, pinned));
  }
  return ranks;
}

}  // namespace

void bind_in_process(py::module_& module) {
  py::class_<Rank>(module, "InProcessRank")
      .def("collective", &Rank::collective, py::arg("op"), py::arg("dtype"), py::arg("reduce"), py::arg("factor"),
           py::arg("root"), py::arg("input"), py::arg("output"), py::arg("blocks"), py::arg("send_blocks"),
           py::arg("timeout"))
      .def("send", &Rank::send, py::arg("data"), py::arg("peer"), py::arg("tag"), py::arg("what"), py::arg("timeout"))
      .def("recv", &Rank::recv, py::arg("data"), py::arg("peer"), py::arg("tag"), py::arg("what"), py::arg("timeout"))
      .def("abort", &Rank::abort, py::arg("why"))
      .def("sever", &Rank::sever, py::arg("why"))
      .def("close", &Rank::close)
      .def_property_readonly("rank", &Rank::rank)
      .def_property_readonly("world", &Rank::world);
  module.def("make_in_process_world", &make_world, py::arg("world"), py::arg("chunk_bytes"), py::arg("algorithm"));
}

}  // namespace torch_iroh::python
