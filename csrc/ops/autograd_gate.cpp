// Redispatches calls that record no gradient to their kernels, without Python. The kernels that
// symm_cp/ops/registration.py registers record the other calls.
#include <ATen/FuncTorchTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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

// `composite`: Python's kernel calls ops that graphs shall see.
template <bool composite>
void in_python_or_below(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const bool traced = composite && c10::impl::TorchDispatchModeTLS::any_modes_set();
  if (traced || may_differentiate(op, *stack)) {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow(kernels::name_in_python(op).c_str(), "")
        .redispatchBoxed(keys, stack);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace

}  // namespace symm_cp::autograd_gate

extern "C" {

// Makes calls of an op, "symm_mem::f", that record no gradient run without Python, which has
// registered the kernel for the others; `key` is "Autograd", or that of a device. Returns 0 on
// failure.
int symm_cp_gate(const char* name, const char* key, int in_background, int composite) {
  using symm_cp::kAsync;
  using symm_cp::autograd_gate::in_python_or_below;
  using symm_cp::gradients::reporting;
  // Kernels live as long as the process.
  static auto* const library = new std::vector<std::unique_ptr<torch::Library>>;
  try {
    auto made = std::make_unique<torch::Library>(torch::Library::IMPL,
                                                 std::string(name, std::strstr(name, "::")),
                                                 c10::parseDispatchKey(key), __FILE__, __LINE__);
    using torch::CppFunction;
    auto kernel =
        in_background != 0
            ? CppFunction::makeFromBoxedFunction<&reporting<&in_python_or_below<false>, kAsync>>()
        : composite != 0
            ? CppFunction::makeFromBoxedFunction<&reporting<&in_python_or_below<true>>>()
            : CppFunction::makeFromBoxedFunction<&reporting<&in_python_or_below<false>>>();
    made->impl(name, std::move(kernel));
    library->push_back(std::move(made));
    return 1;
  } catch (const std::exception&) {
    return 0;
  }
}

}  // extern "C"
