// Carries out plans of calls on streams (stream_plans.h).
#pragma once

#include <memory>

#include "ops/plan_key.h"
#include "ops/stream_plans.h"

namespace symm_cp::stream_plans {

// Runs a call of an op through a plan; the results replace the arguments on the stack. Returns
// false, and does nothing, if the plan cannot run now.
bool carry_out(std::shared_ptr<const Plan> plan, const Key& key, const c10::OperatorHandle& op,
               Stack* stack);

}  // namespace symm_cp::stream_plans
