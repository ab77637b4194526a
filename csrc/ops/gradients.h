// Shared by the native gradients of ops.
#pragma once

#include "ops/kernels.h"

namespace symm_cp::gradients {

using kernels::name_of;
using torch::jit::Stack;

inline c10::OperatorHandle handle_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// Whether a call of the op must record a gradient for the tensor. Raises, with the message of
// symm_cp/ops/transforms.py, if a transform of torch would lose the derivative.
bool needs_gradient(const char* op, const at::Tensor& tensor);

// Redispatches a call to the kernels below autograd.
void redispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

// Since torch 2.13 nodes of autograd's graph contain their own reference count.
template <class Node>
auto make_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::make_intrusive<Node>();
  } else {
    return std::make_shared<Node>();
  }
}

// Runs `dispatch` for a call of the op. If it, or torch below it, refuses the call, reports this to
// the peers.
inline void reporting_refusals(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                               const Stack& stack, int channel,
                               c10::function_ref<void()> dispatch) {
  const auto& arguments = op.schema().arguments();
  size_t index = 0;
  while (arguments[index].name() != "group_name") ++index;
  const c10::IValue group = torch::jit::peek(stack, index, arguments.size());
  kernels::reporting_refusals(name_of(op), group, channel, keys, dispatch);
}

using AutogradKernel = void (*)(const c10::OperatorHandle&, c10::DispatchKeySet, Stack*);

template <AutogradKernel kernel, int channel = kSync>
void reporting(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  reporting_refusals(op, keys, *stack, channel, [&] { kernel(op, keys, stack); });
}

}  // namespace symm_cp::gradients
