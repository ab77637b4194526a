#include "plan/plan.h"

#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/python.h"
#include "channel/group.h"
#include "channel/groups.h"
#include "ops/kernels.h"
#include "plan/key.h"
#include "plan/recording.h"
#include "plan/run.h"

namespace symm_cp::plans {

namespace {

using kernels::call_python;

// The most keys that are kept; one key more drops the half that was used longest ago.
constexpr size_t kMostKeys = 2048;

// The state of the calls with a key.
struct Known {
  int calls = 0;
  bool refused = false;
  int64_t used = 0;
  std::shared_ptr<const Plan> plan;
};

using AllKnown = std::unordered_map<Key::Numbers, Known, HashNumbers>;

struct State {
  std::mutex mutex;
  AllKnown known;
  int64_t uses = 0;
  // The call with a key, counted from 0, that is the first to be recorded; negative: calls are not
  // recorded.
  std::atomic<int> record_at{1};
  std::atomic<int> pauses{0};  // while there are any, calls on CPU are made by Python
  std::atomic<int64_t> runs{0};
  std::atomic<int64_t> drops{0};  // how often all plans were dropped
  // Why calls of an op are left to Python; the latest last.
  std::vector<std::pair<std::string, std::string>> refusals;

  // Never destroyed: plans own Python objects.
  static State& get() {
    static auto* const state = new State;
    return *state;
  }

  void refuse(const c10::OperatorHandle& op, const std::string& reason) {
    std::lock_guard<std::mutex> lock(mutex);
    const std::string& name = op.schema().name();
    std::erase_if(refusals, [&](const auto& refusal) { return refusal.first == name; });
    refusals.emplace_back(name, reason);
  }

  // Makes room for a key; call it with the mutex held, and destroy the result without it:
  // destruction may wait for Python's lock.
  AllKnown make_room() {
    AllKnown dropped;
    if (known.size() < kMostKeys) return dropped;
    std::vector<int64_t> times;
    for (const auto& [key, each] : known) times.push_back(each.used);
    const auto middle = times.begin() + static_cast<ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    for (auto each = known.begin(); each != known.end();) {
      const auto next = std::next(each);
      if (each->second.used <= *middle) dropped.insert(known.extract(each));
      each = next;
    }
    return dropped;
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
  return c10::Dispatcher::singleton().findSchema({kernels::name_in_python(op), overload});
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
  auto plan = recording.end(torch::jit::last(*stack, count).vec());
  if (plan == nullptr) state.refuse(op, recording.refusal());
  std::lock_guard<std::mutex> lock(state.mutex);
  // Plans were dropped during the call: it made a workspace, or another thread changed a setting.
  if (state.drops != drops) return;
  Known& known = state.known[key.numbers()];
  known.refused = plan == nullptr;
  known.plan = std::move(plan);
}

// Returns the group of a call; null if Python must make it, or raise an error.
std::shared_ptr<Group> group_of(const c10::OperatorHandle& op, const Key& key, bool on_cpu) {
  try {
    auto group = group_named(key.group_name());
    return on_cpu && group->on_one_host() == false ? nullptr : group;
  } catch (const std::invalid_argument&) {
    return nullptr;
  } catch (const std::runtime_error& error) {
    // Perhaps a signal's handler raised while Python made the group: that must not be lost.
    TORCH_CHECK(!on_cpu, kernels::name_of(op), ": ", error.what());
    return nullptr;
  }
}

// Runs a call of which nothing is known to prevent that. Plans on streams have no free arguments.
bool run_now(const c10::OperatorHandle& op, Stack* stack, bool on_cpu, const Free& free = {}) {
  State& state = State::get();
  const int record_at = state.record_at.load(std::memory_order_relaxed);
  if (record_at < 0) return false;
  if (on_cpu ? state.pauses.load(std::memory_order_relaxed) > 0 : is_set("SYMM_CP_DEBUG"))
    return false;
  Key key(op, *stack, /*host_values=*/on_cpu, free);
  if (!key.usable()) {
    state.refuse(op, key.unusable());
    return false;
  }
  if (on_cpu && !key.device().is_cpu()) return false;
  const auto group = group_of(op, key, on_cpu);
  if (group == nullptr) return false;
  key.set_group(group->number());
  std::shared_ptr<const Plan> plan;
  bool recorded = false;
  AllKnown dropped;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    auto found = state.known.find(key.numbers());
    if (found == state.known.end()) {
      dropped = state.make_room();
      found = state.known.try_emplace(key.numbers()).first;
    }
    Known& known = found->second;
    known.used = ++state.uses;
    plan = known.plan;
    recorded = plan == nullptr && !known.refused && known.calls++ >= record_at &&
               (!on_cpu || group->on_one_host().has_value());
  }
  if (plan != nullptr) {
    bool ran = false;
    const auto run = [&] { ran = carry_out(std::move(plan), key, group, op, stack); };
    if (on_cpu)
      kernels::reporting_errors(kernels::name_of(op), *group, kSync, run);
    else
      run();
    if (ran) ++state.runs;
    return ran;
  }
  // In test mode kernels run their unfused definitions, which later calls must not repeat.
  if (!recorded || in_test_mode()) return false;
  if (!overload_of(op, "recorded")) {
    std::lock_guard<std::mutex> lock(state.mutex);
    state.known[key.numbers()].refused = true;
    return false;
  }
  record(key, op, stack);
  return true;
}

// A call inside a recorded call is one step of its plan, and a call of its own.
class Separate {
 public:
  Separate() : outer_(std::exchange(wanted, nullptr)) {}
  ~Separate() { wanted = outer_; }
  Separate(const Separate&) = delete;
  Separate& operator=(const Separate&) = delete;

 private:
  Recording* outer_;
};

// On devices with streams: runs a call of an op through its plan, or lets Python make it and
// records it. Returns false, and does nothing, if neither is possible: then the caller runs
// Python's kernel.
bool run(const c10::OperatorHandle& op, Stack* stack) {
  return wanted == nullptr && run_now(op, stack, /*on_cpu=*/false);
}

// The kernel of an op for CPU tensors: runs a plan, or Python.
class KernelOnCpu final : public c10::OperatorKernel {
 public:
  explicit KernelOnCpu(Free free) : free_(std::move(free)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    const Separate own;
    if (!kernels::serves_cpu() || !run_now(op, stack, /*on_cpu=*/true, free_))
      call_python(op, stack);
  }

 private:
  Free free_;
};

[[maybe_unused]] const bool serves_streams = (kernels::run_on_streams = &run) != nullptr;

}  // namespace

void kernel(const c10::OperatorHandle& op, Stack* stack) {
  if (!run(op, stack)) call_python(op, stack);
}

void kernel_or_torchs(const c10::OperatorHandle& op, Stack* stack) {
  if (!run(op, stack)) call_overload(op, "or_torchs", stack);
}

}  // namespace symm_cp::plans

extern "C" {

// Returns the recording that Python's kernel fills in the calling thread; null if the call is not
// recorded.
void* symm_cp_plan_recording() { return symm_cp::plans::wanted; }

// Drops all plans; called after a change that may affect them.
void symm_cp_plans_drop() {
  auto& state = symm_cp::plans::State::get();
  symm_cp::plans::AllKnown dropped;
  std::lock_guard<std::mutex> lock(state.mutex);
  ++state.drops;
  dropped.swap(state.known);
}

// Sets the call with a key, counted from 0, that is the first to be recorded; negative: plans are
// neither recorded nor run.
void symm_cp_plans_record_at(int number) {
  symm_cp::plans::State::get().record_at = number;
  symm_cp_plans_drop();
}

// Between these two Python makes all calls on CPU, and sees them.
void symm_cp_plans_pause() { ++symm_cp::plans::State::get().pauses; }
void symm_cp_plans_resume() { --symm_cp::plans::State::get().pauses; }

// Returns the number of calls that ran as plans since the last call of this function.
int64_t symm_cp_plans_run() { return symm_cp::plans::State::get().runs.exchange(0); }

// Returns the last reason why calls of an op could not be recorded, for each op, the latest last:
// "op: reason" on each line.
const char* symm_cp_plans_refusals() {
  thread_local std::string text;
  text.clear();
  auto& state = symm_cp::plans::State::get();
  std::lock_guard<std::mutex> lock(state.mutex);
  for (const auto& [op, reason] : state.refusals) text += op + ": " + reason + "\n";
  return text.c_str();
}

// Registers a kernel of an op, "symm_mem::f", for a dispatch key, until symm_cp_plan_op_undo: it
// runs a plan, or Python's kernel. With `or_torchs` Python's kernel leaves unsupported groups to
// torch's. `free` are the op's `count` arguments (key.h). Returns null on failure.
void* symm_cp_plan_op(const char* name, const char* key, int or_torchs, const int* free,
                      int count) {
  using namespace symm_cp::plans;
  struct : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;  // torch warns if a kernel exists already
  const c10::WarningUtils::WarningHandlerGuard ignoring(&silent);
  try {
    auto made = std::make_unique<torch::Library>(torch::Library::IMPL,
                                                 std::string(name, std::strstr(name, "::")),
                                                 c10::parseDispatchKey(key), __FILE__, __LINE__);
    if (c10::parseDispatchKey(key) == c10::DispatchKey::CPU)
      made->impl(name, torch::CppFunction::makeFromBoxedKernel(c10::BoxedKernel::makeFromFunctor(
                           std::make_unique<KernelOnCpu>(Free(free, free + count)))));
    else if (or_torchs != 0)
      made->impl(name, torch::CppFunction::makeFromBoxedFunction<&kernel_or_torchs>());
    else
      made->impl(name, torch::CppFunction::makeFromBoxedFunction<&kernel>());
    return made.release();
  } catch (const std::exception&) {
    return nullptr;
  }
}

void symm_cp_plan_op_undo(void* library) { delete static_cast<torch::Library*>(library); }

}  // extern "C"
