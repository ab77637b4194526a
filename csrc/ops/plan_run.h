// Carries out plans of calls on streams (stream_plans.h).
#pragma once

#include <memory>

#include "ops/plan_key.h"
#include "ops/stream_plans.h"

namespace symm_cp::stream_plans {

// Carries out a call of an op, whose arguments are on the stack, by a plan; its results take their
// place. Returns false, and does nothing, where the plan does not serve now.
bool carry_out(std::shared_ptr<const Plan> plan, const Key& key, const c10::OperatorHandle& op,
               Stack* stack);

}  // namespace symm_cp::stream_plans
