// Records a call and makes its plan (plan.h).
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "channel/group.h"
#include "ops/kernels.h"
#include "plan/exchange_op.h"
#include "plan/key.h"
#include "plan/plan.h"

namespace symm_cp::plans {

inline const char* address_of(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

class PlanRecording final : public Recording {
 public:
  explicit PlanRecording(const Key& key) : key_(key), given_(key.tensors()) {
    plan_.device = key.device();
    for (const at::Tensor& tensor : given_) add_value(tensor);
    inputs_ = values_.size();
    for (size_t i = 0; i < given_.size(); ++i)
      if (key.is_free(i)) free_values_.push_back(value_of(given_[i]));
    unused_ = (uint64_t{1} << key.free_numbers().size()) - 1;
  }

  void launch(LaunchStep step, uint32_t epoch, const std::vector<const void*>& operands) override {
    around_ = {step.memory, address_of(step.memory) + step.layout.slot_offset(epoch),
               step.layout.slot_bytes};
    for (const void* operand : operands) step.operands.push_back(place_of(operand));
    plan_.steps.emplace_back(std::move(step));
  }

  void commands(const Command* first, int count) override {
    plan_.steps.emplace_back(CommandStep{{first, first + count}});
  }

  int kernel(int lane) override {
    plan_.steps.emplace_back(KernelStep{{}, lane});
    const auto number = static_cast<int>(plan_.steps.size()) - 1;
    around_kernels_[number] = around_;
    return number;
  }

  void end_launch() override {
    plan_.steps.emplace_back(EndStep{});
    around_ = {};
  }

  void before_op() override { before_op_ = Group::made_by_this_thread(); }

  void op(int kernel, const c10::OperatorHandle& op, const Stack& arguments,
          const std::vector<at::Tensor>& results) override {
    const c10::FunctionSchema& schema = op.schema();
    calls_ += Group::made_by_this_thread() - before_op_;
    if (is_exchange(op)) return exchange(op, arguments);
    if (reads_values(op, arguments) && !reads_key(arguments))
      return refuse(schema.name() + " reads values on the host");
    if (draws_numbers(op, arguments)) return refuse(schema.name() + " draws random numbers");
    const Within kernel_of_launch(*this, kernel);
    const bool fresh = std::any_of(results.begin(), results.end(), [&](const at::Tensor& result) {
      return result.defined() && value_of(result) == kNoValue;
    });
    // Only makes views: nothing to record.
    const bool waits = schema.name() == "_c10d_functional::wait_tensor";
    if (!fresh && !waits && !schema.is_mutable() && !schema.returns().empty()) return;
    what_ = schema.name();
    if (makes_result(op, results)) {
      const at::Tensor& made = results[0];
      steps_of(kernel).emplace_back(
          NewStep{at::DimVector(made.sizes()), made.scalar_type(), {add_value(made)}, {}});
      return;
    }
    OpStep step{op, {}, {}, {}};
    step.is_mm = schema.name() == "aten::mm" && schema.overload_name() == "out";
    for (size_t i = 0; i < arguments.size(); ++i)
      step.arguments.push_back(given(arguments[i], &schema.arguments()[i].name()));
    bool varies = false;  // maybe the sizes of its results
    for_each_view(step, [&](const View& view) { varies |= view.varies(); });
    for (const at::Tensor& result : results) {
      step.results.push_back(add_value(result));
      if (varies && step.results.back() != kNoValue) values_.back().varying = sizes_of(result);
    }
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

  void constant(const at::Tensor& tensor) override {
    const int value = add_value(tensor);
    if (value != kNoValue) plan_.constants.emplace_back(value, tensor);
  }

  void counts() override { plan_.counts = true; }

  void ask(std::function<bool()> may_run) override { plan_.may_run.push_back(std::move(may_run)); }
  void refuse(const std::string& reason) override {
    if (refusal_.empty()) refusal_ = reason;
  }

  // Returns the plan of the call, which ended with these results; null if it was refused.
  std::shared_ptr<const Plan> end(const std::vector<c10::IValue>& results) {
    what_ = "the result";
    const bool launches = std::any_of(plan_.steps.begin(), plan_.steps.end(), [](const Step& step) {
      return std::holds_alternative<LaunchStep>(step);
    });
    if (!launches) {
      plan_.calls = calls_;
      if (!plan_.device.is_cpu()) refuse("it launched nothing");
    }
    if (Group::made_by_this_thread() - first_call_ != calls_)
      refusal_ = "it exchanges data by other calls than ops";
    if (unused_ != 0) refuse("no op takes a free number");
    for (const c10::IValue& result : results) {
      const auto same = [&](const at::Tensor& tensor) {
        return result.isTensor() && result.toTensor().is_same(tensor);
      };
      const auto caller = std::find_if(given_.begin(), given_.end(), same);
      if (caller != given_.end()) {
        plan_.results.emplace_back(static_cast<size_t>(caller - given_.begin()));
        continue;
      }
      StepArgument made = given(result);
      for (const View& view : made.tensors)
        if (view.place.value < static_cast<int>(inputs_)) refuse("it returns memory of its caller");
      plan_.results.emplace_back(std::move(made));
    }
    plan_.values = values_.size();
    find_last_uses();
    return refusal_.empty() ? std::make_shared<const Plan>(std::move(plan_)) : nullptr;
  }
  const std::string& refusal() const { return refusal_; }

 private:
  // The workspace of the launch under way, and this rank's slot in it.
  struct Around {
    at::Tensor memory;
    const char* slot = nullptr;
    int64_t bytes = 0;
  };

  // Memory that the call uses. Holds no strong reference: a recorded call takes no more memory than
  // others.
  struct Value {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // keeps its address from being reused
    const c10::StorageImpl* identity;
    const char* address;  // of the first tensor in it
    const char* begin;
    size_t bytes;
    std::optional<View> varying = {};  // a result whose sizes may follow a free argument
  };

  // Within its scope the kernel's launch replaces the current one, since streams may run the kernel
  // later.
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

  // Finds where each value is used last: memory must be freed as early as when Python makes the
  // call. Freed memory is taken again by the stream that it was made on, so a value that another
  // lane of a launch uses lives until the launch ends: then the caller's stream has waited for it.
  void find_last_uses() {
    std::vector<std::vector<int>*> last(values_.size(), nullptr);
    const auto use = [&](int value, std::vector<int>& here) {
      if (value >= static_cast<int>(inputs_)) last[value] = &here;
    };
    const std::vector<ValuePlace>* operands = nullptr;
    std::vector<int> made_on(values_.size(), 0);  // lanes
    std::vector<int> shared;                      // used by another lane of the launch
    for (Step& step : plan_.steps) {
      if (auto* exchange = std::get_if<ExchangeStep>(&step)) {
        for (const View& view : exchange->given) use(view.place.value, exchange->last);
        for (const View& view : exchange->taken) use(view.place.value, exchange->last);
      }
      if (const auto* launch = std::get_if<LaunchStep>(&step)) operands = &launch->operands;
      if (auto* end = std::get_if<EndStep>(&step)) {
        for (const ValuePlace& place : *operands) use(place.value, end->last);
        for (const int value : std::exchange(shared, {})) use(value, end->last);
      }
      if (auto* kernel = std::get_if<KernelStep>(&step)) {
        const int lane = kernel->lane.value_or(0);
        for (auto& inner : kernel->steps)
          std::visit(
              [&](auto& s) {
                for_each_view(s, [&](const View& view) {
                  const int value = view.place.value;
                  use(value, s.last);
                  if (value >= 0 && made_on[value] != lane) shared.push_back(value);
                });
                for (const int value : s.results) {
                  use(value, s.last);
                  if (value >= 0) made_on[value] = lane;
                }
              },
              inner);
      }
    }
    for (const auto& result : plan_.results)
      if (const auto* made = std::get_if<StepArgument>(&result))
        for (const View& view : made->tensors)
          if (view.place.value >= 0) last[view.place.value] = nullptr;
    for (const auto& [value, tensor] : plan_.constants) last[value] = nullptr;
    for (size_t value = 0; value < last.size(); ++value)
      if (last[value] != nullptr) last[value]->push_back(static_cast<int>(value));
  }

  template <class Function>
  static void for_each_view(const OpStep& step, const Function& function) {
    for (const StepArgument& argument : step.arguments)
      std::for_each(argument.tensors.begin(), argument.tensors.end(), function);
  }
  template <class Function>
  static void for_each_view(const NewStep&, const Function&) {}
  template <class Function>
  static void for_each_view(const PythonStep& step, const Function& function) {
    std::for_each(step.arguments.begin(), step.arguments.end(), function);
  }

  std::vector<std::variant<OpStep, NewStep, PythonStep>>& steps_of(int kernel) {
    if (kernel >= 0) return std::get<KernelStep>(plan_.steps[kernel]).steps;
    auto* const last = plan_.steps.empty() ? nullptr : std::get_if<KernelStep>(&plan_.steps.back());
    if (last != nullptr && !last->lane) return last->steps;
    plan_.steps.emplace_back(KernelStep{});
    return std::get<KernelStep>(plan_.steps.back()).steps;
  }

  // Records a call of an op that exchanges tensors.
  void exchange(const c10::OperatorHandle& op, const Stack& arguments) {
    what_ = "an exchange";
    ExchangeStep step;
    step.prepared = prepare(op, arguments);
    const auto view = [&](const at::Tensor& tensor) {
      View made = view_of(tensor);
      if (made.varies()) refuse("an exchange of a tensor whose size may vary");
      return made;
    };
    const auto views = [&](const c10::IValue& value, std::vector<View>& to) {
      if (value.isTensor()) return to.push_back(view(value.toTensor()));
      for (const at::Tensor& tensor : value.toTensorVector()) to.push_back(view(tensor));
    };
    views(arguments[0], step.given);
    views(arguments[1], step.taken);
    name(step);
    plan_.steps.emplace_back(std::move(step));
    ++plan_.exchanges;
  }

  // Finds a free number in the name that ranks compare: "first_query=7".
  void name(ExchangeStep& step) const {
    const std::string& whole = step.prepared->exchange.call_name;
    const auto& numbers = key_.free_numbers();
    for (size_t i = 0; i < numbers.size(); ++i) {
      const std::string begin = *numbers[i].name + '=', value = std::to_string(numbers[i].value);
      const size_t at = whole.find(begin + value);
      if (at == std::string::npos) continue;
      step.free_number = i;
      step.before = whole.substr(0, at + begin.size());
      step.after = whole.substr(at + begin.size() + value.size());
    }
  }

  // Whether an op only makes a contiguous tensor on CPU.
  static bool makes_result(const c10::OperatorHandle& op, const std::vector<at::Tensor>& results) {
    if (!kernels::serves_cpu()) return false;  // CPU tensors stand for tensors of another device
    const std::string& name = op.schema().name();
    if (name != "aten::new_empty" && name != "aten::empty" && name != "symm_cp::new_result")
      return false;
    return results.size() == 1 && results[0].is_cpu() && results[0].is_contiguous() &&
           results[0].storage_offset() == 0;
  }

  // Whether the host sees values, or sizes that depend on values: a replay would use those of the
  // recorded call. resolve_conj and resolve_neg are all that is seen of numpy() and tolist().
  static bool reads_values(const c10::OperatorHandle& op, const Stack& arguments) {
    const std::string& name = op.schema().name();
    const bool is_copy = name == "aten::_to_copy" || name == "aten::copy_";
    const auto on_host = [](const c10::IValue& value) {
      return value.isDevice() ? value.toDevice().is_cpu()
                              : value.isTensor() && value.toTensor().is_cpu();
    };
    const auto on_device = [&](const c10::IValue& value) {
      return value.isTensor() && value.toTensor().defined() && !on_host(value);
    };
    return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output) ||
           name == "aten::resolve_conj" || name == "aten::resolve_neg" ||
           (is_copy && std::any_of(arguments.begin(), arguments.end(), on_host) &&
            std::any_of(arguments.begin(), arguments.end(), on_device));
  }

  // Whether an op reads a tensor of integers whose values are part of the key.
  bool reads_key(const Stack& arguments) const {
    return plan_.device.is_cpu() && arguments.size() == 1 && arguments[0].isTensor() &&
           std::any_of(given_.begin(), given_.end(), [&](const at::Tensor& given) {
             return given.is_same(arguments[0].toTensor()) &&
                    c10::isIntegralType(given.scalar_type(), /*includeBool=*/true);
           });
  }

  static bool draws_numbers(const c10::OperatorHandle& op, const Stack& arguments) {
    for (size_t i = 0; i < arguments.size(); ++i)
      if (op.schema().arguments()[i].name() == "dropout_p" && arguments[i].isDouble())
        return arguments[i].toDouble() > 0;
    return op.hasTag(at::Tag::nondeterministic_seeded);
  }

  // Adds the tensor's memory as a value and returns the value's number; returns kNoValue if the
  // memory is a value already.
  int add_value(const at::Tensor& tensor) {
    if (!tensor.defined() || value_of(tensor) != kNoValue) return kNoValue;
    const c10::Storage& storage = tensor.storage();
    values_.push_back({storage.getWeakStorageImpl(), storage.unsafeGetStorageImpl(),
                       address_of(tensor), static_cast<const char*>(storage.data()),
                       storage.nbytes()});
    return static_cast<int>(values_.size()) - 1;
  }

  int value_of(const at::Tensor& tensor) const {
    if (!tensor.has_storage()) return kNoValue;
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    const at::Tensor& memory = around_.memory;
    if (memory.defined() && memory.storage().unsafeGetStorageImpl() == storage) return kSlot;
    for (size_t i = 0; i < values_.size(); ++i)
      if (values_[i].identity == storage) return static_cast<int>(i);
    return kNoValue;
  }

  ValuePlace in_slot(const char* address) {
    const int64_t offset = address - around_.slot;
    if (offset < 0 || offset > around_.bytes) refuse("a kernel uses memory around its slot");
    return {kSlot, offset};
  }

  // Returns the place of an operand; an empty place for null.
  ValuePlace place_of(const void* operand) {
    const auto* address = static_cast<const char*>(operand);
    if (address == nullptr) return {};
    for (size_t i = 0; i < values_.size(); ++i) {
      const Value& value = values_[i];
      if (value.storage.expired() || value.begin == nullptr) continue;
      if (address >= value.begin && address < value.begin + value.bytes)
        return {static_cast<int>(i), address - value.address};
    }
    refuse("an operand lies in memory that is not the call's");
    return {};
  }

  static View sizes_of(const at::Tensor& tensor) {
    return {
        {}, at::DimVector(tensor.sizes()), at::DimVector(tensor.strides()), tensor.scalar_type()};
  }

  View view_of(const at::Tensor& tensor) {
    View view = sizes_of(tensor);
    for (size_t i = 0; i < given_.size(); ++i)
      if (key_.is_free(i) && given_[i].is_same(tensor)) view.free = i;
    if (view.free) return view;
    const int value = value_of(tensor);
    if (std::find(free_values_.begin(), free_values_.end(), value) != free_values_.end())
      refuse(what_ + " uses a part of a free argument");
    if (value == kNoValue || tensor.is_conj() || tensor.is_neg()) {
      refuse(what_ + " uses memory that is not the call's");
      return {};
    }
    const char* address = address_of(tensor);
    if (value == kSlot)
      view.place = in_slot(address);
    else if (tensor.numel() == 0)  // an empty tensor has no address
      view.place = {value, 0};
    else
      view.place = {value, address - values_[value].address};
    if (const auto* varying = value == kSlot ? nullptr : &values_[value].varying;
        varying && *varying) {
      view.whole = true;
      if (view.place.offset != 0 || view.sizes != (*varying)->sizes ||
          view.strides != (*varying)->strides || view.dtype != (*varying)->dtype)
        refuse(what_ + " uses a part of a tensor whose size may vary");
    }
    return view;
  }

  // A free number is known by the name of the argument.
  StepArgument given(const c10::IValue& value, const std::string* argument = nullptr) {
    if (value.isTensor()) {
      if (!value.toTensor().defined()) return {c10::IValue(at::Tensor()), {}, false};
      const at::Tensor& tensor = value.toTensor();
      // A number that Python passed as a tensor.
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return {value, {}, false};
      return {{}, {view_of(tensor)}, false};
    }
    for (size_t i = 0; i < key_.free_numbers().size() && argument != nullptr; ++i) {
      const auto& [name, number] = key_.free_numbers()[i];
      if (*name != *argument || !value.isInt() || value.toInt() != number) continue;
      unused_ &= ~(uint64_t{1} << i);
      return {{}, {}, false, i};
    }
    if (!value.isTensorList()) {
      if (value.isList())
        for (const c10::IValue& element : value.toListRef())
          if (element.isTensor()) refuse("an op takes a list with missing tensors");
      return {value, {}, false};
    }
    StepArgument list{{}, {}, true};
    for (const at::Tensor& tensor : value.toTensorVector()) list.tensors.push_back(view_of(tensor));
    return list;
  }

  const Key& key_;
  const Key::Tensors& given_;  // the caller's tensors
  std::vector<int> free_values_;
  uint64_t unused_ = 0;  // a bit for each free number
  // The calls of groups that this thread had made before, and those that recorded ops have made.
  int64_t first_call_ = Group::made_by_this_thread(), before_op_ = 0, calls_ = 0;
  Plan plan_;
  std::vector<Value> values_;
  size_t inputs_ = 0;
  Around around_;
  std::map<int, Around> around_kernels_;
  std::string what_, refusal_;
};

}  // namespace symm_cp::plans
