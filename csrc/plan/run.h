// Carries out plans (plan.h).
#pragma once

#include <memory>

#include "plan/key.h"
#include "plan/plan.h"

namespace symm_cp::plans {

// Runs a call of an op through a plan; the results replace the arguments on the stack. Returns
// false, and does nothing, if the plan cannot run now.
bool carry_out(std::shared_ptr<const Plan> plan, const Key& key,
               const std::shared_ptr<Group>& group, const c10::OperatorHandle& op, Stack* stack);

}  // namespace symm_cp::plans
