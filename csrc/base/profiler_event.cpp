#include "base/profiler_event.h"

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace symm_cp {

using torch::profiler::impl::ProfilerStateBase;

// A `RecordFunction` without observers would have no name.
const at::StepCallbacks::StartEndPair kNoObserver = {
    [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> { return nullptr; },
    [](const at::RecordFunction&, at::ObserverContext*) {}};

// Calls the observers itself: `RecordFunction` would end the event in its destructor, even if the
// profiler was stopped before.
struct ProfilerEvent::Record {
  Record(const char* op, at::TensorList tensors, at::StepCallbacks&& callbacks)
      : name(std::string("symm_cp:") + op),
        inputs(tensors.begin(), tensors.end()),
        observers(std::exchange(callbacks.callbacks_, {kNoObserver})),
        function(std::move(callbacks)) {
    function._setAsync();
    function.before(std::string_view(name), &inputs);
    for (const auto& observer : observers) contexts.push_back(observer.start_(function));
  }

  void end() {
    if (profiler != nullptr && ProfilerStateBase::get() != profiler) return;
    for (size_t i = 0; i < contexts.size(); ++i) observers[i].end_(function, contexts[i].get());
  }

  std::string name;
  std::vector<c10::IValue> inputs;
  at::StepCallbacks::StartEndPairs observers;
  at::RecordFunction function;                                 // refers to the name and the inputs
  std::vector<std::unique_ptr<at::ObserverContext>> contexts;  // one for each observer
  const ProfilerStateBase* profiler = ProfilerStateBase::get();
  // Keeps the profiler's state alive, so that no other state gets its address.
  std::shared_ptr<c10::ThreadLocalDebugInfo> alive = c10::ThreadLocalDebugInfo::current();
};

ProfilerEvent::ProfilerEvent(std::unique_ptr<Record> record) : record_(std::move(record)) {}

ProfilerEvent::~ProfilerEvent() { end(); }

std::shared_ptr<ProfilerEvent> ProfilerEvent::begin(const char* op, at::TensorList inputs) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return nullptr;
  return std::shared_ptr<ProfilerEvent>(
      new ProfilerEvent(std::make_unique<Record>(op, inputs, std::move(*callbacks))));
}

void ProfilerEvent::end() {
  if (ended_.test_and_set()) return;
  try {
    record_->end();
  } catch (const std::exception& error) {
    TORCH_WARN("symm_cp: an observer of ", record_->name, " failed: ", error.what());
  }
}

}  // namespace symm_cp
