// Redispatches calls that record no gradient to their kernels, without Python. The kernels that
// symm_cp/ops/registration.py registers record the other calls.
#include <ATen/FuncTorchTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/gradients.h"

namespace symm_cp::autograd_gate {

namespace {

using namespace gradients;

template <class Test>
bool any_tensor(const c10::IValue& value, const Test& test) {
  if (value.isTensor()) return value.toTensor().defined() && test(value.toTensor());
  if (!value.isTensorList() && !value.isOptionalTensorList()) return false;
  const auto values = value.toListRef();
  return std::any_of(values.begin(), values.end(),
                     [&](const c10::IValue& each) { return any_tensor(each, test); });
}

// Whether a torch.func transform is active in this thread. The accessor is null until the first
// transform. The header with a direct query does not compile outside of torch, so this calls a
// check that throws under a transform.
bool transforms_active() {
  const auto& transforms = at::functorch::functorchTLSAccessor();
  if (transforms == nullptr) return false;
  try {
    transforms->checkSupportsCppAutogradFunction();
    return false;
  } catch (const c10::Error&) {
    return true;
  }
}

// Whether the call may need a derivative: Python's kernel then records it, or refuses the call if
// the op has no derivative.
bool may_differentiate(const c10::OperatorHandle& op, const Stack& stack) {
  if (transforms_active()) return true;
  const bool records = at::GradMode::is_enabled();
  const auto differentiates = [&](const at::Tensor& tensor) {
    return (records && tensor.requires_grad()) || tensor._fw_grad(/*level=*/0).defined();
  };
  const size_t count = op.schema().arguments().size();
  for (size_t i = 0; i < count; ++i)
    if (any_tensor(torch::jit::peek(stack, i, count), differentiates)) return true;
  return false;
}

void in_python_or_below(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (may_differentiate(op, *stack)) {
    const std::string name = std::string("symm_cp::") + name_of(op);
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow(name.c_str(), "")
        .redispatchBoxed(keys, stack);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, Autograd, m) {
  for (const char* name :
       {"_fused_matmuls_all_reduce", "fused_scaled_matmul_all_reduce",
        "_fused_matmuls_reduce_scatter", "_fused_all_gather_weight_grad",
        "_fused_matmul_reduce_scatter_backward", "fused_all_gather_attention",
        "fused_all_gather_attention_backward", "_route_to_experts", "dispatch_to_experts",
        "combine_from_experts", "fused_dispatch_grouped_matmul", "fused_grouped_matmul_combine",
        "_fused_dispatch_grouped_matmul_backward", "_fused_grouped_matmul_combine_backward",
        "_all_gather_scaled_matmul_split", "_scaled_matmul_reduce_scatter_split"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&reporting<&in_python_or_below>>());
}

// Ops that torch defines without gradients. CPU only: other devices keep torch's kernels.
TORCH_LIBRARY_IMPL(symm_mem, AutogradCPU, m) {
  for (const char* name : {"fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&reporting<&in_python_or_below>>());
}

}  // namespace symm_cp::autograd_gate
