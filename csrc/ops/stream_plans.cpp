#include "ops/stream_plans.h"

#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "channel/groups.h"
#include "ops/kernels.h"
#include "ops/plan_key.h"
#include "ops/plan_recording.h"
#include "ops/plan_run.h"

namespace symm_cp::stream_plans {

namespace {

using kernels::call_python;

// The most keys that are kept; one key more drops all. Only programs whose calls keep changing
// shape reach this number.
constexpr size_t kMostKeys = 1024;

// The state of the calls with a key.
struct Known {
  int calls = 0;
  bool refused = false;
  std::shared_ptr<const Plan> plan;
};

struct State {
  std::mutex mutex;
  std::unordered_map<std::string, Known> known;
  // The call with a key, counted from 0, that is the first to be recorded; negative: calls are not
  // recorded.
  std::atomic<int> record_at{1};
  std::atomic<int64_t> runs{0};
  std::atomic<int64_t> drops{0};  // how often all plans were dropped
  std::string last_refusal;

  // Never destroyed: plans own Python objects.
  static State& get() {
    static auto* const state = new State;
    return *state;
  }
};

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

// The recording that this thread's next kernel in Python fills.
thread_local Recording* wanted = nullptr;

// Returns an op's kernel in Python: see symm_cp/ops/registration.py.
std::optional<c10::OperatorHandle> overload_of(const c10::OperatorHandle& op,
                                               const char* overload) {
  const std::string name = op.schema().name();
  return c10::Dispatcher::singleton().findSchema(
      {"symm_cp" + name.substr(name.find(':')), overload});
}

void call_overload(const c10::OperatorHandle& op, const char* overload, Stack* stack) {
  const auto kernel = overload_of(op, overload);
  kernel.value().redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

void record(const Key& key, const c10::OperatorHandle& op, Stack* stack) {
  State& state = State::get();
  const int64_t drops = state.drops;
  PlanRecording recording(key);
  wanted = &recording;
  try {
    call_overload(op, "recorded", stack);
  } catch (...) {
    wanted = nullptr;
    throw;
  }
  wanted = nullptr;
  const size_t count = op.schema().returns().size();
  auto plan = recording.end(torch::jit::last(*stack, count).vec(), group_named(key.group()));
  std::lock_guard<std::mutex> lock(state.mutex);
  // Plans were dropped during the call: it made a workspace, or another thread changed a setting.
  if (state.drops != drops) return;
  if (plan == nullptr) state.last_refusal = recording.refusal();
  Known& known = state.known[key.bytes()];
  known.refused = plan == nullptr;
  known.plan = std::move(plan);
}

}  // namespace

bool run(const c10::OperatorHandle& op, Stack* stack) {
  State& state = State::get();
  const int record_at = state.record_at.load(std::memory_order_relaxed);
  if (record_at < 0 || wanted != nullptr || is_set("SYMM_CP_DEBUG")) return false;
  const Key key(op, *stack);
  if (!key.usable()) return false;
  std::shared_ptr<const Plan> plan;
  bool recorded = false;
  std::unordered_map<std::string, Known>
      dropped;  // outlives the lock below: destruction may wait for Python's lock
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    if (state.known.size() >= kMostKeys && state.known.count(key.bytes()) == 0)
      dropped.swap(state.known);
    Known& known = state.known[key.bytes()];
    plan = known.plan;
    recorded = plan == nullptr && !known.refused && known.calls++ >= record_at;
  }
  if (plan != nullptr) {
    if (!carry_out(std::move(plan), key, op, stack)) return false;
    ++state.runs;
    return true;
  }
  if (!recorded) return false;
  if (!overload_of(op, "recorded")) {
    std::lock_guard<std::mutex> lock(state.mutex);
    state.known[key.bytes()].refused = true;
    return false;
  }
  record(key, op, stack);
  return true;
}

void kernel(const c10::OperatorHandle& op, Stack* stack) {
  if (!run(op, stack)) call_python(op, stack);
}

void kernel_or_torchs(const c10::OperatorHandle& op, Stack* stack) {
  if (!run(op, stack)) call_overload(op, "or_torchs", stack);
}

}  // namespace symm_cp::stream_plans

extern "C" {

// Returns the recording that Python's kernel fills in the calling thread; null if the call is not
// recorded.
void* symm_cp_plan_recording() { return symm_cp::stream_plans::wanted; }

// Drops all plans; called after a change that may affect them.
void symm_cp_plans_drop() {
  auto& state = symm_cp::stream_plans::State::get();
  std::unordered_map<std::string, symm_cp::stream_plans::Known> dropped;
  std::lock_guard<std::mutex> lock(state.mutex);
  ++state.drops;
  dropped.swap(state.known);
}

// Sets the call with a key, counted from 0, that is the first to be recorded; negative: plans are
// neither recorded nor run.
void symm_cp_plans_record_at(int number) {
  symm_cp::stream_plans::State::get().record_at = number;
  symm_cp_plans_drop();
}

// Returns the number of calls that ran as plans since the last call of this function.
int64_t symm_cp_plans_run() { return symm_cp::stream_plans::State::get().runs.exchange(0); }

// Returns why the last call that could not be recorded was refused.
const char* symm_cp_plans_refusal() {
  thread_local std::string text;
  auto& state = symm_cp::stream_plans::State::get();
  std::lock_guard<std::mutex> lock(state.mutex);
  text = state.last_refusal;
  return text.c_str();
}

// Registers a kernel of an op for devices with this dispatch key, until symm_cp_plan_op_undo: it
// runs a plan, or Python's kernel. With `or_torchs` Python's kernel leaves unsupported groups to
// torch's. Returns null on failure.
void* symm_cp_plan_op(const char* name, const char* key, int or_torchs) {
  using namespace symm_cp::stream_plans;
  struct : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;  // torch warns if a kernel exists already
  const c10::WarningUtils::WarningHandlerGuard ignoring(&silent);
  try {
    auto made = std::make_unique<torch::Library>(torch::Library::IMPL, "symm_mem",
                                                 c10::parseDispatchKey(key), __FILE__, __LINE__);
    made->impl(name, or_torchs != 0 ? torch::CppFunction::makeFromBoxedFunction<&kernel_or_torchs>()
                                    : torch::CppFunction::makeFromBoxedFunction<&kernel>());
    return made.release();
  } catch (const std::exception&) {
    return nullptr;
  }
}

void symm_cp_plan_op_undo(void* library) { delete static_cast<torch::Library*>(library); }

}  // extern "C"
