// What the parts of each operation are: inside the host, between hosts, inside the host.
//
//   hosts with as many ranks each, where ranks with one index are a column:
//     all_reduce      reduce_scatter inside; all_reduce of one shard in each column; all_gather inside
//     reduce_scatter  reduce_scatter inside; reduce_scatter in each column
//     all_gather      all_gather in each column; all_gather inside
//   any hosts, with a leader each (the root is one):
//     all_reduce      reduce to the leader; all_reduce among leaders; broadcast inside
//     reduce          reduce to the leader; reduce among leaders
//     broadcast       broadcast among leaders; broadcast inside
//
// AVG is a sum inside, and divided once by the group's world between hosts. PREMUL_SUM is scaled first, then a sum.
// Whoever owns an element between hosts decides its bits, and everyone gets copies.
#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>

#include "c10d/inner.hpp"
#include "c10d/tensors.hpp"

namespace torch_iroh::c10d_backend {
namespace {

using collective::Op;
using RedOp = ::c10d::ReduceOp::RedOpType;

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj();
}

// Inner backends know few dtypes; to move bytes they need none.
at::Tensor bytes_of(const at::Tensor& flat) {
  return flat.view(at::kByte);
}

// Both NCCL and gloo reduce these.
bool reduced_everywhere(at::ScalarType type) {
  switch (type) {
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble: return true;
    default: return false;
  }
}

::c10d::ReduceOp inside_hosts(const ::c10d::ReduceOp& reduce) {
  const auto kind = static_cast<RedOp>(reduce);
  return kind == RedOp::AVG || kind == RedOp::PREMUL_SUM ? ::c10d::ReduceOp(RedOp::SUM) : ::c10d::ReduceOp(kind);
}

template <typename Options>
Options options_for(const Inner& inner) {
  Options options;
  options.timeout = inner.time_to_give();
  return options;
}

// The memory of one operation. On the CPU `host` and `device` are one.
struct Memory {
  std::shared_ptr<Staging> staging;
  at::TensorOptions options;  // of the tensors
  ::c10d::ReduceOp reduce{};
  std::optional<double> factor;  // premul_sum

  at::Tensor host_memory(std::int64_t count) const {
    const auto on_host = at::TensorOptions().dtype(options.dtype()).device(at::kCPU);
    return at::empty({count}, staging ? on_host.pinned_memory(true) : on_host);
  }
  at::Tensor device_memory(std::int64_t count) const { return at::empty({count}, options); }

  // In place, or a flat copy.
  at::Tensor flat(const at::Tensor& tensor, bool in_place) const {
    at::Tensor flat = is_plain(tensor) && in_place && !factor
                          ? tensor.view({-1})
                          : at::empty({tensor.numel()}, options).copy_(tensor.reshape({-1}));
    if (factor) flat.mul_(*factor);
    return flat;
  }
  void load(const at::Tensor& device, const at::Tensor& host) const {
    if (staging) {
      staging->load({device}, host);
    } else if (device.data_ptr() != host.data_ptr()) {
      host.copy_(device);
    }
  }
  void store(const at::Tensor& host, const at::Tensor& device) const {
    if (device.data_ptr() != host.data_ptr()) device.copy_(host, /*non_blocking=*/true);
  }
};

// `whole` is one block for each rank of the host, each as large as `part`; it may be written.
void reduce_scatter(Inner& inner, const Memory& memory, at::Tensor& part, at::Tensor& whole) {
  if (inner.name() == "nccl") {
    auto options = options_for<::c10d::ReduceScatterOptions>(inner);
    options.reduceOp = inside_hosts(memory.reduce);
    return inner.await(inner.backend()._reduce_scatter_base(part, whole, options));
  }
  // gloo's reduce_scatter is an all_reduce too (torch 2.13), of which it returns no future.
  auto options = options_for<::c10d::AllreduceOptions>(inner);
  options.reduceOp = inside_hosts(memory.reduce);
  Tensors wholes{whole};
  inner.await(inner.backend().allreduce(wholes, options));
  part.copy_(whole.narrow(0, static_cast<std::int64_t>(inner.hosts().index()) * part.numel(), part.numel()));
}

void write(const at::Tensor& flat, const at::Tensor& tensor) {
  if (flat.data_ptr() != tensor.data_ptr()) tensor.copy_(flat.view(tensor.sizes()), true);
}

std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

}  // namespace

bool Inner::covers(const Asked& asked) const {
  if (asked.inputs.empty() || asked.outputs.empty()) return false;
  const at::Tensor& like = asked.inputs.front();
  // NCCL's device is the accelerator of this torch, or there is no NCCL.
  const auto wanted = inner_.name == "nccl" ? at::getAccelerator().value_or(at::kCUDA) : at::kCPU;
  const auto fits = [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.layout() == at::kStrided && tensor.device().type() == wanted &&
           tensor.scalar_type() == like.scalar_type() && tensor.numel() > 0;
  };
  if (!std::all_of(asked.inputs.begin(), asked.inputs.end(), fits)) return false;
  if (!std::all_of(asked.outputs.begin(), asked.outputs.end(), fits)) return false;
  if (collective::reduces(asked.kind)) {
    switch (static_cast<RedOp>(asked.reduce)) {
      case RedOp::SUM:
      case RedOp::AVG:
      case RedOp::PREMUL_SUM:
      case RedOp::MIN:
      case RedOp::MAX:
      case RedOp::PRODUCT: break;
      default: return false;
    }
    if (!reduced_everywhere(like.scalar_type())) return false;
  }
  if (asked.kind != Op::all_gather && asked.kind != Op::reduce_scatter) return true;
  if (!hosts_.even()) return false;
  const auto& many = asked.kind == Op::all_gather ? asked.outputs : asked.inputs;
  const auto& one = asked.kind == Op::all_gather ? asked.inputs.front() : asked.outputs.front();
  const auto block = one.numel();
  if (many.size() == 1) return many.front().numel() == block * world();
  return std::all_of(many.begin(), many.end(), [&](const at::Tensor& tensor) { return tensor.numel() == block; });
}

namespace {

// A part between hosts for a rank that has none in it.
collective::CollectiveCall nothing_between(std::int32_t rank) {
  collective::CollectiveCall call;
  call.request.members = std::make_shared<const Hosts::Ranks>(Hosts::Ranks{rank});
  return call;
}

collective::CollectiveCall part_between(Op kind, Hosts::Members members, std::int64_t count, DType dtype,
                                        ReduceOp reduce) {
  collective::CollectiveCall call;
  call.request.op = kind;
  if (kind == Op::all_gather || kind == Op::reduce_scatter) {
    call.request.blocks.assign(members->size(), static_cast<std::uint64_t>(count));
  } else {
    call.request.count = static_cast<std::uint64_t>(count);
  }
  call.request.members = std::move(members);
  call.work.dtype = dtype;
  call.work.reduce = reduce;
  return call;
}

// One shard for each rank of this host, the last one padded.
Parts sharded_all_reduce(const Memory& memory, const at::Tensor& tensor, const Hosts& hosts, DType dtype,
                         ReduceOp reduce) {
  const auto local = static_cast<std::int64_t>(hosts.mine().size());
  const std::int64_t count = tensor.numel();
  const std::int64_t shard = (count + local - 1) / local;
  struct State {
    at::Tensor whole, part, host;
  };
  auto state = std::make_shared<State>();
  state->host = memory.host_memory(shard);
  Parts parts;
  parts.between = part_between(Op::all_reduce, hosts.column(), shard, dtype, reduce);
  parts.between.work.output = data_of(state->host);
  parts.between.work.keep = state;
  parts.before = [=](Inner& inner) {
    if (shard * local == count) {
      state->whole = memory.flat(tensor, true);
    } else {
      state->whole = memory.device_memory(shard * local);
      state->whole.narrow(0, 0, count).copy_(memory.flat(tensor, true));
      state->whole.narrow(0, count, shard * local - count).zero_();
    }
    state->part = memory.staging ? memory.device_memory(shard) : state->host;
    reduce_scatter(inner, memory, state->part, state->whole);
    memory.load(state->part, state->host);
  };
  parts.afterwards = [=](Inner& inner) {
    memory.store(state->host, state->part);
    inner.await(
        inner.backend()._allgather_base(state->whole, state->part, options_for<::c10d::AllgatherOptions>(inner)));
    write(state->whole.narrow(0, 0, count), tensor);
  };
  return parts;
}

// all_reduce, reduce and broadcast: the leader of each host sends for all of it.
Parts led(Op kind, int root, const Memory& memory, const at::Tensor& tensor, const Hosts& hosts, DType dtype,
          ReduceOp reduce) {
  const std::int64_t count = tensor.numel();
  const auto leader = static_cast<std::int64_t>(hosts.leader(root));
  const bool leads = static_cast<std::size_t>(leader) == hosts.index();
  const std::int32_t rank = hosts.mine()[hosts.index()];
  const bool is_root = rank == root;
  const bool written = kind == Op::all_reduce || (kind == Op::reduce) == is_root;
  struct State {
    at::Tensor flat, host;
  };
  auto state = std::make_shared<State>();
  // gloo writes into what it reduces, wherever that is.
  const bool in_place = written || (kind == Op::broadcast && is_root);
  const bool direct = in_place && is_plain(tensor) && !memory.factor && !memory.staging;
  if (leads) state->host = direct ? tensor.view({-1}) : memory.host_memory(count);
  Parts parts;
  parts.between = leads ? part_between(kind, hosts.leaders(root), count, dtype, reduce) : nothing_between(rank);
  if (leads) {
    parts.between.request.root = root;
    parts.between.work.input = data_of(state->host);
    parts.between.work.output = data_of(state->host);
  }
  parts.between.work.keep = state;
  parts.before = [=](Inner& inner) {
    state->flat = kind == Op::broadcast && !is_root && !is_plain(tensor) ? memory.device_memory(count)
                                                                         : memory.flat(tensor, in_place);
    if (kind != Op::broadcast && !inner.hosts().alone()) {
      auto options = options_for<::c10d::ReduceOptions>(inner);
      options.reduceOp = inside_hosts(memory.reduce);
      options.rootRank = leader;
      Tensors flats{state->flat};
      inner.await(inner.backend().reduce(flats, options));
    }
    if (leads && (kind != Op::broadcast || is_root)) memory.load(state->flat, state->host);
  };
  parts.afterwards = [=](Inner& inner) {
    if (leads && written) memory.store(state->host, state->flat);
    if (kind != Op::reduce && !inner.hosts().alone()) {
      auto options = options_for<::c10d::BroadcastOptions>(inner);
      options.rootRank = leader;
      Tensors flats{bytes_of(state->flat)};
      inner.await(inner.backend().broadcast(flats, options));
    }
    if (written) write(state->flat, tensor);
  };
  return parts;
}

Parts columned_all_gather(const Memory& memory, const Tensors& outputs, const at::Tensor& input, const Hosts& hosts,
                          DType dtype) {
  const std::int64_t block = input.numel();
  const auto host_count = static_cast<std::int64_t>(hosts.all().size());
  const auto local = static_cast<std::int64_t>(hosts.mine().size());
  struct State {
    at::Tensor own, column;
  };
  auto state = std::make_shared<State>();
  state->own = memory.host_memory(block);
  state->column = memory.host_memory(block * host_count);
  Parts parts;
  parts.between = part_between(Op::all_gather, hosts.column(), block, dtype, ReduceOp::sum);
  parts.between.work.input = data_of(state->own);
  parts.between.work.output = data_of(state->column);
  parts.between.work.keep = state;
  parts.before = [=](Inner&) { memory.load(memory.flat(input, true), state->own); };
  parts.afterwards = [=, ranks = hosts.all()](Inner& inner) {
    at::Tensor column = memory.staging ? memory.device_memory(block * host_count) : state->column;
    memory.store(state->column, column);
    const at::Tensor all = memory.device_memory(block * host_count * local);
    at::Tensor all_bytes = bytes_of(all);
    at::Tensor column_bytes = bytes_of(column);
    inner.await(inner.backend()._allgather_base(all_bytes, column_bytes, options_for<::c10d::AllgatherOptions>(inner)));
    // all[index in the host][host] -> outputs[rank]
    const bool whole = outputs.size() == 1 && host_count * local > 1;
    const bool direct = whole && is_plain(outputs.front());
    const at::Tensor ordered = !whole   ? at::Tensor()
                               : direct ? outputs.front().view({-1})
                                        : memory.device_memory(block * host_count * local);
    for (std::int64_t host = 0; host < host_count; ++host) {
      for (std::int64_t index = 0; index < local; ++index) {
        const std::int64_t rank = ranks[static_cast<std::size_t>(host)][static_cast<std::size_t>(index)];
        const at::Tensor one = all.narrow(0, (index * host_count + host) * block, block);
        if (whole) {
          ordered.narrow(0, rank * block, block).copy_(one, true);
        } else {
          const at::Tensor& output = outputs[static_cast<std::size_t>(rank)];
          output.copy_(one.view(output.sizes()), true);
        }
      }
    }
    if (whole && !direct) outputs.front().copy_(ordered.view(outputs.front().sizes()), true);
  };
  return parts;
}

Parts columned_reduce_scatter(const Memory& memory, const at::Tensor& output, const Tensors& inputs, const Hosts& hosts,
                              DType dtype, ReduceOp reduce) {
  const std::int64_t block = output.numel();
  const auto host_count = static_cast<std::int64_t>(hosts.all().size());
  const auto local = static_cast<std::int64_t>(hosts.mine().size());
  struct State {
    at::Tensor column, own;
  };
  auto state = std::make_shared<State>();
  state->column = memory.host_memory(block * host_count);
  state->own = memory.host_memory(block);
  Parts parts;
  parts.between = part_between(Op::reduce_scatter, hosts.column(), block, dtype, reduce);
  parts.between.work.input = data_of(state->column);
  parts.between.work.output = data_of(state->own);
  parts.between.work.keep = state;
  parts.before = [=, ranks = hosts.all()](Inner& inner) {
    const bool whole = inputs.size() == 1 && host_count * local > 1;
    const at::Tensor in_order = whole ? inputs.front().reshape({-1}) : at::Tensor();
    at::Tensor packed = memory.device_memory(block * host_count * local);  // [index in the host][host]
    for (std::int64_t host = 0; host < host_count; ++host) {
      for (std::int64_t index = 0; index < local; ++index) {
        const std::int64_t rank = ranks[static_cast<std::size_t>(host)][static_cast<std::size_t>(index)];
        const at::Tensor from =
            whole ? in_order.narrow(0, rank * block, block) : inputs[static_cast<std::size_t>(rank)].reshape({-1});
        packed.narrow(0, (index * host_count + host) * block, block).copy_(from, true);
      }
    }
    if (memory.factor) packed.mul_(*memory.factor);
    at::Tensor column = memory.staging ? memory.device_memory(block * host_count) : state->column;
    reduce_scatter(inner, memory, column, packed);
    memory.load(column, state->column);
  };
  parts.afterwards = [=](Inner&) { output.copy_(state->own.view(output.sizes()), true); };
  return parts;
}

}  // namespace

Parts Inner::parts_of(const Operation& operation, const Asked& given) const {
  Asked asked = given;
  for (at::Tensor& tensor : asked.inputs) tensor = tensor.detach();
  for (at::Tensor& tensor : asked.outputs) tensor = tensor.detach();
  const at::Tensor& like = asked.inputs.front();
  const DType dtype = dtype_of(like, operation.op);
  Memory memory;
  memory.staging = operation.description.staging;
  memory.options = like.options().requires_grad(false).memory_format(at::MemoryFormat::Contiguous);
  memory.reduce = asked.reduce;
  ReduceOp reduce = ReduceOp::sum;
  std::string how;
  if (collective::reduces(asked.kind)) {
    reduce = reduce_op_of(asked.reduce, dtype, operation.op);
    how = std::string(torch_iroh::name_of(reduce)) + ", ";
    if (reduce == ReduceOp::premul_sum) {
      memory.factor = premul_factor_of(asked.reduce);
      reduce = ReduceOp::sum;
    }
  }
  if (memory.staging) {
    memory.staging->use(asked.inputs);
    memory.staging->use(asked.outputs);
  }
  Parts parts;
  switch (asked.kind) {
    case Op::all_gather: parts = columned_all_gather(memory, asked.outputs, like, hosts_, dtype); break;
    case Op::reduce_scatter:
      parts = columned_reduce_scatter(memory, asked.outputs.front(), asked.inputs, hosts_, dtype, reduce);
      break;
    case Op::all_reduce:
      if (hosts_.even()) {
        parts = sharded_all_reduce(memory, like, hosts_, dtype, reduce);
        break;
      }
      [[fallthrough]];
    default: parts = led(asked.kind, asked.root, memory, like, hosts_, dtype, reduce);
  }
  const bool by_blocks = asked.kind == Op::all_gather || asked.kind == Op::reduce_scatter;
  const at::Tensor& shown = asked.kind == Op::reduce_scatter ? asked.outputs.front() : like;
  parts.title = std::string(collective::name_of(asked.kind)) + "(" + how + std::string(torch_iroh::name_of(dtype)) +
                (by_blocks ? "[" + std::to_string(shown.numel()) + "]" : shape_text(shown));
  if (asked.kind == Op::reduce || asked.kind == Op::broadcast) parts.title += ", root " + std::to_string(asked.root);
  parts.title += ", inside hosts by " + inner_.name;
  return parts;
}

}  // namespace torch_iroh::c10d_backend
