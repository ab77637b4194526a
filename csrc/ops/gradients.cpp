// What autograd must know of collectives beside gradients that are ops (backward_ops.cpp): the
// gradient of one that writes to its input, refusals, and which tensors were overwritten.
#include <ATen/FuncTorchTLS.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cstring>

#include "ops/gradients.h"

namespace symm_cp {

namespace gradients {

bool needs_gradient(const char* op, const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !tensor._fw_grad(/*level=*/0).defined(), op,
      ": forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad) are not supported: "
      "use torch.autograd.grad or backward()");
  if (!tensor.requires_grad() || !at::GradMode::is_enabled()) return false;
  if (const auto& transforms = at::functorch::functorchTLSAccessor()) {
    try {
      transforms->checkSupportsCppAutogradFunction();
    } catch (const c10::Error&) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          false, op,
          ": torch.func.grad, vjp and the transforms built on them are not supported: use "
          "torch.autograd.grad or backward()");
    }
  }
  return true;
}

void redispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  at::AutoDispatchBelowAutograd below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace gradients

namespace {

using namespace gradients;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Calls one of these ops boxed, since the C++ signatures of torch's differ between its builds.
at::Tensor call_all_reduce(const c10::OperatorHandle& op, const at::Tensor& tensor,
                           const c10::IValue& reduce_op, const c10::IValue& group) {
  Stack stack{tensor, reduce_op, group};
  op.callBoxed(stack);
  return stack.back().toTensor();
}

struct AllReduceInPlace : torch::autograd::Function<AllReduceInPlace> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& tensor,
                            const c10::IValue& reduce_op, const c10::IValue& group) {
    static const auto op = handle_of("symm_mem::two_shot_all_reduce_");
    ctx->saved_data["group"] = group;
    ctx->saved_data["reduce_op"] = reduce_op;
    ctx->mark_dirty({tensor});
    at::AutoDispatchBelowAutograd below;  // above ADInplaceOrView, which counts the modification
    call_all_reduce(op, tensor, reduce_op, group);
    return tensor;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = handle_of("symm_mem::_all_reduce_backward");
    return {call_all_reduce(op, grads[0], ctx->saved_data["reduce_op"], ctx->saved_data["group"]),
            at::Tensor(), at::Tensor()};
  }
};

void two_shot_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, 3);
  const at::Tensor tensor = arguments[0].toTensor();
  if (!needs_gradient("two_shot_all_reduce_", tensor)) return redispatch(op, keys, stack);
  TORCH_CHECK(!(tensor.is_view() ? tensor._base() : tensor).is_leaf(),
              "two_shot_all_reduce_: input is a leaf that requires grad, or a view of one, which "
              "must not be modified in place: use one_shot_all_reduce, or torch.no_grad()");
  const at::Tensor result = AllReduceInPlace::apply(tensor, arguments[1], arguments[2]);
  torch::jit::drop(*stack, 3);
  stack->emplace_back(result);
}

// Ops that write their result to an argument have no gradient, like torch's. Neither do the
// symmetric-memory ops that torch has only on GPUs.
void out_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  const char* name = name_of(op);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!values[i].isTensor()) continue;
    const at::Tensor tensor = values[i].toTensor();
    TORCH_CHECK_NOT_IMPLEMENTED(
        !needs_gradient(name, tensor), name, ": has no gradient, and ", arguments[i].name(),
        " requires grad: use an op that has one and returns its result, or torch.no_grad()");
    if (!tensor.is_neg() && !tensor.is_conj()) continue;
    // torch would return an input with such a bit, as some of its schemas say, and would copy the
    // result back to an output at once, before a transfer has completed.
    const bool input = arguments[i].name() != "out" && arguments[i].name() != "output";
    if (input) torch::jit::peek(*stack, i, arguments.size()) = tensor.resolve_conj().resolve_neg();
    const bool in_background = strncmp(name, "_low_contention", strlen("_low_contention")) == 0;
    TORCH_CHECK_VALUE(input || !in_background, name, ": ", arguments[i].name(),
                      " must not be a conjugated or negated view: use its resolve_conj() or "
                      "resolve_neg()");
  }
  redispatch(op, keys, stack);
}

// Lets autograd notice that an op overwrote tensors that it has saved: the tensor that the op
// returns or, if it returns none, the tensors that its schema marks (the schemas of the ops that
// return a tensor mark too many). On other devices torch's ops stay as they are.
void count_modification(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const bool returns = !op.schema().returns().empty();
  const auto& arguments = op.schema().arguments();
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < arguments.size() && !returns; ++i) {
    const c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
    const auto* alias = arguments[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    if (value.isTensor()) written.push_back(value.toTensor());
    if (value.isTensorList()) written = value.toTensorVector();
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  if (returns) written.push_back(stack->back().toTensor());
  for (const at::Tensor& tensor : written)
    if (tensor.is_cpu() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, Autograd, m) {
  for (const char* name : {"_low_contention_all_gather_out", "_low_contention_reduce_scatter_out"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&reporting<&out_autograd, kAsync>>());
}

// CPU only: on other devices torch's kernels may write to parameters and other tensors that require
// grad, while these kernels raise for them.
TORCH_LIBRARY_IMPL(symm_mem, AutogradCPU, m) {
  m.impl("two_shot_all_reduce_",
         torch::CppFunction::makeFromBoxedFunction<&reporting<&two_shot_autograd>>());
  for (const char* name :
       {"one_shot_all_reduce_out", "one_shot_all_reduce_copy_out", "two_shot_all_reduce_out",
        "reduce_scatter_out", "all_to_all_vdev", "all_to_all_vdev_2d", "all_to_all_vdev_2d_offset",
        "tile_reduce", "multi_root_tile_reduce", "nccl_reduce_scatter_offset",
        "multimem_all_reduce_", "multimem_one_shot_all_reduce", "multimem_one_shot_all_reduce_out",
        "multimem_one_shot_reduce_out", "multimem_all_gather_out", "nvshmem_broadcast",
        "nvshmem_all_to_all"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&reporting<&out_autograd>>());
  for (const char* name :
       {"nvshmem_put", "nvshmem_get", "nvshmem_put_with_signal", "nvshmem_wait_for_signal",
        "nccl_put", "nccl_get", "nccl_put_with_signal", "nccl_wait_for_signal", "nccl_put_signal",
        "stream_write_value32_", "memset32_", "_async_input_mm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&out_autograd>());
}

TORCH_LIBRARY_IMPL(symm_mem, ADInplaceOrView, m) {
  for (const char* name : {"two_shot_all_reduce_",
                           "two_shot_all_reduce_out",
                           "one_shot_all_reduce_out",
                           "one_shot_all_reduce_copy_out",
                           "reduce_scatter_out",
                           "_low_contention_all_gather_out",
                           "_low_contention_reduce_scatter_out",
                           "all_to_all_vdev",
                           "all_to_all_vdev_2d",
                           "all_to_all_vdev_2d_offset",
                           "tile_reduce",
                           "multi_root_tile_reduce",
                           "nccl_reduce_scatter_offset",
                           "multimem_all_reduce_",
                           "multimem_one_shot_all_reduce_out",
                           "multimem_one_shot_reduce_out",
                           "multimem_all_gather_out",
                           "nvshmem_broadcast",
                           "nvshmem_all_to_all",
                           "nvshmem_get",
                           "nccl_get",
                           "stream_write_value32_",
                           "memset32_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&count_modification>());
}

}  // namespace symm_cp
