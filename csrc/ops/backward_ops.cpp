// Gradients that are ops: autograd's graph gets a node that saves arguments of the call and calls
// the backward op, which is an op like any other.
//
// The backward op's arguments are found by name:
//   grad, grad_*     the gradient of a result, in order; zeros if it is missing
//   grads            those of all results
//   some_grads       the same, but an empty tensor of bools for one that is missing
//   need_*, needed   whether a tensor that was given requires a gradient: one of them, or all
//   others           the arguments of the call
// It returns a tensor for each tensor that was given: its gradient, or an empty tensor of bools.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/gradients.h"

namespace symm_cp::gradients {

namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

enum class Source { kGrad, kGrads, kSomeGrads, kNeed, kNeeded, kArgument, kDefault };

struct Operand {
  Source source;
  size_t index = 0;  // of the gradient, the need or the call's argument
  c10::IValue otherwise;
};

struct BackwardOp {
  c10::OperatorHandle op;
  std::string name;  // of the node
  std::vector<Operand> operands;
};

bool begins_with(const std::string& text, const char* begin) {
  return text.compare(0, std::strlen(begin), begin) == 0;
}

BackwardOp backward_of(const c10::FunctionSchema& forward, const char* name) {
  BackwardOp made{handle_of(name), std::strstr(name, "::_") + std::strlen("::_"), {}};
  size_t grads = 0, needs = 0;
  for (const c10::Argument& argument : made.op.schema().arguments()) {
    const std::string& called = argument.name();
    const auto of_call = forward.argumentIndexWithName(called);
    Operand operand{Source::kDefault};
    if (called == "grads")
      operand = {Source::kGrads};
    else if (called == "some_grads")
      operand = {Source::kSomeGrads};
    else if (called == "needed")
      operand = {Source::kNeeded};
    else if (called == "grad" || begins_with(called, "grad_"))
      operand = {Source::kGrad, grads++};
    else if (begins_with(called, "need_"))
      operand = {Source::kNeed, needs++};
    else if (of_call)
      operand = {Source::kArgument, static_cast<size_t>(*of_call)};
    else
      operand.otherwise = argument.default_value().value_or(c10::IValue());
    made.operands.push_back(std::move(operand));
  }
  return made;
}

template <class Function>
void for_each_tensor(const c10::IValue& value, const Function& function) {
  if (value.isTensor() && value.toTensor().defined()) function(value.toTensor());
  if (value.isTensorList())
    for (const c10::IValue& tensor : value.toListRef()) function(tensor.toTensor());
}

struct BackwardNode : torch::autograd::Node {
  std::shared_ptr<const BackwardOp> backward;
  std::vector<c10::IValue> arguments;  // of the call; tensors are in `saved`
  std::vector<std::vector<SavedVariable>> saved;
  std::vector<bool> needed;

  std::string name() const override { return backward->name; }

  void save(std::vector<c10::IValue> of_call) {
    saved.resize(of_call.size());
    for (const Operand& operand : backward->operands) {
      if (operand.source != Source::kArgument) continue;
      for_each_tensor(of_call[operand.index], [&](const at::Tensor& tensor) {
        saved[operand.index].emplace_back(tensor, /*is_output=*/false);
      });
    }
    for (c10::IValue& value : of_call) {
      if (value.isTensorList()) value = c10::List<at::Tensor>();
      if (value.isTensor()) value = at::Tensor();
    }
    arguments = std::move(of_call);
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& tensors : saved)
      for (SavedVariable& tensor : tensors) tensor.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    // In the dtypes of the forward pass.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    Stack stack;
    for (const Operand& operand : backward->operands) stack.push_back(value_of(operand, grads));
    backward->op.callBoxed(stack);
    variable_list results;
    for (const c10::IValue& value : stack)
      for_each_tensor(value, [&](const at::Tensor& result) {
        const bool wanted = needed[results.size()] && result.scalar_type() != at::kBool;
        results.push_back(wanted ? result : at::Tensor());
      });
    return results;
  }

 private:
  c10::IValue value_of(const Operand& operand, const variable_list& grads) {
    const auto whole = [&](size_t i) {
      return grads[i].defined() ? grads[i] : input_metadata(i).zeros_like();
    };
    switch (operand.source) {
      case Source::kGrad: return whole(operand.index);
      case Source::kGrads:
      case Source::kSomeGrads: {
        c10::List<at::Tensor> all;
        for (size_t i = 0; i < grads.size(); ++i)
          all.push_back(operand.source == Source::kGrads || grads[i].defined()
                            ? whole(i)
                            : at::empty({0}, input_metadata(i).options().dtype(at::kBool)));
        return all;
      }
      case Source::kNeed: return static_cast<bool>(needed[operand.index]);
      case Source::kNeeded: {
        c10::List<bool> all;
        for (const bool each : needed) all.push_back(each);
        return all;
      }
      case Source::kArgument: {
        const c10::IValue& value = arguments[operand.index];
        if (!value.isTensor() && !value.isTensorList()) return value;
        c10::List<at::Tensor> tensors;
        for (const SavedVariable& tensor : saved[operand.index])
          tensors.push_back(tensor.unpack(getptr()));
        if (value.isTensorList()) return tensors;
        return tensors.get(0);
      }
      case Source::kDefault: return operand.otherwise;
    }
    return {};
  }
};

// The kernel of an op for calls that autograd may record.
class Recorded final : public c10::OperatorKernel {
 public:
  explicit Recorded(BackwardOp backward)
      : backward_(std::make_shared<const BackwardOp>(std::move(backward))) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    reporting_refusals(op, keys, *stack, kSync, [&] { record(op, keys, stack); });
  }

 private:
  void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    const auto given = torch::jit::last(*stack, op.schema().arguments().size());
    variable_list tensors;
    std::vector<bool> needed;
    bool any = false;
    for (const c10::IValue& value : given)
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        needed.push_back(needs_gradient(name_of(op), tensor));
        any |= needed.back();
        tensors.push_back(tensor);
      });
    const at::AutoDispatchBelowADInplaceOrView no_views;  // results may be modified in place
    if (!any) return redispatch(op, keys, stack);
    std::vector<c10::IValue> arguments(given.begin(), given.end());
    redispatch(op, keys, stack);
    const auto node = make_node<BackwardNode>();
    node->backward = backward_;
    node->needed = std::move(needed);
    node->set_next_edges(torch::autograd::collect_next_edges(tensors));
    node->save(std::move(arguments));
    for (const c10::IValue& value : torch::jit::last(*stack, op.schema().returns().size()))
      for_each_tensor(
          value, [&](const at::Tensor& result) { torch::autograd::set_history(result, node); });
  }

  std::shared_ptr<const BackwardOp> backward_;
};

}  // namespace

}  // namespace symm_cp::gradients

extern "C" {

// Makes the op `backward` the gradient of the op `name`, "symm_mem::f". Returns 0 on failure.
int symm_cp_backward_op(const char* name, const char* backward) {
  using namespace symm_cp::gradients;
  // Kernels live as long as the process.
  static auto* const library = new std::vector<std::unique_ptr<torch::Library>>;
  try {
    const c10::OperatorHandle op = handle_of(name);
    auto kernel = std::make_unique<Recorded>(backward_of(op.schema(), backward));
    auto made = std::make_unique<torch::Library>(
        torch::Library::IMPL, std::string(name, std::strstr(name, "::")),
        c10::parseDispatchKey("Autograd"), __FILE__, __LINE__);
    made->impl(name, torch::CppFunction::makeFromBoxedKernel(
                         c10::BoxedKernel::makeFromFunctor(std::move(kernel))));
    library->push_back(std::move(made));
    return 1;
  } catch (const std::exception&) {
    return 0;
  }
}

}  // extern "C"
