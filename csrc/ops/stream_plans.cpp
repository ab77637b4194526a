#include "ops/stream_plans.h"

#include <ATen/Context.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "base/python.h"
#include "channel/group.h"
#include "channel/groups.h"
#include "cuda/streams.h"
#include "ops/kernels.h"

namespace symm_cp::stream_plans {

namespace {

using kernels::call_python;

// Plans and refusals that are kept; with more, all are dropped. A call that comes but once is never
// recorded, so this is reached by programs with ever new shapes only.
constexpr size_t kMostKeys = 1024;

struct Plan {
  std::vector<Step> steps;
  std::vector<Given> results;
  size_t values = 0;
  c10::Device device = c10::kCPU;
  std::weak_ptr<Group> group;
  std::vector<std::function<bool()>> may_run;
};

// What is known of the calls with a key.
struct Known {
  int calls = 0;
  bool refused = false;
  std::shared_ptr<const Plan> plan;
};

struct State {
  std::mutex mutex;
  std::unordered_map<std::string, Known> known;
  // In which call with a key it is recorded; below 0: never.
  std::atomic<int> record_at{1};
  std::atomic<int64_t> runs{0};
  std::atomic<int64_t> drops{0};  // how often all were dropped
  std::string last_refusal;

  // Never destroyed: plans own objects of Python's.
  static State& get() {
    static auto* const state = new State;
    return *state;
  }
};

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

// --- keys ----------------------------------------------------------------------------------------

// The tensors among the arguments of an op, and what tells its calls apart.
class Key {
 public:
  Key(const c10::OperatorHandle& op, const Stack& stack) {
    add(reinterpret_cast<intptr_t>(&op.schema()));
    const size_t count = op.schema().arguments().size();
    for (size_t i = 0; i < count && usable_; ++i) {
      if (op.schema().arguments()[i].name() == "group_name")
        group_ = torch::jit::peek(stack, i, count).toStringRef();
      add_value(torch::jit::peek(stack, i, count));
    }
    if (tensors_.empty() || group_.empty()) usable_ = false;
    if (usable_) add_settings();
  }

  bool usable() const { return usable_; }
  const std::string& bytes() const { return bytes_; }
  const std::string& group() const { return group_; }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  c10::Device device() const { return tensors_.front().device(); }

 private:
  void add(int64_t number) {
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }
  void add(std::string_view text) {
    add(static_cast<int64_t>(text.size()));
    bytes_.append(text);
  }

  void add_value(const c10::IValue& value) {
    if (value.isNone()) {
      bytes_.push_back('n');
    } else if (value.isTensor()) {
      add_tensor(value.toTensor());
    } else if (value.isInt()) {
      bytes_.push_back('i'), add(value.toInt());
    } else if (value.isBool()) {
      bytes_.push_back(value.toBool() ? 't' : 'f');
    } else if (value.isDouble()) {
      int64_t bits = 0;
      const double number = value.toDouble();
      std::memcpy(&bits, &number, sizeof(bits));
      bytes_.push_back('d'), add(bits);
    } else if (value.isString()) {
      bytes_.push_back('s'), add(value.toStringRef());
    } else if (value.isList()) {
      bytes_.push_back('l'), add(static_cast<int64_t>(value.toListRef().size()));
      for (const c10::IValue& element : value.toListRef()) add_value(element);
    } else {
      usable_ = false;
    }
  }

  void add_tensor(const at::Tensor& tensor) {
    bytes_.push_back('x');
    if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.has_storage() ||
        tensor.is_conj() || tensor.is_neg() || tensor._is_zerotensor() ||
        tensor.key_set().has(c10::DispatchKey::Python) || tensor.is_nested() ||
        // The host may read them: layouts, masks, routings.
        c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
      usable_ = false;
      return;
    }
    const auto address = reinterpret_cast<intptr_t>(tensor.const_data_ptr());
    add(static_cast<int64_t>(tensor.scalar_type()));
    add(static_cast<int64_t>(tensor.device().type()) << 8 | tensor.device().index());
    add(tensor.dim());
    for (const int64_t size : tensor.sizes()) add(size);
    for (const int64_t stride : tensor.strides()) add(stride);
    add(address % 64);
    add(tensor.storage_offset() * static_cast<int64_t>(tensor.element_size()) % 64);
    add(tensor.storage().nbytes() > 0);
    // Tensors that share memory: how they lie to each other.
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (tensors_[i].storage().unsafeGetStorageImpl() != tensor.storage().unsafeGetStorageImpl())
        continue;
      bytes_.push_back('a'), add(static_cast<int64_t>(i));
      add(address - reinterpret_cast<intptr_t>(tensors_[i].const_data_ptr()));
      break;
    }
    tensors_.push_back(tensor);
  }

  // Settings outside of the call that kernels, or the choice among them, depend on.
  void add_settings() {
    const auto& context = at::globalContext();
    add(context.userEnabledFlashSDP() | context.userEnabledMemEfficientSDP() << 1 |
        context.userEnabledMathSDP() << 2 | context.userEnabledCuDNNSDP() << 3 |
        context.deterministicAlgorithms() << 4);
    const auto type = device().type();
    const bool cast =
        at::autocast::is_autocast_available(type) && at::autocast::is_autocast_enabled(type);
    add(cast ? static_cast<int64_t>(at::autocast::get_autocast_dtype(type)) : -1);
    for (const char* name : {"SYMM_CP_WAY", "SYMM_CP_ATTENTION"}) {
      const char* value = std::getenv(name);
      add(std::string_view(value == nullptr ? "" : value));
    }
  }

  bool usable_ = true;
  std::string bytes_, group_;
  std::vector<at::Tensor> tensors_;
};

// --- recording -----------------------------------------------------------------------------------

const char* address_of(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

class PlanRecording final : public Recording {
 public:
  explicit PlanRecording(const Key& key) {
    plan_.device = key.device();
    for (const at::Tensor& tensor : key.tensors()) add_value(tensor);
    inputs_ = values_.size();
  }

  void launch(LaunchStep step, uint32_t epoch, const std::vector<const void*>& operands) override {
    around_ = {step.memory, address_of(step.memory) + step.layout.slot_offset(epoch),
               step.layout.slot_bytes};
    for (const void* operand : operands) step.operands.push_back(place_of(operand));
    plan_.steps.emplace_back(std::move(step));
  }

  void commands(const StreamCommand* first, int count) override {
    plan_.steps.emplace_back(CommandStep{{first, first + count}});
  }

  int kernel() override {
    plan_.steps.emplace_back(KernelStep{{}, /*launched=*/true});
    const auto number = static_cast<int>(plan_.steps.size()) - 1;
    around_kernels_[number] = around_;
    return number;
  }

  void end_launch() override {
    plan_.steps.emplace_back(EndStep{});
    around_ = {};
  }

  void op(int kernel, const c10::OperatorHandle& op, const Stack& arguments,
          const std::vector<at::Tensor>& results) override {
    const c10::FunctionSchema& schema = op.schema();
    if (schema.name() == "aten::_local_scalar_dense") return refuse("it reads a number");
    if (draws_numbers(schema, arguments)) return refuse(schema.name() + " draws random numbers");
    const Within kernel_of_launch(*this, kernel);
    const bool fresh = std::any_of(results.begin(), results.end(), [&](const at::Tensor& result) {
      return result.defined() && value_of(result) == kNoValue;
    });
    if (!fresh && !schema.is_mutable()) return;  // its results are views
    what_ = schema.name();
    OpStep step{op, {}, {}};
    for (const c10::IValue& argument : arguments) step.arguments.push_back(given(argument));
    for (const at::Tensor& result : results) step.results.push_back(add_value(result));
    steps_of(kernel).emplace_back(std::move(step));
  }

  void python(int kernel, PythonStep step, const std::vector<at::Tensor>& arguments,
              const std::vector<at::Tensor>& results) override {
    const Within kernel_of_launch(*this, kernel);
    what_ = "a function of Python";
    for (const at::Tensor& argument : arguments) step.arguments.push_back(view_of(argument));
    for (const at::Tensor& result : results) step.results.push_back(add_value(result));
    steps_of(kernel).emplace_back(std::move(step));
  }

  void ask(std::function<bool()> may_run) override { plan_.may_run.push_back(std::move(may_run)); }
  void refuse(const std::string& reason) override {
    if (refusal_.empty()) refusal_ = reason;
  }

  // The plan of the call that ended with these results; null where it was refused.
  std::shared_ptr<const Plan> end(const std::vector<c10::IValue>& results,
                                  std::weak_ptr<Group> group) {
    what_ = "the result";
    bool launches = false;
    for (const Step& step : plan_.steps) launches |= std::holds_alternative<LaunchStep>(step);
    if (!launches) refuse("it launched nothing");
    for (const c10::IValue& result : results) {
      plan_.results.push_back(given(result));
      for (const View& view : plan_.results.back().tensors)
        if (view.place.value < static_cast<int>(inputs_)) refuse("it returns memory of its caller");
    }
    plan_.values = values_.size();
    plan_.group = std::move(group);
    return refusal_.empty() ? std::make_shared<const Plan>(std::move(plan_)) : nullptr;
  }
  const std::string& refusal() const { return refusal_; }

 private:
  // The workspace of the launch that is under way, and this rank's slot in it.
  struct Around {
    at::Tensor memory;
    const char* slot = nullptr;
    int64_t bytes = 0;
  };

  // In its scope the launch of a kernel counts: streams may carry it out later.
  class Within {
   public:
    Within(PlanRecording& recording, int kernel)
        : recording_(recording), before_(recording.around_) {
      if (kernel >= 0) recording.around_ = recording.around_kernels_[kernel];
    }
    ~Within() { recording_.around_ = before_; }
    Within(const Within&) = delete;
    Within& operator=(const Within&) = delete;

   private:
    PlanRecording& recording_;
    Around before_;
  };

  std::vector<std::variant<OpStep, PythonStep>>& steps_of(int kernel) {
    if (kernel >= 0) return std::get<KernelStep>(plan_.steps[kernel]).steps;
    plan_.steps.emplace_back(KernelStep{});
    return std::get<KernelStep>(plan_.steps.back()).steps;
  }

  static bool draws_numbers(const c10::FunctionSchema& schema, const Stack& arguments) {
    for (size_t i = 0; i < arguments.size(); ++i)
      if (schema.arguments()[i].name() == "dropout_p" && arguments[i].isDouble())
        return arguments[i].toDouble() > 0;
    const std::string& name = schema.name();
    return name.find("rand") != std::string::npos || name.find("dropout") != std::string::npos ||
           name.find("bernoulli") != std::string::npos;
  }

  // Returns the number of a value if the tensor's memory is not one yet.
  int add_value(const at::Tensor& tensor) {
    if (!tensor.defined() || value_of(tensor) != kNoValue) return kNoValue;
    values_.push_back(tensor);
    return static_cast<int>(values_.size()) - 1;
  }

  int value_of(const at::Tensor& tensor) const {
    if (!tensor.has_storage()) return kNoValue;
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    const at::Tensor& memory = around_.memory;
    if (memory.defined() && memory.storage().unsafeGetStorageImpl() == storage) return kSlot;
    for (size_t i = 0; i < values_.size(); ++i)
      if (values_[i].storage().unsafeGetStorageImpl() == storage) return static_cast<int>(i);
    return kNoValue;
  }

  Place in_slot(const char* address) {
    const int64_t offset = address - around_.slot;
    if (offset < 0 || offset > around_.bytes) refuse("a kernel uses memory around its slot");
    return {kSlot, offset};
  }

  // The place of an operand; of null, none.
  Place place_of(const void* operand) {
    const auto* address = static_cast<const char*>(operand);
    if (address == nullptr) return {};
    for (size_t i = 0; i < values_.size(); ++i) {
      const c10::Storage& storage = values_[i].storage();
      const auto* begin = static_cast<const char*>(storage.data());
      if (begin != nullptr && address >= begin && address < begin + storage.nbytes())
        return {static_cast<int>(i), address - address_of(values_[i])};
    }
    refuse("an operand lies in memory that is not the call's");
    return {};
  }

  View view_of(const at::Tensor& tensor) {
    const int value = value_of(tensor);
    if (value == kNoValue || tensor.is_conj() || tensor.is_neg()) {
      refuse(what_ + " uses memory that is not the call's");
      return {};
    }
    const char* address = address_of(tensor);
    View view{
        {}, at::DimVector(tensor.sizes()), at::DimVector(tensor.strides()), tensor.scalar_type()};
    if (value == kSlot)
      view.place = in_slot(address);
    else if (tensor.numel() == 0)  // without an address
      view.place = {value, 0};
    else
      view.place = {value, address - address_of(values_[value])};
    return view;
  }

  Given given(const c10::IValue& value) {
    if (value.isTensor()) {
      if (!value.toTensor().defined()) return {c10::IValue(at::Tensor()), {}, false};
      const at::Tensor& tensor = value.toTensor();
      // A number that Python has passed for a tensor.
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return {value, {}, false};
      return {{}, {view_of(tensor)}, false};
    }
    if (!value.isTensorList()) {
      if (value.isList())
        for (const c10::IValue& element : value.toListRef())
          if (element.isTensor()) refuse("an op takes a list of tensors of which some are missing");
      return {value, {}, false};
    }
    Given list{{}, {}, true};
    for (const at::Tensor& tensor : value.toTensorVector()) list.tensors.push_back(view_of(tensor));
    return list;
  }

  Plan plan_;
  std::vector<at::Tensor> values_;  // kept, so that no address is used again meanwhile
  size_t inputs_ = 0;
  Around around_;
  std::map<int, Around> around_kernels_;
  std::string what_, refusal_;
};

// The recording that the next kernel in Python of this thread fills.
thread_local Recording* wanted = nullptr;

// --- running -------------------------------------------------------------------------------------

// Where a call's slot lies.
struct Slot {
  at::Tensor memory;
  int64_t begin = 0;  // in bytes
};

// The values of a call. Streams of a simulated device use it when the call has returned.
struct Frame {
  std::vector<at::Tensor> values;
  std::exception_ptr error;
};

// The current stream of a CUDA device, which torch's library for CUDA gives to code that was not
// compiled with it; null where there is none.
using CurrentStream = int32_t (*)(int32_t device, void** stream);
CurrentStream current_cuda_stream() {
  static const auto function = []() -> CurrentStream {
    void* const library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) return nullptr;
    return reinterpret_cast<CurrentStream>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  return function;
}

std::optional<void*> current_stream(const driver::Api& api, c10::Device device) {
  if (api.hosted_stream != nullptr) return api.hosted_stream(device.index());
  void* stream = nullptr;
  if (device.type() != c10::kCUDA || current_cuda_stream() == nullptr) return {};
  if (current_cuda_stream()(device.index(), &stream) != 0) return {};
  return stream;
}

bool is_capturing(const driver::Api& api, void* stream) {
  if (api.capture_info == nullptr) return true;
  int status = 0;
  uint64_t id = 0;
  return api.capture_info(stream, &status, &id, nullptr, nullptr, nullptr) != 0 || status != 0;
}

class Run {
 public:
  Run(const Plan& plan, std::vector<at::Tensor> inputs, std::shared_ptr<Group> group)
      : plan_(plan), group_(std::move(group)), frame_(std::make_shared<Frame>()) {
    frame_->values = std::move(inputs);
    frame_->values.resize(plan.values);
  }

  void run() {
    try {
      for (const Step& step : plan_.steps) std::visit([&](const auto& s) { carry_out(s); }, step);
    } catch (const std::exception& error) {
      if (launch_ == nullptr) throw;
      launch_->fail(frame_->values, error.what());
      if (dynamic_cast<const driver::Error*>(&error) != nullptr)
        TORCH_CHECK(false, "symm_cp: ", error.what());
      throw;
    }
  }

  c10::IValue result(const Given& given) const { return value_of(given, *frame_, nullptr); }

 private:
  static at::Tensor tensor_of(const View& view, const Frame& frame, const Slot* slot) {
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

  static c10::IValue value_of(const Given& given, const Frame& frame, const Slot* slot) {
    if (given.is_list) {
      std::vector<at::Tensor> tensors;
      for (const View& view : given.tensors) tensors.push_back(tensor_of(view, frame, slot));
      return tensors;
    }
    return given.tensors.empty() ? given.constant : tensor_of(given.tensors[0], frame, slot);
  }

  static void keep(const std::vector<int>& numbers, size_t index, const at::Tensor& result,
                   Frame& frame) {
    if (index < numbers.size() && numbers[index] != kNoValue) frame.values[numbers[index]] = result;
  }

  static void carry_out(const OpStep& step, Frame& frame, const Slot* slot) {
    Stack stack;
    stack.reserve(step.arguments.size());
    for (const Given& argument : step.arguments) stack.push_back(value_of(argument, frame, slot));
    step.op.callBoxed(stack);
    size_t index = 0;
    for (const c10::IValue& result : stack) {
      if (result.isTensor()) keep(step.results, index++, result.toTensor(), frame);
      if (result.isTensorList())
        for (const at::Tensor& tensor : result.toTensorVector())
          keep(step.results, index++, tensor, frame);
    }
  }

  static void carry_out(const PythonStep& step, Frame& frame, const Slot* slot) {
    std::vector<at::Tensor> arguments;
    for (const View& view : step.arguments) arguments.push_back(tensor_of(view, frame, slot));
    const auto results = step.function(arguments);
    for (size_t i = 0; i < results.size(); ++i) keep(step.results, i, results[i], frame);
  }

  static void carry_out_all(const KernelStep& kernel, Frame& frame, const Slot* slot) {
    for (const auto& step : kernel.steps)
      std::visit([&](const auto& s) { carry_out(s, frame, slot); }, step);
  }

  void carry_out(const LaunchStep& step) {
    lock_.emplace(*group_, kSync);
    epoch_ = step.streams->next_epoch();
    slot_ = {step.memory, step.layout.slot_offset(epoch_)};
    std::copy(step.lanes, step.lanes + kLanes, lanes_);
    lanes_[0] = *current_stream(step.streams->api(), plan_.device);
    operands_.clear();
    for (const Place& place : step.operands) operands_.push_back(pointer(place));
    launch_ = &step;
  }

  void* pointer(const Place& place) const {
    if (place.value == kNoValue) return nullptr;
    return static_cast<char*>(frame_->values[place.value].mutable_data_ptr()) + place.offset;
  }

  void carry_out(const CommandStep& step) {
    launch_->streams->run(step.commands.data(), static_cast<int>(step.commands.size()),
                          operands_.data(), lanes_, epoch_, /*capturing=*/false,
                          launch_->call_name.c_str());
  }

  void carry_out(const KernelStep& step) {
    const bool hosted = launch_ != nullptr && launch_->streams->api().hosted_launch != nullptr;
    if (!step.launched || !hosted) return carry_out_all(step, *frame_, &slot_);
    // A simulated stream carries it out later, in another thread.
    auto* const later = new std::function<void()>(
        [&step, frame = frame_, slot = slot_, state = at::ThreadLocalState()] {
          if (frame->error != nullptr) return;
          const at::ThreadLocalStateGuard guard(state);
          try {
            carry_out_all(step, *frame, &slot);
          } catch (const std::exception&) {
            frame->error = std::current_exception();
          }
        });
    launch_->streams->api().hosted_launch(
        lanes_[0],
        [](void* function) {
          const std::unique_ptr<std::function<void()>> owned(
              static_cast<std::function<void()>*>(function));
          (*owned)();
        },
        later);
  }

  void carry_out(const EndStep&) {
    const driver::Api& api = launch_->streams->api();
    if (api.hosted_end != nullptr) {
      const WithoutGil waiting;
      api.hosted_end(lanes_[0]);
    }
    if (frame_->error != nullptr) std::rethrow_exception(frame_->error);
    launch_ = nullptr;
    lock_.reset();
  }

  const Plan& plan_;
  std::shared_ptr<Group> group_;
  std::shared_ptr<Frame> frame_;
  std::optional<CallLock> lock_;
  const LaunchStep* launch_ = nullptr;  // that is under way
  uint32_t epoch_ = 0;
  Slot slot_;
  void* lanes_[kLanes] = {};
  std::vector<void*> operands_;
};

bool serves_now(const Plan& plan) {
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

bool carry_out(const Plan& plan, const Key& key, const c10::OperatorHandle& op, Stack* stack) {
  auto group = plan.group.lock();
  if (group == nullptr) return false;
  const c10::OptionalDeviceGuard device(plan.device.is_cpu() ? std::nullopt
                                                             : std::optional(plan.device));
  if (!serves_now(plan)) return false;
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& tensor : key.tensors()) {
    const auto shares = [&](const at::Tensor& other) {
      return other.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl();
    };
    if (std::none_of(inputs.begin(), inputs.end(), shares)) inputs.push_back(tensor);
  }
  Run run(plan, std::move(inputs), std::move(group));
  run.run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (const Given& result : plan.results) stack->push_back(run.result(result));
  ++State::get().runs;
  return true;
}

// A kernel in Python of an op: see symm_cp/ops/registration.py.
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
  // The call itself has made a workspace, or another thread has changed a setting.
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
      dropped;  // outside of the lock: Python's may be waited for
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    if (state.known.size() >= kMostKeys && state.known.count(key.bytes()) == 0)
      dropped.swap(state.known);
    Known& known = state.known[key.bytes()];
    plan = known.plan;
    recorded = plan == nullptr && !known.refused && known.calls++ >= record_at;
  }
  if (plan != nullptr) return carry_out(*plan, key, op, stack);
  if (!recorded || !overload_of(op, "recorded")) return false;
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

// The recording that Python's kernel fills, in the thread that calls it; null where it is not
// recorded.
void* symm_cp_plan_recording() { return symm_cp::stream_plans::wanted; }

// Drops all plans: something has changed on which they depend.
void symm_cp_plans_drop() {
  auto& state = symm_cp::stream_plans::State::get();
  std::unordered_map<std::string, symm_cp::stream_plans::Known> dropped;
  std::lock_guard<std::mutex> lock(state.mutex);
  ++state.drops;
  dropped.swap(state.known);
}

// Has calls recorded that come for the number-th time after the first; below 0: none, nor run.
void symm_cp_plans_record_at(int number) {
  symm_cp::stream_plans::State::get().record_at = number;
  symm_cp_plans_drop();
}

// How many calls were carried out by plans since the last time.
int64_t symm_cp_plans_run() { return symm_cp::stream_plans::State::get().runs.exchange(0); }

// Why the last call that could not be recorded was not.
const char* symm_cp_plans_refusal() {
  thread_local std::string text;
  auto& state = symm_cp::stream_plans::State::get();
  std::lock_guard<std::mutex> lock(state.mutex);
  text = state.last_refusal;
  return text.c_str();
}

// Has a plan, or Python's kernel, serve an op on devices with this dispatch key, up to the undoing.
// `or_torchs`: Python's is the one that calls torch's for groups that ours do not serve. Null on
// failure.
void* symm_cp_plan_op(const char* name, const char* key, int or_torchs) {
  using namespace symm_cp::stream_plans;
  struct : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;  // of a kernel that is there already
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
