// Gradients that are ops: autograd's graph gets a node that saves what the backward op takes of the
// call, and calls that op, which is an op like any other.
//
// The backward op's arguments are found by name:
//   grad, grad_*     the gradient of a result, in order; zeros if it is missing, or None if the
//                    argument is optional
//   grads            those of all results
//   some_grads       the same, but an empty tensor of bools for one that is missing
//   need_*, *_grad   whether an argument that was given, or one in a list, requires a gradient
//   needed           whether each tensor that was given does, in a list
//   others           the arguments and results of the call
// It returns a tensor for each tensor that was given, or results named after arguments, a tensor or
// a list as these: the gradient, or an empty tensor of bools. Gradients that are not needed are
// dropped.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <strings.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/gradients.h"

namespace symm_cp::gradients {

namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

enum class Source { kGrad, kGradOrNone, kGrads, kSomeGrads, kNeed, kNeeded, kArgument, kResult };

struct Operand {
  std::optional<Source> source;
  size_t index = 0;       // of the gradient, the argument or the result
  c10::IValue otherwise;  // without a source
};

struct BackwardOp {
  c10::OperatorHandle op;
  std::string node_name;
  std::string once;  // not empty: gradients cannot be differentiated, of the op of this name
  int channel = kSync;
  std::vector<Operand> operands;
  std::vector<size_t> of;  // for each result its argument; empty: of all tensors, in order
  bool saves_results = false;
};

bool begins_with(const std::string& text, const char* begin) {
  return text.compare(0, std::strlen(begin), begin) == 0;
}

// torch names matrices A and B.
std::optional<size_t> index_of(const std::vector<c10::Argument>& all, const std::string& name) {
  for (size_t i = 0; i < all.size(); ++i)
    if (strcasecmp(all[i].name().c_str(), name.c_str()) == 0) return i;
  return {};
}

Operand operand_of(const c10::Argument& argument, const c10::FunctionSchema& forward,
                   size_t& grads) {
  const std::string& name = argument.name();
  const bool optional = argument.type()->kind() == c10::TypeKind::OptionalType;
  if (name == "grads") return {Source::kGrads};
  if (name == "some_grads") return {Source::kSomeGrads};
  if (name == "needed") return {Source::kNeeded};
  if (name == "grad" || begins_with(name, "grad_"))
    return {optional ? Source::kGradOrNone : Source::kGrad, grads++};
  if (begins_with(name, "need_"))
    return {Source::kNeed,
            index_of(forward.arguments(), name.substr(std::strlen("need_"))).value()};
  if (const size_t end = name.rfind("_grad"); end != std::string::npos)
    return {Source::kNeed, index_of(forward.arguments(), name.substr(0, end)).value()};
  if (const auto index = index_of(forward.arguments(), name)) return {Source::kArgument, *index};
  if (const auto index = index_of(forward.returns(), name)) return {Source::kResult, *index};
  return {{}, 0, argument.default_value().value_or(c10::IValue())};
}

BackwardOp backward_of(const c10::OperatorHandle& op, const char* name, bool once) {
  const c10::FunctionSchema& forward = op.schema();
  BackwardOp made{handle_of(name), std::strstr(name, "::") + std::strlen("::"), {}};
  if (once) made.once = name_of(op);
  size_t grads = 0;
  for (const c10::Argument& argument : made.op.schema().arguments()) {
    made.operands.push_back(operand_of(argument, forward, grads));
    made.saves_results |= made.operands.back().source == Source::kResult;
  }
  for (const c10::Argument& result : made.op.schema().returns())
    if (const auto argument = index_of(forward.arguments(), result.name()))
      made.of.push_back(*argument);
  return made;
}

template <class Function>
void for_each_tensor(const c10::IValue& value, const Function& function) {
  if (value.isTensor() && value.toTensor().defined()) function(value.toTensor());
  if (value.isTensorList())
    for (const c10::IValue& tensor : value.toListRef()) function(tensor.toTensor());
}

// The tensors that an op was given.
struct Given {
  variable_list tensors;
  std::vector<bool> needed;   // whether they require a gradient
  std::vector<size_t> first;  // the first tensor of each argument, or of the next that has any

  Given(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
    for (const c10::IValue& value : arguments) {
      first.push_back(tensors.size());
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        needed.push_back(needs_gradient(name_of(op), tensor));
        tensors.push_back(tensor);
      });
    }
    first.push_back(tensors.size());
  }
  bool any_needed() const { return std::find(needed.begin(), needed.end(), true) != needed.end(); }
  // Whether any tensor of an argument does.
  bool needs(size_t argument) const {
    const auto end = needed.begin() + first[argument + 1];
    return std::find(needed.begin() + first[argument], end, true) != end;
  }
};

// Refuses to differentiate gradients.
struct NoSecondDerivative : torch::autograd::Node {
  std::string op;

  std::string name() const override { return "NoSecondDerivative"; }
  variable_list apply(variable_list&&) override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, op,
        ": second derivatives are not supported: gradients that were computed with "
        "create_graph=True must not be differentiated again");
  }
};

struct BackwardNode : torch::autograd::Node {
  std::shared_ptr<const BackwardOp> backward;
  std::optional<Given> given;          // without the tensors
  std::vector<c10::IValue> arguments;  // of the call; tensors are in `saved`
  std::vector<std::vector<SavedVariable>> saved, saved_results;
  SavedVariable marker;

  std::string name() const override { return backward->node_name; }

  void save(std::vector<c10::IValue> of_call, c10::ArrayRef<c10::IValue> results) {
    saved.resize(of_call.size()), saved_results.resize(results.size());
    for (const Operand& operand : backward->operands) {
      const bool is_result = operand.source == Source::kResult;
      if (!is_result && operand.source != Source::kArgument) continue;
      auto& to = (is_result ? saved_results : saved)[operand.index];
      for_each_tensor(is_result ? results[operand.index] : of_call[operand.index],
                      [&](const at::Tensor& tensor) { to.emplace_back(tensor, is_result); });
    }
    // One tensor more than torch's attention saves: if a checkpointed region is recomputed outside
    // its context and calls torch's attention, torch notices the difference.
    if (backward->saves_results) marker = SavedVariable(at::empty({0}), /*is_output=*/false);
    for (c10::IValue& value : of_call) {
      if (value.isTensorList()) value = c10::List<at::Tensor>();
      if (value.isTensor()) value = at::Tensor();
    }
    arguments = std::move(of_call);
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto* all : {&saved, &saved_results})
      for (auto& tensors : *all)
        for (SavedVariable& tensor : tensors) tensor.reset_data();
    marker.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    // In the dtypes of the forward pass.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    Stack stack;
    for (const Operand& operand : backward->operands) stack.push_back(value_of(operand, grads));
    const bool once = !backward->once.empty() && at::GradMode::is_enabled();
    variable_list inputs;
    for (const c10::IValue& value : stack)
      if (once) for_each_tensor(value, [&](const at::Tensor& each) { inputs.push_back(each); });
    {
      const at::AutoGradMode mode(!once && at::GradMode::is_enabled());
      backward->op.callBoxed(stack);
    }
    variable_list results = results_of(stack);
    if (torch::autograd::any_variable_requires_grad(inputs)) refuse_derivatives(results, inputs);
    return results;
  }

 private:
  variable_list results_of(const Stack& stack) const {
    variable_list results(given->needed.size());
    size_t at = 0, end = results.size();
    for (size_t i = 0; i < stack.size(); ++i) {
      if (!backward->of.empty())
        at = given->first[backward->of[i]], end = given->first[backward->of[i] + 1];
      for_each_tensor(stack[i], [&](const at::Tensor& result) {
        if (at < end && given->needed[at] && result.scalar_type() != at::kBool)
          results[at] = result;
        ++at;
      });
    }
    return results;
  }

  void refuse_derivatives(const variable_list& results, const variable_list& inputs) const {
    const auto node = make_node<NoSecondDerivative>();
    node->op = backward->once;
    node->set_next_edges(torch::autograd::collect_next_edges(inputs));
    for (const at::Tensor& result : results)
      if (result.defined()) torch::autograd::set_history(result, node);
  }

  c10::IValue gradients(const variable_list& grads, bool whole) {
    c10::List<at::Tensor> all;
    for (size_t i = 0; i < grads.size(); ++i)
      all.push_back(whole || grads[i].defined()
                        ? gradient(grads, i)
                        : at::empty({0}, input_metadata(i).options().dtype(at::kBool)));
    return all;
  }

  at::Tensor gradient(const variable_list& grads, size_t index) {
    return grads[index].defined() ? grads[index] : input_metadata(index).zeros_like();
  }

  c10::IValue unpacked(const std::vector<SavedVariable>& from, bool is_list) {
    c10::List<at::Tensor> tensors;
    for (const SavedVariable& tensor : from) tensors.push_back(tensor.unpack(getptr()));
    if (is_list) return tensors;
    return tensors.get(0);
  }

  c10::IValue value_of(const Operand& operand, const variable_list& grads) {
    if (!operand.source) return operand.otherwise;
    const size_t index = operand.index;
    switch (*operand.source) {
      case Source::kGrad: return gradient(grads, index);
      case Source::kGradOrNone:
        return grads[index].defined() ? c10::IValue(grads[index]) : c10::IValue();
      case Source::kGrads: return gradients(grads, /*whole=*/true);
      case Source::kSomeGrads: return gradients(grads, /*whole=*/false);
      case Source::kNeed: return given->needs(index);
      case Source::kNeeded: {
        c10::List<bool> all;
        for (const bool each : given->needed) all.push_back(each);
        return all;
      }
      case Source::kArgument: {
        const c10::IValue& value = arguments[index];
        if (!value.isTensor() && !value.isTensorList()) return value;
        return unpacked(saved[index], value.isTensorList());
      }
      case Source::kResult: return unpacked(saved_results[index], /*is_list=*/false);
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
    reporting_refusals(op, keys, *stack, backward_->channel, [&] { record(op, keys, stack); });
  }

 private:
  void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    Given given(op, arguments);
    const at::AutoDispatchBelowADInplaceOrView no_views;  // results may be modified in place
    if (!given.any_needed()) return redispatch(op, keys, stack);
    std::vector<c10::IValue> of_call = arguments.vec();
    redispatch(op, keys, stack);
    const auto node = make_node<BackwardNode>();
    node->backward = backward_;
    node->set_next_edges(torch::autograd::collect_next_edges(std::exchange(given.tensors, {})));
    node->given = std::move(given);
    const auto results = torch::jit::last(*stack, op.schema().returns().size());
    for (const c10::IValue& value : results)
      for_each_tensor(
          value, [&](const at::Tensor& result) { torch::autograd::set_history(result, node); });
    node->save(std::move(of_call), results);
  }

  std::shared_ptr<const BackwardOp> backward_;
};

}  // namespace

}  // namespace symm_cp::gradients

extern "C" {

// Makes the op `backward` the gradient of the op `name`, "symm_mem::f"; with `once` it cannot be
// differentiated. Returns 0 on failure.
int symm_cp_backward_op(const char* name, const char* backward, int once, int in_background) {
  using namespace symm_cp::gradients;
  // Kernels live as long as the process.
  static auto* const library = new std::vector<std::unique_ptr<torch::Library>>;
  try {
    BackwardOp op = backward_of(handle_of(name), backward, once != 0);
    op.channel = in_background != 0 ? symm_cp::kAsync : symm_cp::kSync;
    auto kernel = std::make_unique<Recorded>(std::move(op));
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
