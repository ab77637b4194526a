#include "plan/run.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/mm.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "base/python.h"
#include "channel/group.h"
#include "cuda/streams.h"
#include "memory/pool.h"
#include "ops/kernels.h"

namespace symm_cp::plans {

namespace {

// The place of a call's slot.
struct Slot {
  at::Tensor memory;
  int64_t begin = 0;  // in bytes
};

using Values = c10::SmallVector<at::Tensor, 12>;

// The values of a call.
struct Frame {
  Values values;
  Key::Tensors given;  // if plans of the op have free arguments
  Key::FreeNumbers numbers;
};

// Functions for the current stream of a CUDA device, which torch's CUDA library exports for code
// compiled without it; null if it has none.
struct CudaStreams {
  int32_t (*current)(int32_t device, void** stream) = nullptr;
  // Makes a stream the current one, until `undo` is called with the guard.
  int32_t (*use)(void* stream, int32_t device, void** guard) = nullptr;
  int32_t (*undo)(void* guard) = nullptr;

  static const CudaStreams& get() {
    static const CudaStreams functions;
    return functions;
  }
  bool complete() const { return current != nullptr && use != nullptr && undo != nullptr; }

 private:
  CudaStreams() {
    void* const library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) return;
    find(library, "aoti_torch_get_current_cuda_stream", current);
    find(library, "aoti_torch_create_cuda_stream_guard", use);
    find(library, "aoti_torch_delete_cuda_stream_guard", undo);
  }
  template <class Function>
  static void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
  }
};

std::optional<void*> current_stream(const driver::Api& api, c10::Device device) {
  if (api.hosted_stream != nullptr) return api.hosted_stream(device.index());
  void* stream = nullptr;
  const CudaStreams& cuda = CudaStreams::get();
  if (device.type() != c10::kCUDA || !cuda.complete()) return {};
  if (cuda.current(device.index(), &stream) != 0) return {};
  return stream;
}

// Makes a stream the current one within its scope.
class OnStream {
 public:
  OnStream(const driver::Api& api, void* stream, c10::Device device) : api_(api) {
    if (api_.hosted_use != nullptr) {
      guard_ = api_.hosted_use(stream);
      return;
    }
    TORCH_CHECK(CudaStreams::get().use(stream, device.index(), &guard_) == 0,
                "symm_cp: torch cannot use a stream of ", device);
  }
  ~OnStream() {
    if (api_.hosted_use != nullptr)
      api_.hosted_use(guard_);
    else
      CudaStreams::get().undo(guard_);
  }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

 private:
  const driver::Api& api_;
  void* guard_ = nullptr;  // of a simulated device: the stream before
};

// Within its scope torch's ops go to the streams of a simulated device. On others they always do.
class OnSimulatedStreams {
 public:
  explicit OnSimulatedStreams(const Plan& plan) {
    for (const Step& step : plan.steps)
      if (const auto* launch = std::get_if<LaunchStep>(&step))
        ops_ = launch->streams->api().hosted_ops;
    if (ops_ != nullptr) ops_(driver::kOpsToStreams);
  }
  ~OnSimulatedStreams() {
    if (ops_ != nullptr) ops_(failed ? driver::kOpsFailed : driver::kOpsIssued);
  }
  OnSimulatedStreams(const OnSimulatedStreams&) = delete;
  OnSimulatedStreams& operator=(const OnSimulatedStreams&) = delete;

  bool failed = true;

 private:
  void (*ops_)(int) = nullptr;
};

bool is_capturing(const driver::Api& api, void* stream) {
  if (api.capture_info == nullptr) return true;
  int status = 0;
  uint64_t id = 0;
  return api.capture_info(stream, &status, &id, nullptr, nullptr, nullptr) != 0 || status != 0;
}

class PlanRun {
 public:
  PlanRun(std::shared_ptr<const Plan> plan, const Key& key, std::shared_ptr<Group> group)
      : plan_(std::move(plan)), group_(std::move(group)) {
    Values& inputs = frame_.values;
    for (const at::Tensor& tensor : key.tensors()) {
      const auto shares = [&](const at::Tensor& other) {
        return other.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl();
      };
      if (std::none_of(inputs.begin(), inputs.end(), shares)) inputs.push_back(tensor);
    }
    if (key.has_free()) frame_.given = key.tensors(), frame_.numbers = key.free_numbers();
    frame_.values.resize(plan_->values);
    for (const auto& [value, tensor] : plan_->constants) frame_.values[value] = tensor;
  }

  void run() {
    try {
      for (const Step& step : plan_->steps) std::visit([&](const auto& s) { carry_out(s); }, step);
    } catch (const std::exception& error) {
      // The peers have completed all exchanges, and need no report.
      if (plan_->calls > 0 && Group::made_by_this_thread() - first_call_ >= plan_->calls)
        throw kernels::Failed(std::current_exception());
      if (launch_ == nullptr) throw;
      launch_->fail({frame_.values.begin(), frame_.values.end()}, error.what());
      if (dynamic_cast<const driver::Error*>(&error) != nullptr)
        TORCH_CHECK(false, "symm_cp: ", error.what());
      throw;
    }
  }

  c10::IValue result(const StepArgument& given) const { return value_of(given, frame_, nullptr); }

 private:
  static at::Tensor tensor_of(const View& view, const Frame& frame, const Slot* slot) {
    if (view.free) return frame.given[*view.free];
    if (view.whole) return frame.values[view.place.value];
    const bool in_slot = view.place.value == kSlot;
    const at::Tensor& base = in_slot ? slot->memory : frame.values[view.place.value];
    if (view.place.offset == 0 && !in_slot && view.dtype == base.scalar_type() &&
        base.sizes() == view.sizes && base.strides() == view.strides)
      return base;
    const auto size = static_cast<int64_t>(c10::elementSize(view.dtype));
    const int64_t begin = base.storage_offset() * static_cast<int64_t>(base.element_size()) +
                          view.place.offset + (in_slot ? slot->begin : 0);
    TORCH_INTERNAL_ASSERT(begin % size == 0);
    auto made = c10::make_intrusive<c10::TensorImpl>(c10::Storage(base.storage()), base.key_set(),
                                                     c10::scalarTypeToTypeMeta(view.dtype));
    made->set_sizes_and_strides(view.sizes, view.strides, begin / size);
    return at::Tensor(std::move(made));
  }

  static c10::IValue value_of(const StepArgument& given, const Frame& frame, const Slot* slot) {
    if (given.is_list) {
      std::vector<at::Tensor> tensors;
      for (const View& view : given.tensors) tensors.push_back(tensor_of(view, frame, slot));
      return tensors;
    }
    if (given.free_number) return frame.numbers[*given.free_number].value;
    return given.tensors.empty() ? given.constant : tensor_of(given.tensors[0], frame, slot);
  }

  static void keep(const std::vector<int>& numbers, size_t index, const at::Tensor& result,
                   Frame& frame) {
    if (index < numbers.size() && numbers[index] != kNoValue) frame.values[numbers[index]] = result;
  }

  static void forget(const std::vector<int>& values, Frame& frame) {
    for (const int value : values) frame.values[value].reset();
  }

  static void carry_out(const OpStep& step, Frame& frame, const Slot* slot) {
    if (step.is_mm) {
      const auto tensor = [&](size_t at) {
        return tensor_of(step.arguments[at].tensors[0], frame, slot);
      };
      at::Tensor out = tensor(2);
      at::mm_out(out, tensor(0), tensor(1));
      return;
    }
    Stack stack;
    stack.reserve(step.arguments.size());
    for (const StepArgument& argument : step.arguments)
      stack.push_back(value_of(argument, frame, slot));
    step.op.callBoxed(stack);
    size_t index = 0;
    for (const c10::IValue& result : stack) {
      if (result.isTensor()) keep(step.results, index++, result.toTensor(), frame);
      if (result.isTensorList())
        for (const at::Tensor& tensor : result.toTensorVector())
          keep(step.results, index++, tensor, frame);
    }
  }

  static void carry_out(const NewStep& step, Frame& frame, const Slot*) {
    frame.values[step.results[0]] =
        pooled_empty(step.sizes, at::TensorOptions(at::kCPU).dtype(step.dtype));
  }

  static void carry_out(const PythonStep& step, Frame& frame, const Slot* slot) {
    std::vector<at::Tensor> arguments;
    for (const View& view : step.arguments) arguments.push_back(tensor_of(view, frame, slot));
    const auto results = step.function(arguments);
    for (size_t i = 0; i < results.size(); ++i) keep(step.results, i, results[i], frame);
  }

  static void carry_out_all(const KernelStep& kernel, Frame& frame, const Slot* slot) {
    for (const auto& step : kernel.steps)
      std::visit(
          [&](const auto& s) {
            carry_out(s, frame, slot);
            forget(s.last, frame);
          },
          step);
  }

  void carry_out(const ExchangeStep& step) {
    // No other call of this rank comes between the exchanges.
    if (plan_->exchanges > 1 && !lock_) lock_.emplace(*group_, kSync);
    const auto addresses = [&](const std::vector<View>& views) {
      Addresses found;
      for (const View& view : views) found.push_back(pointer(view.place));
      return found;
    };
    std::string name;
    if (step.free_number)
      name = step.before + std::to_string(frame_.numbers[*step.free_number].value) + step.after;
    step.prepared->run(*group_, addresses(step.given), addresses(step.taken),
                       step.free_number ? &name : nullptr);
    forget(step.last, frame_);
  }

  void carry_out(const LaunchStep& step) {
    lock_.emplace(*group_, kSync);
    epoch_ = step.streams->next_epoch();
    slot_ = {step.memory, step.layout.slot_offset(epoch_)};
    std::copy(step.lanes, step.lanes + kLanes, lanes_);
    lanes_[0] = *current_stream(step.streams->api(), plan_->device);
    operands_.clear();
    for (const ValuePlace& place : step.operands) operands_.push_back(pointer(place));
    launch_ = &step;
  }

  void* pointer(const ValuePlace& place) const {
    if (place.value == kNoValue) return nullptr;
    return static_cast<char*>(frame_.values[place.value].mutable_data_ptr()) + place.offset;
  }

  void carry_out(const CommandStep& step) {
    launch_->streams->run(step.commands.data(), static_cast<int>(step.commands.size()),
                          operands_.data(), lanes_, epoch_, /*capturing=*/false,
                          launch_->call_name.c_str());
  }

  void carry_out(const KernelStep& step) {
    if (!step.lane) return carry_out_all(step, frame_, &slot_);
    std::optional<OnStream> on_lane;
    if (*step.lane != 0)
      on_lane.emplace(launch_->streams->api(), lanes_[*step.lane], plan_->device);
    carry_out_all(step, frame_, &slot_);
  }

  void carry_out(const EndStep& step) {
    launch_ = nullptr;
    lock_.reset();
    forget(step.last, frame_);
  }

  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<Group> group_;
  Frame frame_;
  std::optional<CallLock> lock_;
  int64_t first_call_ = Group::made_by_this_thread();
  const LaunchStep* launch_ = nullptr;  // the launch under way
  uint32_t epoch_ = 0;
  Slot slot_;
  void* lanes_[kLanes] = {};
  std::vector<void*> operands_;
};

bool serves_now(const Plan& plan) {
  if (plan.device.is_cpu() && (plan.exchanges > 0 || plan.calls > 0)) return true;
  if (in_test_mode()) return false;
  for (const auto& may_run : plan.may_run)
    if (!may_run()) return false;
  for (const Step& step : plan.steps) {
    const auto* launch = std::get_if<LaunchStep>(&step);
    if (launch == nullptr) continue;
    if (!launch->streams->serves()) return false;
    const auto stream = current_stream(launch->streams->api(), plan.device);
    if (!stream || is_capturing(launch->streams->api(), *stream)) return false;
  }
  return true;
}

}  // namespace

bool carry_out(std::shared_ptr<const Plan> plan, const Key& key,
               const std::shared_ptr<Group>& group, const c10::OperatorHandle& op, Stack* stack) {
  const c10::OptionalDeviceGuard device(plan->device.is_cpu() ? std::nullopt
                                                              : std::optional(plan->device));
  if (!serves_now(*plan)) return false;
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  if (plan->counts) kernels::count_attention_run();
  OnSimulatedStreams ops(*plan);
  PlanRun run(plan, key, group);
  run.run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (const auto& result : plan->results) {
    const auto* made = std::get_if<StepArgument>(&result);
    stack->push_back(made != nullptr ? run.result(*made)
                                     : c10::IValue(key.tensors()[std::get<size_t>(result)]));
  }
  ops.failed = false;
  return true;
}

}  // namespace symm_cp::plans
