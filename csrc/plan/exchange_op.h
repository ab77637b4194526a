// The ops through which kernels in Python exchange tensors, and which plans replay (plan.h).
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>

#include "plan/plan.h"

namespace symm_cp::plans {

// Whether an op exchanges its first argument, and writes to its second.
bool is_exchange(const c10::OperatorHandle& op);
// Returns the exchange of a call of such an op.
std::shared_ptr<PreparedExchange> prepare(const c10::OperatorHandle& op, const Stack& arguments);

}  // namespace symm_cp::plans
