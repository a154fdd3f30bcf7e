#include "c10d/process_group.hpp"

#include <algorithm>
#include <atomic>
#include <utility>

#include "c10d/tensors.hpp"
#include "transport/in_process.hpp"
#include "transport/membership.hpp"

namespace torch_iroh::c10d_backend {
namespace {

// c10d's store behind the few functions that the core knows. Any Store has these.
class StoreAdapter final : public transport::KeyValueStore {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<::c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::vector<std::uint8_t>& value) override { store_->set(key, value); }
  std::vector<std::uint8_t> get(const std::string& key) override { return store_->get(key); }
  bool has(const std::string& key) override { return store_->check({key}); }
  std::int64_t add_one(const std::string& key) override { return store_->add(key, 1); }

  bool wait(const std::vector<std::string>& keys, Duration timeout) override {
    const auto budget = std::chrono::duration_cast<std::chrono::milliseconds>(timeout);
    try {
      store_->wait(keys, std::max(budget, std::chrono::milliseconds(1)));
      return true;
    } catch (const std::exception&) {
      // A time-out, or a broken store: asking once more tells which, because a broken one throws again.
      return store_->check(keys);
    }
  }

 private:
  const c10::intrusive_ptr<::c10d::Store> store_;
};

std::string members_text(const std::vector<std::uint64_t>& ranks) {
  std::string text;
  for (const std::uint64_t rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

std::shared_ptr<collective::Group> make_group(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size,
                                              const IrohOptions& options) {
  collective::GroupOptions group_options;
  group_options.name = options.group_name;
  group_options.chunk_bytes = options.resolved_chunk_bytes();
  group_options.algorithm = options.resolved_algorithm();
  const bool eager = options.resolved_eager();
  const link::NodeOptions node_options = options.resolved_node_options();
  if (size == 1) return collective::Group::make(transport::make_in_process(1).front(), group_options);

  StoreAdapter adapter(store);
  transport::JoinRequest request;
  request.rank = rank;
  request.world = size;
  request.chunk_bytes = options.resolved_chunk_bytes();
  request.members = members_text(options.global_ranks_in_group);
  request.timeout = options.timeout;
  auto joined = transport::join_group(adapter, link::Node::shared(node_options), request);
  group_options.chunk_bytes = joined.chunk_bytes;
  auto group = collective::Group::make(std::move(joined.transport), group_options);
  if (eager) group->connect_all();
  return group;
}

}  // namespace

ProcessGroupIroh::ProcessGroupIroh(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size,
                                   c10::intrusive_ptr<IrohOptions> options)
    : ::c10d::Backend(rank, size), options_(std::move(options)) {
  try {
    group_.assign(make_group(store, rank, size, *options_));
  } catch (const Error& error) {
    std::rethrow_exception(to_torch(error));
  }
}

ProcessGroupIroh::~ProcessGroupIroh() {
  if (!group_.in_child() && group_) group_->shutdown();
}

collective::Group& ProcessGroupIroh::group() const {
  TORCH_CHECK(!group_.in_child(),
              "this process was forked after its iroh process group was made; the group lives in the parent only. "
              "Make a group after the fork, or start processes with 'spawn'");
  return *group_;
}

void ProcessGroupIroh::shutdown() {
  if (!group_.in_child()) group_->shutdown();
}

void ProcessGroupIroh::abort() {
  if (group_.in_child()) return;
  group_->abort(Error(ErrorKind::aborted, "the group was aborted on rank " + std::to_string(rank_)));
  group_->shutdown();
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
  return group().stats();
}

std::chrono::milliseconds ProcessGroupIroh::timeout_or_default(std::chrono::milliseconds timeout) const {
  return timeout == ::c10d::kUnsetTimeout ? options_->timeout : timeout;
}

WorkPtr ProcessGroupIroh::submit(IrohWork::Description description, std::vector<Part> parts,
                                 std::chrono::milliseconds timeout) {
  collective::Group& target = group();
  description.timeout = timeout_or_default(timeout);
  description.give_up = [weak = std::weak_ptr(group_.shared())](const std::string& text) {
    if (const auto alive = weak.lock()) alive->abort(Error(ErrorKind::timeout, text));
  };
  std::vector<std::function<void()>> afters;
  for (Part& part : parts) {
    if (part.after) afters.push_back(std::move(part.after));
  }
  if (!afters.empty()) {
    description.after = [afters = std::move(afters)] {
      for (const auto& after : afters) after();
    };
  }
  const Duration limit = description.timeout;
  auto work = c10::make_intrusive<IrohWork>(rank_, std::move(description));
  if (parts.empty()) {
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
  joint->left = parts.size();
  for (Part& part : parts) {
    part.call.timeout = limit;
    part.call.work.keep = released_with_futures(std::move(part.call.work.keep));
    part.call.done = [work, joint](const Error* error) mutable {
      if (error != nullptr) {
        const std::lock_guard lock(joint->mutex);
        if (!joint->failed) joint->failed = *error;
      }
      if (joint->left.fetch_sub(1) > 1) return;
      IrohWork::finish(std::move(work), joint->failed ? &*joint->failed : nullptr);
    };
    work->set_sequence(target.submit(std::move(part.call)));
  }
  return work;
}

WorkPtr ProcessGroupIroh::point_to_point(const char* op, Tensors& tensors, int peer, int tag, ::c10d::OpType type) {
  const at::Tensor& tensor = only_tensor(op, tensors);
  if (type != ::c10d::OpType::RECVANYSOURCE) {
    check_rank(op, "peer", peer, size_);
    TORCH_CHECK_VALUE(peer != rank_, "ProcessGroupIroh::", op, ": rank ", rank_, " cannot exchange with itself");
  }
  TORCH_CHECK_VALUE(tag >= 0, "ProcessGroupIroh::", op, ": tag ", tag, " is negative");
  const DType dtype = dtype_of(tensor, op);
  const bool sends = type == ::c10d::OpType::SEND;

  IrohWork::Description description;
  description.type = type;
  description.title = sends ? "iroh:send" : "iroh:recv";
  description.inputs = {tensor};
  description.outputs = {tensor};
  description.timeout = options_->timeout;
  description.give_up = [weak = std::weak_ptr(group_.shared())](const std::string& text) {
    if (const auto alive = weak.lock()) alive->abort(Error(ErrorKind::timeout, text));
  };

  collective::PointToPointCall call;
  call.peer = peer;
  call.tag = tag;
  call.what = std::string(name_of(dtype)) + ", " + std::to_string(tensor.numel()) + " elements";
  call.deadline = after(Clock::now(), options_->timeout);
  const std::size_t bytes = static_cast<std::size_t>(tensor.numel()) * size_of(dtype);
  if (sends) {
    auto flat = std::make_shared<FlatInput>(Tensors{tensor});
    call.from = {flat->data(), bytes};
    call.keep = flat;
  } else {
    auto flat = std::make_shared<FlatOutput>(Tensors{tensor});
    call.to = {flat->data(), bytes};
    call.keep = flat;
    if (flat->needs_copy_back()) description.after = [flat] { flat->copy_back(); };
  }
  collective::Group& target = group();
  auto work = c10::make_intrusive<IrohWork>(rank_, std::move(description));
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
