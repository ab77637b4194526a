// Gradients of the fused matmuls. The second derivatives are in symm_cp/ops/matmul/derivatives.py,
// which explains them. Every backward pass consists of ops that can be differentiated again.
#include <ATen/ops/matmul.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/gradients.h"

namespace symm_cp::matmul_gradients {

namespace {

using namespace gradients;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A call that autograd records, on its way to the kernels below.
struct Call {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet keys;
  Stack* stack;

  // Valid until `run`.
  const c10::IValue& argument(size_t index) const {
    return torch::jit::peek(*stack, index, op.schema().arguments().size());
  }
  // Returns None for an argument that the op lacks, such as those for uneven parts.
  c10::IValue optional_argument(const char* name) const {
    const auto index = op.schema().argumentIndexWithName(name);
    return index ? argument(*index) : c10::IValue();
  }
  // Results replace the arguments on the stack. Autograd does not see them as views, so they may be
  // modified in place.
  void run() const {
    const at::AutoDispatchBelowADInplaceOrView no_views;
    redispatch(op, keys, stack);
  }
};

// Returns a tensor as a matrix of its last dimension. Not `flatten`, which fails under
// `torch.autograd.grad(..., is_grads_batched=True)`.
at::Tensor in_rows(const at::Tensor& tensor) {
  c10::SymInt rows = 1;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) rows *= tensor.sym_size(dim);
  return tensor.reshape_symint({rows, tensor.sym_size(-1)});
}

// Saves how a call divides dimension `dim` of tensors with `dims` dimensions.
void keep_division(AutogradContext* ctx, const Call& call, int64_t dim, int64_t dims) {
  ctx->saved_data["dim"] = dim < 0 ? dim + dims : dim;
  ctx->saved_data["group"] = call.optional_argument("group_name");
  ctx->saved_data["sizes"] = call.optional_argument("sizes");
  ctx->saved_data["rank"] = call.optional_argument("rank");
}

// --- fused_all_gather_matmul ---------------------------------------------------------------------

// The results are the gathered tensor, if requested, and the products.
struct GatherMatmul : torch::autograd::Function<GatherMatmul> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x_shard,
                               at::TensorList weights, const Call& call) {
    // Read before the call, whose results replace its arguments.
    const int64_t dim = call.argument(2).toInt();
    keep_division(ctx, call, dim, x_shard.dim());
    ctx->saved_data["of_shard"] = x_shard.requires_grad();
    ctx->saved_data["of_weights"] =
        std::any_of(weights.begin(), weights.end(),
                    [](const at::Tensor& weight) { return weight.requires_grad(); });
    variable_list saved{x_shard};
    saved.insert(saved.end(), weights.begin(), weights.end());
    call.run();
    const auto results = torch::jit::last(*call.stack, 2);
    variable_list outputs;
    if (results[0].isTensor()) outputs.push_back(results[0].toTensor());
    for (const at::Tensor& product : results[1].toTensorVector()) outputs.push_back(product);
    // The gathered tensor has the shape of x_shard, except for this length of the gathered
    // dimension.
    const bool by_columns = ctx->saved_data["dim"].toInt() == x_shard.dim() - 1;
    ctx->saved_data["length"] =
        by_columns && !weights.empty() ? weights[0].sym_size(0) : outputs[0].sym_size(dim);
    ctx->set_materialize_grads(false);  // an unused output costs nothing
    ctx->save_for_backward(saved);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    // In the dtypes of the forward pass.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& x_shard = saved[0];
    const size_t weights = saved.size() - 1, gathered = grads.size() - weights;
    c10::List<at::Tensor> used, rights;
    bool transposed = true;
    for (size_t i = 0; i < weights; ++i) {
      transposed = transposed && kernels::is_transposed(saved[1 + i]);
      if (!grads[gathered + i].defined()) continue;
      used.push_back(grads[gathered + i]);
      rights.push_back(saved[1 + i].mH());
    }
    variable_list results(1 + weights + 1);
    if (ctx->saved_data["of_shard"].toBool())
      results[0] = of_shard(ctx, x_shard, used, rights, gathered ? grads[0] : at::Tensor());
    if (!ctx->saved_data["of_weights"].toBool()) return results;
    // Called even if no output has a gradient here: the peers may wait for this shard.
    const std::vector<at::Tensor> computed = of_weights(ctx, x_shard, used, transposed);
    for (size_t i = 0, next = 0; i < weights; ++i)
      if (grads[gathered + i].defined()) results[1 + i] = computed[next++];
    return results;
  }

 private:
  static at::Tensor of_shard(AutogradContext* ctx, const at::Tensor& x_shard,
                             const c10::List<at::Tensor>& lefts,
                             const c10::List<at::Tensor>& rights, at::Tensor addend) {
    static const auto op = handle_of("symm_mem::_fused_matmuls_reduce_scatter");
    if (lefts.empty() && !addend.defined()) {  // zeros: the peers may have gradients
      c10::SymDimVector shape(x_shard.sym_sizes());
      shape[ctx->saved_data["dim"].toInt()] = ctx->saved_data["length"].toSymInt();
      addend = x_shard.new_zeros_symint(shape);
    }
    Stack stack{lefts,
                rights,
                addend.defined() ? c10::IValue(addend) : c10::IValue(),
                "sum",
                ctx->saved_data["dim"],
                ctx->saved_data["group"],
                ctx->saved_data["sizes"],
                ctx->saved_data["rank"]};
    op.callBoxed(stack);
    return stack.back().toTensor();
  }

  static std::vector<at::Tensor> of_weights(AutogradContext* ctx, const at::Tensor& x_shard,
                                            const c10::List<at::Tensor>& grads, bool transposed) {
    static const auto op = handle_of("symm_mem::_fused_all_gather_weight_grad");
    Stack stack{x_shard,
                grads,
                ctx->saved_data["dim"],
                ctx->saved_data["group"],
                ctx->saved_data["sizes"],
                ctx->saved_data["rank"],
                transposed};
    op.callBoxed(stack);
    return stack.back().toTensorVector();
  }
};

void all_gather_matmul_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                Stack* stack) {
  const Call call{op, keys, stack};
  const auto given = call.argument(1).toListRef();
  bool needed = needs_gradient(name_of(op), call.argument(0).toTensor());
  for (const c10::IValue& weight : given)
    needed = needs_gradient(name_of(op), weight.toTensor()) || needed;
  const bool kept = call.argument(op.schema().arguments().size() - 1).toBool();
  if (!needed || (given.empty() && !kept)) return call.run();
  const at::Tensor x_shard = call.argument(0).toTensor();
  const std::vector<at::Tensor> weights = call.argument(1).toTensorVector();
  variable_list outputs = GatherMatmul::apply(x_shard, at::TensorList(weights), call);
  torch::jit::drop(*stack, 2);
  stack->emplace_back(kept ? c10::IValue(outputs[0]) : c10::IValue());
  stack->emplace_back(std::vector<at::Tensor>(outputs.begin() + kept, outputs.end()));
}

// --- fused_matmul_reduce_scatter -----------------------------------------------------------------

struct MatmulScatter : torch::autograd::Function<MatmulScatter> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& a, const at::Tensor& weight,
                            const Call& call) {
    keep_division(ctx, call, call.argument(3).toInt(), a.dim());
    ctx->saved_data["reduce_op"] = call.argument(2);
    ctx->saved_data["of_a"] = a.requires_grad();
    ctx->saved_data["of_weight"] = weight.requires_grad();
    const variable_list saved{a, weight};
    call.run();
    ctx->save_for_backward(saved);
    return call.stack->back().toTensor();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = handle_of("symm_mem::_fused_matmul_reduce_scatter_backward");
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = ctx->get_saved_variables();
    const bool of_a = ctx->saved_data["of_a"].toBool();
    const bool of_weight = ctx->saved_data["of_weight"].toBool();
    Stack stack{grads[0],
                saved[0],
                saved[1],
                ctx->saved_data["reduce_op"],
                ctx->saved_data["dim"],
                ctx->saved_data["group"],
                of_a,
                of_weight,
                ctx->saved_data["sizes"],
                ctx->saved_data["rank"]};
    op.callBoxed(stack);
    // A gradient that is not needed is an empty tensor.
    return {of_a ? stack[0].toTensor() : at::Tensor(),
            of_weight ? stack[1].toTensor() : at::Tensor(), at::Tensor()};
  }
};

void matmul_scatter_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                             Stack* stack) {
  const Call call{op, keys, stack};
  const at::Tensor a = call.argument(0).toTensor(), weight = call.argument(1).toTensor();
  const bool of_a = needs_gradient(name_of(op), a);
  if (!needs_gradient(name_of(op), weight) && !of_a) return call.run();
  at::Tensor scattered = MatmulScatter::apply(a, weight, call);
  torch::jit::drop(*stack, 1);
  stack->emplace_back(std::move(scattered));
}

// --- fused_matmul_all_reduce ---------------------------------------------------------------------

// All-reduces the gradient of the sum, like torch's functional all-reduce, but not for the bias,
// which is added after the sum.
struct MatmulAllReduce : torch::autograd::Function<MatmulAllReduce> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& a, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, const c10::IValue& reduce_op,
                            const c10::IValue& group) {
    static const auto op = handle_of("symm_mem::fused_matmul_all_reduce");
    ctx->save_for_backward({a, weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["reduce_op"] = reduce_op;
    ctx->saved_data["group"] = group;
    at::AutoDispatchBelowADInplaceOrView below;
    Stack stack{a, weight, bias, reduce_op, group};
    op.callBoxed(stack);
    return stack.back().toTensor();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    // In the dtypes of the forward pass.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &a = saved[0], &weight = saved[1], &grad = grads[0];
    const bool of_a = ctx->needs_input_grad(0), of_weight = ctx->needs_input_grad(1);
    at::Tensor grad_a, grad_weight, grad_bias;
    const at::Tensor total = of_a || of_weight ? all_reduced(ctx, grad) : grad;
    if (of_a) grad_a = at::matmul(total, weight.t());
    if (of_weight) grad_weight = at::matmul(in_rows(a).t(), in_rows(total));
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2))
      grad_bias = in_rows(grad).sum(0);
    return {grad_a, grad_weight, grad_bias, at::Tensor(), at::Tensor()};
  }

 private:
  static at::Tensor all_reduced(AutogradContext* ctx, const at::Tensor& grad) {
    static const auto op = handle_of("symm_mem::_fused_matmuls_all_reduce");
    const c10::List<at::Tensor> none;
    Stack stack{
        none, none, grad, c10::IValue(), ctx->saved_data["reduce_op"], ctx->saved_data["group"]};
    op.callBoxed(stack);
    return stack.back().toTensor();
  }
};

void matmul_all_reduce_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                Stack* stack) {
  const auto arguments = torch::jit::last(*stack, 5);
  const at::Tensor &a = arguments[0].toTensor(), &weight = arguments[1].toTensor();
  const auto bias = arguments[2].toOptional<at::Tensor>();
  constexpr const char* name = "fused_matmul_all_reduce";
  bool needed = needs_gradient(name, a);
  needed = needs_gradient(name, weight) || needed;
  if (bias) needed = needs_gradient(name, *bias) || needed;
  if (!needed) return redispatch(op, keys, stack);
  at::Tensor total = MatmulAllReduce::apply(a, weight, bias, arguments[3], arguments[4]);
  torch::jit::drop(*stack, 5);
  stack->emplace_back(std::move(total));
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, Autograd, m) {
  for (const char* name : {"fused_all_gather_matmul", "_all_gather_matmul_split"})
    m.impl(name,
           torch::CppFunction::makeFromBoxedFunction<&reporting<&all_gather_matmul_autograd>>());
  for (const char* name : {"fused_matmul_reduce_scatter", "_matmul_reduce_scatter_split"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&reporting<&matmul_scatter_autograd>>());
  m.impl("fused_matmul_all_reduce",
         torch::CppFunction::makeFromBoxedFunction<&reporting<&matmul_all_reduce_autograd>>());
}

}  // namespace symm_cp::matmul_gradients
