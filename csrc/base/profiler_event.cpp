#include "base/profiler_event.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace symm_cp {

namespace {

struct Observed {
  explicit Observed(at::StepCallbacks&& callbacks) : function(std::move(callbacks)) {}
  std::string name;
  std::vector<c10::IValue> inputs;
  at::RecordFunction function;  // refers to the name and the inputs
};

}  // namespace

std::shared_ptr<ProfilerEvent> ProfilerEvent::begin(const char* op, at::TensorList inputs) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return nullptr;
  auto record = std::make_shared<Observed>(std::move(*callbacks));
  record->name = std::string("symm_cp:") + op;
  for (const at::Tensor& input : inputs) record->inputs.emplace_back(input);
  record->function._setAsync();
  record->function.before(std::string_view(record->name), &record->inputs);
  auto event = std::make_shared<ProfilerEvent>();
  // With the calling thread's state, by which the profiler finds its data in the thread that ends
  // it.
  event->end_ = at::wrapPropagateTLSState([record] { record->function.end(); });
  return event;
}

void ProfilerEvent::end() {
  end_();
  end_called_.set_value();
}

}  // namespace symm_cp
