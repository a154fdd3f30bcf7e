#include "c10d/process_group.hpp"

#include <algorithm>
#include <atomic>
#include <future>
#include <utility>

#include "c10d/group_maker.hpp"
#include "c10d/held.hpp"
#include "c10d/tensors.hpp"

namespace torch_iroh::c10d_backend {
namespace {

using collective::Op;

// How long what was sent may take to arrive: when a group is left, and when its process ends.
constexpr Duration kLinger = milliseconds(60000);
constexpr Duration kExitLinger = milliseconds(2000);

void leave_group(collective::Group& group, Inner* inner, Duration linger) {
  const bool broken = group.failure().has_value();
  group.shutdown(linger);
  if (inner != nullptr) inner->close(!broken);
}

// What is left of a process group when its process ends.
struct Living {
  std::weak_ptr<collective::Group> group;
  std::weak_ptr<Inner> inner;

  void leave() const {
    if (const auto own = group.lock()) leave_group(*own, inner.lock().get(), kExitLinger);
  }
};

class LivingGroups {
 public:
  void add(Living one) {
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const Living& other) { return other.group.expired(); });
    groups_.push_back(std::move(one));
  }
  std::vector<Living> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(groups_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<Living> groups_;
};

LivingGroups& living() {
  static PerProcess<LivingGroups> shared([] { return std::make_unique<LivingGroups>(); });
  return shared.get();
}

// The caller's object may serve several groups.
c10::intrusive_ptr<IrohOptions> options_for(const char* op, const c10::intrusive_ptr<::c10d::Backend::Options>& given) {
  const auto* options = dynamic_cast<const IrohOptions*>(given.get());
  TORCH_CHECK(options != nullptr, "ProcessGroupIroh::", op, ": opts must be torch_iroh.Options");
  return c10::make_intrusive<IrohOptions>(*options);
}

}  // namespace

void leave_all_process_groups() {
  for (const Living& one : living().take()) one.leave();
}

ProcessGroupIroh::ProcessGroupIroh(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size,
                                   c10::intrusive_ptr<IrohOptions> options)
    : ::c10d::Backend(rank, size), options_(std::move(options)) {
  try {
    MadeGroup made = make_group(store, rank, size, *options_);
    group_.assign(std::move(made.group));
    compressor_ =
        std::make_unique<Compressor>(options_->resolved_compression(), Hosts(std::move(made.sites), rank), rank, size);
    if (!made.hosts.empty()) make_inner_parts(store, Hosts(std::move(made.hosts), rank), std::move(made.prefix));
    living().add({group_.shared(), inner_.shared()});
  } catch (const Error& error) {
    std::rethrow_exception(to_torch(error));
  }
}

void ProcessGroupIroh::make_inner_parts(const c10::intrusive_ptr<::c10d::Store>& store, Hosts hosts,
                                        std::string prefix) {
  StoreAdapter keys(store);
  // Who pins how collectives run means all of them.
  std::string asked = options_->resolved_inner();
  if (asked == "auto" && !options_->resolved_pins().empty()) asked = "none";
  auto chosen = make_inner(store, keys, hosts, {std::move(asked), rank_, size_, options_->timeout, std::move(prefix)});
  if (!chosen) return;
  const Duration patience = options_->resolved_node_options().link.peer_timeout + std::chrono::milliseconds(1000);
  inner_.assign(Inner::make(std::move(*chosen), std::move(hosts), group_.shared(), patience));
}

ProcessGroupIroh::~ProcessGroupIroh() {
  if (!group_.in_child() && group_) shutdown();
}

collective::Group& ProcessGroupIroh::group() const {
  TORCH_CHECK(!group_.in_child(),
              "this process was forked after its iroh process group was made; the group lives in the parent only. "
              "Make a group after the fork, or start processes with 'spawn'");
  return *group_;
}

void ProcessGroupIroh::shutdown() {
  if (group_.in_child()) return;
  // As the group does with what it has in flight itself.
  if (inner_) inner_->finish_for(std::chrono::milliseconds(500));
  leave_group(*group_, inner_.shared().get(), kLinger);
}

void ProcessGroupIroh::abort() {
  if (group_.in_child()) return;
  group_->abort(Error(ErrorKind::aborted, "the group was aborted on rank " + std::to_string(rank_)));
  group_->shutdown();
  if (inner_) inner_->close(false);
}

::c10d::ErrorType ProcessGroupIroh::getError() {
  const auto failure = group().failure();
  if (!failure) return ::c10d::ErrorType::SUCCESS;
  switch (failure->kind()) {
    case ErrorKind::timeout: return ::c10d::ErrorType::TIMEOUT;
    case ErrorKind::peer_gone: return ::c10d::ErrorType::REMOTE_ERROR;
    default: return ::c10d::ErrorType::COMM_ERROR;
  }
}

std::uint64_t ProcessGroupIroh::getSequenceNumberForGroup() {
  return group().submitted();
}

collective::GroupStats ProcessGroupIroh::stats() const {
  collective::GroupStats stats = group().stats();
  if (inner_) stats.collectives -= std::min(stats.collectives, inner_->agreements());
  return stats;
}

c10::intrusive_ptr<::c10d::Backend> ProcessGroupIroh::split(const c10::intrusive_ptr<::c10d::Store>& store,
                                                            const std::vector<int>& ranks,
                                                            const c10::intrusive_ptr<::c10d::Backend::Options>& opts) {
  const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
  if (mine == ranks.end()) return nullptr;
  const auto options = options_for("split", opts);
  // Ranks of the default group, where this group knows them.
  const auto& parents = options_->global_ranks_in_group;
  options->global_ranks_in_group.clear();
  for (const int rank : ranks) {
    const auto index = static_cast<std::size_t>(rank);
    options->global_ranks_in_group.push_back(index < parents.size() ? parents[index] : index);
  }
  return c10::make_intrusive<ProcessGroupIroh>(store->clone(), static_cast<int>(mine - ranks.begin()),
                                               static_cast<int>(ranks.size()), options);
}

c10::intrusive_ptr<::c10d::Backend> ProcessGroupIroh::merge(const c10::intrusive_ptr<::c10d::Store>& store,
                                                            const c10::intrusive_ptr<::c10d::Backend::Options>& opts,
                                                            const int& rank, const int& size) {
  const auto options = options_for("merge", opts);
  options->global_ranks_in_group.clear();
  return c10::make_intrusive<ProcessGroupIroh>(store->clone(), rank, size, options);
}

void ProcessGroupIroh::eagerConnectSingleDevice(at::Device) {
  group().connect_all();
}

std::chrono::milliseconds ProcessGroupIroh::timeout_or_default(std::chrono::milliseconds timeout) const {
  // A century is for ever, and fits the clock.
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365 * 100);
  return std::min(timeout == ::c10d::kUnsetTimeout ? options_->timeout : timeout, kLongest);
}

std::function<void(const std::string&)> ProcessGroupIroh::breaks_group() const {
  return [weak = std::weak_ptr(group_.shared())](const std::string& text) {
    if (const auto alive = weak.lock()) alive->abort(Error(ErrorKind::timeout, text));
  };
}

void ProcessGroupIroh::complete(IrohWork::Description& description, std::chrono::milliseconds timeout,
                                bool waited_for) const {
  description.timeout = timeout_or_default(timeout);
  description.give_up = breaks_group();
  description.waited_for = waited_for;
}

WorkPtr ProcessGroupIroh::by_hosts(Operation& operation, const Asked& asked, std::chrono::milliseconds timeout,
                                   bool waited_for) {
  group();  // says so in a forked child
  if (!inner_ || !inner_->covers(asked)) return nullptr;
  if (compressor_->covers(asked.kind, asked.inputs.front(), asked.reduce)) return nullptr;
  complete(operation.description, timeout, waited_for);
  return inner_->submit(std::move(operation), asked);
}

WorkPtr ProcessGroupIroh::compressed_all_reduce(const at::Tensor& tensor, const ::c10d::ReduceOp& reduce,
                                                const std::string& codec, const std::optional<at::Tensor>& residual,
                                                std::optional<std::chrono::milliseconds> timeout) {
  group();  // says so in a forked child
  const codec::Codec how = codec::parse(codec);
  TORCH_CHECK(reduce == ::c10d::ReduceOp::SUM || reduce == ::c10d::ReduceOp::AVG,
              "compressed_all_reduce: only SUM and AVG leave something that can be repaid");
  check_tensor("compressed_all_reduce", tensor);
  const at::Tensor left_out = residual.value_or(at::Tensor());
  TORCH_CHECK(!left_out.defined() || (left_out.scalar_type() == at::kFloat && left_out.is_cpu() &&
                                      left_out.is_contiguous() && left_out.numel() == tensor.numel()),
              "compressed_all_reduce: the residual must be float32, contiguous, on the CPU and have ", tensor.numel(),
              " elements like the tensor");
  if (left_out.defined() && !compressor_->would(how, tensor)) {
    // Exact, but for what the tensor's own type cannot hold of what is repaid.
    const at::NoGradGuard no_grad;
    const at::Tensor whole = tensor.cpu().to(at::kDouble).add_(left_out.view(tensor.sizes()));
    tensor.copy_(whole);
    left_out.view(tensor.sizes()).copy_(whole.sub_(tensor.cpu().to(at::kDouble)));
  }
  Operation all = operation("compressed_all_reduce", ::c10d::OpType::ALLREDUCE, "iroh:all_reduce", {tensor}, {tensor});
  all.add_reduce(Op::all_reduce, tensor, reduce, 0);
  compressor_->apply(all, how, left_out);
  return submit_as_is(std::move(all), timeout.value_or(::c10d::kUnsetTimeout), false);
}

bool ProcessGroupIroh::compresses(const at::Tensor& tensor, const std::string& codec) const {
  return compressor_->would(codec::parse(codec), tensor);
}

WorkPtr ProcessGroupIroh::submit(Operation operation, std::chrono::milliseconds timeout, bool waited_for) {
  group();  // says so in a forked child
  compressor_->apply(operation);
  return submit_as_is(std::move(operation), timeout, waited_for);
}

WorkPtr ProcessGroupIroh::submit_as_is(Operation operation, std::chrono::milliseconds timeout, bool waited_for) {
  collective::Group& target = group();
  IrohWork::Description& description = operation.description;
  complete(description, timeout, waited_for);
  std::vector<std::function<void()>> afters;
  for (Operation::Part& part : operation.parts) {
    if (part.after) afters.push_back(std::move(part.after));
  }
  if (!afters.empty()) {
    description.after = [afters = std::move(afters)] {
      for (const auto& after : afters) after();
    };
  }
  const Duration limit = description.timeout;
  const auto staging = description.staging;
  const bool loads = staging && staging->end_of_loads();
  const bool behind = inner_ && inner_->busy();
  const bool held = loads || behind;
  auto work = c10::make_intrusive<IrohWork>(rank_, std::move(description));
  if (operation.parts.empty()) {
    IrohWork::finish(work, nullptr);
    return work;
  }
  // Several parts are one operation to torch: it ends with its last part, and fails with the first that fails.
  struct Joint {
    std::atomic<std::size_t> left;
    std::mutex mutex;
    std::optional<Error> failed;
  };
  auto joint = std::make_shared<Joint>();
  joint->left = operation.parts.size();
  std::vector<std::uint64_t> sequences;
  for (Operation::Part& part : operation.parts) {
    part.call.timeout = limit;
    part.call.held = held;
    part.call.drives = waited_for;
    // A caller that does the work itself holds the tensors until it is done; nobody else keeps them longer.
    if (!waited_for || !target.shares_memory()) {
      part.call.work.keep = released_with_futures(std::move(part.call.work.keep));
    }
    part.call.done = [work, joint](const Error* error) mutable {
      if (error != nullptr) {
        const std::lock_guard lock(joint->mutex);
        if (!joint->failed) joint->failed = *error;
      }
      if (joint->left.fetch_sub(1) > 1) return;
      IrohWork::finish(std::move(work), joint->failed ? &*joint->failed : nullptr);
    };
    sequences.push_back(target.submit(std::move(part.call)));
  }
  work->set_sequence(sequences.back());
  if (!held) return work;
  const auto release = [group = group_.shared(), staging, loads, sequences] {
    if (loads) return release_when_loaded(group, staging, sequences);
    for (const std::uint64_t sequence : sequences) group->release(sequence);
  };
  behind ? inner_->after_what_runs(release) : release();
  return work;
}

void ProcessGroupIroh::monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) {
  auto ended = std::make_shared<std::promise<std::optional<Error>>>();
  collective::MonitoredBarrierCall call;
  call.timeout = timeout_or_default(opts.timeout);
  call.name_all = wait_all_ranks;
  call.done = [ended](const Error* error) {
    ended->set_value(error == nullptr ? std::nullopt : std::optional(*error));
  };
  group().monitored_barrier(std::move(call));
  if (const auto error = ended->get_future().get()) std::rethrow_exception(to_torch(*error));
}

// send, isend, batch_isend_irecv, pipelining
WorkPtr ProcessGroupIroh::send(Tensors& tensors, int peer, int tag) {
  return point_to_point("send", tensors, peer, tag, ::c10d::OpType::SEND);
}

WorkPtr ProcessGroupIroh::recv(Tensors& tensors, int peer, int tag) {
  return point_to_point("recv", tensors, peer, tag, ::c10d::OpType::RECV);
}

// recv without a source
WorkPtr ProcessGroupIroh::recvAnysource(Tensors& tensors, int tag) {
  return point_to_point("recvAnysource", tensors, -1, tag, ::c10d::OpType::RECVANYSOURCE);
}

WorkPtr ProcessGroupIroh::point_to_point(const char* op, Tensors& tensors, int peer, int tag, ::c10d::OpType type) {
  const at::Tensor& tensor = only_tensor(op, tensors);
  if (type != ::c10d::OpType::RECVANYSOURCE) {
    check_rank(op, "peer", peer, size_);
    TORCH_CHECK(peer != rank_, "ProcessGroupIroh::", op, ": rank ", rank_, " cannot exchange with itself");
  }
  TORCH_CHECK(tag >= 0, "ProcessGroupIroh::", op, ": tag ", tag, " is negative");
  const DType dtype = dtype_of(tensor, op);
  const bool sends = type == ::c10d::OpType::SEND;

  Operation one = operation(op, type,
                            sends      ? "iroh:send"
                            : peer < 0 ? "iroh:recvAnySource"
                                       : "iroh:recv",
                            {tensor}, {tensor});
  one.description.timeout = timeout_or_default(::c10d::kUnsetTimeout);
  one.description.give_up = breaks_group();
  const auto staging = one.description.staging;

  collective::PointToPointCall call;
  call.peer = peer;
  call.tag = tag;
  call.what = std::string(name_of(dtype)) + ", " + std::to_string(tensor.numel()) + " elements";
  call.deadline = after(Clock::now(), one.description.timeout);
  const std::size_t bytes = static_cast<std::size_t>(tensor.numel()) * size_of(dtype);
  if (sends) {
    auto flat = std::make_shared<FlatInput>(Tensors{tensor}, staging);
    call.from = {flat->data(), bytes};
    call.keep = flat;
    call.id = ++sends_;
    one.description.on_wait = [weak = std::weak_ptr(group_.shared()), peer, id = call.id] {
      if (const auto alive = weak.lock()) alive->caller_waits_for_send(peer, id);
    };
    // Messages go out in the order of the calls, so the caller waits for its device here.
    if (staging && staging->end_of_loads()) staging->wait_until_loaded();
  } else {
    auto flat = std::make_shared<FlatOutput>(Tensors{tensor}, staging);
    call.to = {flat->data(), bytes};
    call.keep = flat;
    if (flat->needs_copy_back()) one.description.after = [flat] { flat->copy_back(); };
  }
  collective::Group& target = group();
  auto work = c10::make_intrusive<IrohWork>(rank_, std::move(one.description));
  call.keep = released_with_futures(std::move(call.keep));
  call.done = [work](const Error* error, int source) mutable { IrohWork::finish(std::move(work), error, source); };
  if (sends) {
    target.send(std::move(call));
  } else {
    target.recv(std::move(call));
  }
  return work;
}

}  // namespace torch_iroh::c10d_backend
