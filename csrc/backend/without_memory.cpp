// Collectives of tensors without dense memory. torch has no kernels for their dispatch keys: it
// refuses the call before the backend gets it, and the peers wait until their time-out. With these
// kernels the backend symm_cp gets the call, refuses it, and reports that to the peers. Groups of
// other backends raise torch's error.
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstring>

#include "backend/backend.h"

namespace symm_cp {

namespace {

using torch::jit::Stack;

bool is_ours(const c10::IValue& group) {
  static const auto type = c10::getCustomClassType<c10::intrusive_ptr<c10d::ProcessGroup>>();
  if (!group.isObject() || group.type() != type) return false;
  const auto found = group.toCustomClass<c10d::ProcessGroup>()->getBackend(c10::kCPU);
  return dynamic_cast<const Backend*>(found.get()) != nullptr;
}

void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  for (size_t i = 0; i < count; ++i)
    if (is_ours(torch::jit::peek(*stack, i, count)))
      return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  TORCH_CHECK_NOT_IMPLEMENTED(false, "Could not run '", op.schema().name(),
                              "' with arguments from the '", toString(keys.highestPriorityTypeId()),
                              "' backend.");
}

// Without send and recv: a receiver waits for the next message, whichever call sends it.
const char* const kCollectives[] = {"allreduce_",
                                    "allreduce_coalesced_",
                                    "reduce_",
                                    "broadcast_",
                                    "gather_",
                                    "scatter_",
                                    "allgather_",
                                    "_allgather_base_",
                                    "allgather_coalesced_",
                                    "allgather_into_tensor_coalesced_",
                                    "reduce_scatter_",
                                    "_reduce_scatter_base_",
                                    "reduce_scatter_tensor_coalesced_",
                                    "alltoall_",
                                    "alltoall_base_"};

// `except`: a collective that torch has a kernel for.
void refuse_all(torch::Library& library, const char* except = "") {
  for (const char* name : kCollectives)
    if (std::strcmp(name, except) != 0)
      library.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

}  // namespace

TORCH_LIBRARY_IMPL(c10d, SparseCPU, m) { refuse_all(m, "allreduce_"); }
TORCH_LIBRARY_IMPL(c10d, SparseCsrCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(c10d, QuantizedCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(c10d, MkldnnCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(c10d, NestedTensorCPU, m) { refuse_all(m); }
TORCH_LIBRARY_IMPL(c10d, AutogradNestedTensor, m) { refuse_all(m); }

}  // namespace symm_cp
