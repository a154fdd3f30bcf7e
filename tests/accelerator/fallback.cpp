// Computes: every operator without a kernel of its own runs the CPU's kernel over the device's memory.
//
// An operator that only writes into tensors of known size (add.out, mul_, fill_: most of them come here so) becomes
// work of the current stream, like a kernel launch. Any other waits for that stream first, computes in the caller's
// thread and copies its results to the device in stream order; the counter "fallback" tells how often.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels.hpp"

namespace simulated {
namespace {

using torch::jit::Stack;

// One call: its arguments, the CPU's view of them, and what the schema says of both.
struct Call {
  c10::OperatorHandle op;
  Stack arguments;
  Stack views;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // device tensor and its view
  std::optional<c10::Device> device;
  bool names_a_device = false;
};

bool takes_host_tensors(const Call& call) {
  return call.op.schema().name().find("index") != std::string::npos;
}

void note_device(Call& call, c10::Device device) {
  if (device.type() != c10::DeviceType::PrivateUse1 || call.device) return;
  const auto current = static_cast<c10::DeviceIndex>(current_device());
  call.device = c10::Device(device.type(), device.has_index() ? device.index() : current);
}

at::Tensor view_of(Call& call, const at::Tensor& tensor, bool written) {
  if (!tensor.defined()) return tensor;
  if (!is_simulated(tensor)) {
    TORCH_CHECK(tensor.dim() == 0 || takes_host_tensors(call), call.op.schema().name(), ": expected all tensors on ",
                "one device, but found a tensor of ", tensor.dim(), " dimensions on ", tensor.device(), " beside sim");
    return tensor.dim() == 0 ? tensor.clone() : tensor;  // a launch reads the host's scalars at once
  }
  note_device(call, tensor.device());
  TORCH_CHECK(tensor.device() == *call.device || written || tensor.dim() == 0, call.op.schema().name(),
              ": expected all tensors on one device, but found ", tensor.device(), " and ", *call.device);
  // An empty result is about to be resized, which a view of foreign memory cannot be.
  auto view = written && tensor.numel() == 0
                  ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::DeviceType::CPU))
                  : host_view(tensor);
  if (written) call.written.emplace_back(tensor, view);
  return view;
}

c10::IValue view_of(Call& call, const c10::IValue& value, bool written) {
  if (value.isTensor()) return view_of(call, value.toTensor(), written);
  if (value.isTensorList()) {
    c10::List<at::Tensor> views;
    for (const at::Tensor& tensor : value.toTensorVector()) views.push_back(view_of(call, tensor, written));
    return views;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> views;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      views.push_back(tensor ? std::optional(view_of(call, *tensor, written)) : std::nullopt);
    }
    return views;
  }
  if (value.isDevice()) {
    note_device(call, value.toDevice());
    call.names_a_device = true;
    return c10::Device(c10::DeviceType::CPU);
  }
  return value;
}

Call make_call(const c10::OperatorHandle& op, const Stack& stack) {
  Call call{op, {}, {}, {}, {}, false};
  const auto& schema = op.schema();
  call.arguments.assign(stack.end() - static_cast<std::ptrdiff_t>(schema.arguments().size()), stack.end());
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    const auto* const alias = schema.arguments()[i].alias_info();
    call.views.push_back(view_of(call, call.arguments[i], alias != nullptr && alias->isWrite()));
  }
  TORCH_CHECK(call.device, schema.name(), " was dispatched to sim without a tensor or a device of it");
  return call;
}

// The argument that this returned value is, by the schema; none for a new value.
std::optional<c10::IValue> returned_argument(const Call& call, const c10::Argument& returned) {
  const auto* const alias = returned.alias_info();
  if (alias == nullptr) return std::nullopt;
  TORCH_CHECK(alias->isWrite(), call.op.schema().name(), ": sim has no kernel for this view");
  const auto& arguments = call.op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].alias_info() != nullptr && *arguments[i].alias_info() == *alias) return call.arguments[i];
  }
  TORCH_CHECK(false, call.op.schema().name(), ": returns an alias of no argument");
}

bool can_launch(const Call& call) {
  const auto& returns = call.op.schema().returns();
  const auto is_argument = [](const c10::Argument& returned) { return returned.alias_info() != nullptr; };
  const auto has_size = [](const auto& written) { return written.first.numel() > 0; };
  // A generator is the CPU's: its numbers are to come in the caller's order.
  return !call.written.empty() && !call.names_a_device && std::all_of(returns.begin(), returns.end(), is_argument) &&
         std::all_of(call.written.begin(), call.written.end(), has_size) &&
         !call.op.hasTag(at::Tag::nondeterministic_seeded) && !takes_host_tensors(call);
}

void call_cpu(const c10::OperatorHandle& op, Stack& stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

void launch_call(const Call& call, StreamKey stream) {
  launch(stream, [op = call.op, views = call.views, written = call.written.size()]() mutable {
    std::vector<std::pair<at::Tensor, std::vector<std::int64_t>>> before;
    for (const auto& value : views) {
      if (value.isTensor() && value.toTensor().defined()) {
        before.emplace_back(value.toTensor(), value.toTensor().sizes().vec());
      }
    }
    Stack stack = views;
    call_cpu(op, stack);
    for (const auto& [tensor, sizes] : before) {
      TORCH_CHECK(tensor.sizes() == sizes, op.schema().name(), ": resized a tensor after it was launched on sim");
    }
  });
}

at::Tensor to_device(const at::Tensor& result, c10::Device device, StreamKey stream) {
  if (!result.defined()) return result;
  const auto there = at::empty_strided(result.sizes(), result.strides(), result.options().device(device));
  if (result.numel() > 0) launch(stream, [result, to = host_view(there)] { to.copy_(result); });
  return there;
}

c10::IValue to_device(const c10::IValue& result, c10::Device device, StreamKey stream) {
  if (result.isTensor()) return to_device(result.toTensor(), device, stream);
  if (!result.isTensorList()) return result;
  c10::List<at::Tensor> there;
  for (const at::Tensor& tensor : result.toTensorVector()) there.push_back(to_device(tensor, device, stream));
  return there;
}

// Returns what the CPU's kernel returned.
Stack call_now(const Call& call, StreamKey stream) {
  wait_on_host(stream, Wait::fallback);
  Stack stack = call.views;
  run_kernel([&] { call_cpu(call.op, stack); });
  for (const auto& [tensor, view] : call.written) {
    if (tensor.sizes() == view.sizes()) continue;  // it was written in place
    tensor.resize_(view.sizes());
    if (view.numel() > 0) launch(stream, [from = view, to = host_view(tensor)] { to.copy_(from); });
  }
  return stack;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const Call call = make_call(op, *stack);
  const c10::DeviceGuard guard(*call.device);
  const auto stream = current_stream(call.device->index());
  Stack results;
  if (can_launch(call)) {
    launch_call(call, stream);
  } else {
    results = call_now(call, stream);
  }
  torch::jit::drop(*stack, call.arguments.size());
  const auto& returns = op.schema().returns();
  for (std::size_t i = 0; i < returns.size(); ++i) {
    auto argument = returned_argument(call, returns[i]);
    stack->push_back(argument ? *std::move(argument) : to_device(results.at(i), *call.device, stream));
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace simulated
