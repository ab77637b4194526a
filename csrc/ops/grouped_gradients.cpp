// Gradients of dispatch_matmul and matmul_combine, one call each: the kernels of the backward
// passes in symm_cp/ops/experts/gradients.py, which describes them.
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <algorithm>

#include "base/parallel.h"
#include "exchange/row_sums.h"
#include "ops/grouped_matmuls.h"
#include "ops/kernels.h"

namespace symm_cp::experts {

namespace {

using namespace kernels;
using torch::jit::Stack;

constexpr const char* kDispatchBackward = "_fused_dispatch_grouped_matmul_backward";
constexpr const char* kCombineBackward = "_fused_grouped_matmul_combine_backward";

Tensors transposed(const Tensors& weights) {
  Tensors results;
  for (const at::Tensor& weight : weights) results.push_back(weight.mT());
  return results;
}

// Returns rows^T @ grad for each of this rank's experts, in the layout of `weight`.
at::Tensor weight_grad(const Routing& routing, const at::Tensor& rows, const at::Tensor& grad,
                       const at::Tensor& weight) {
  const bool by_columns = is_transposed(weight);
  const at::Tensor &left = by_columns ? grad : rows, &right = by_columns ? rows : grad;
  const at::Tensor out = new_output(rows, {routing.local(), left.size(1), right.size(1)});
  for_each_expert(routing, [&](int64_t expert, int64_t begin, int64_t count) {
    at::Tensor to = out.select(0, expert);  // zeros for an expert without rows
    at::mm_out(to, left.narrow(0, begin, count).t(), right.narrow(0, begin, count));
  });
  return by_columns ? out.mT() : out;
}

// --- of dispatch_matmul --------------------------------------------------------------------------

struct DispatchGradients {
  at::Tensor tokens;  // empty if not needed
  Tensors weights;
};

// Arguments: rows, grads, weights, grad of rows, table, top_k, num_experts, group name, whether the
// gradients of tokens are needed, whether the gradients of weights are.
void dispatch_backward_kernel(const c10::OperatorHandle& op, Stack* stack) {
  constexpr const char* name = kDispatchBackward;
  Arguments arguments(op, stack);
  DispatchGradients results;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    const at::Tensor rows = arguments.tensor(0);
    const Tensors grads = arguments.tensors(1), weights = arguments.tensors(2);
    const at::Tensor table = arguments.tensor(4);
    const CombineArguments given{grads,
                                 transposed(weights),
                                 at::Tensor(),
                                 table,
                                 arguments.number(5),
                                 arguments.number(6),
                                 arguments.optional_tensor(3)};
    const Routing routing(name, table, given.experts, *group);
    check_matrix(name, "rows", rows);
    check_products(name, given, routing.local());
    for (const at::Tensor* each : {&rows, &grads.front()})
      TORCH_CHECK_VALUE(each->size(0) == routing.rows(), name, ": rows and grads ", each->sizes(),
                        " must have ", routing.rows(), " rows, as the forward pass returned");
    const at::Tensor& addend = given.addend;
    TORCH_CHECK_VALUE(!addend.defined() || addend.sizes() == rows.sizes(), name, ": grad_rows ",
                      addend.defined() ? addend.sizes() : rows.sizes(), " must be ", rows.sizes());
    const at::AutoDispatchBelowADInplaceOrView below;
    results.tokens = arguments.flag(8) ? matmul_combine(name, *group, given)
                                       : new_output(rows, {0, rows.size(1)});
    if (!arguments.flag(9)) return;
    after_exchange(*group, name, [&] {
      for (size_t i = 0; i < grads.size(); ++i)
        results.weights.push_back(weight_grad(routing, rows, grads[i], weights[i]));
    });
  };
  if (!guarded(name, arguments, 7, kSync, body)) return call_python(op, stack);
  arguments.end(std::move(results.tokens), std::move(results.weights));
}

// --- of matmul_combine ---------------------------------------------------------------------------

struct CombineGradients {
  Tensors rows, weights;
  at::Tensor factors;  // empty if there are none
};

struct CombineBackward {
  const char* op;
  Group& group;
  const Routing& routing;
  const CombineArguments& given;

  // Sends a tensor of this rank's tokens, (T, columns), to the rows of all ranks' experts.
  at::Tensor dispatched(const at::Tensor& tensor, int64_t top_k) const {
    return dispatch_rows(group, tensor, given.table, routing.rows(), top_k, given.experts, op);
  }

  // Returns the gradients of the experts' rows, before the multiplication by their factors.
  Tensors products(const at::Tensor& grad_rows) const {
    Tensors results;
    for (const at::Tensor& weight : given.weights) {
      results.push_back(new_output(grad_rows, {routing.rows(), weight.size(1)}));
      multiply(routing, grad_rows, weight.mT(), results.back(), /*add=*/false);
    }
    return results;
  }

  // Multiplies `products`, and `grad_rows` unless null, by the factors of their rows. Returns the
  // dot products of the given rows and the unmultiplied `products`, (rows, 1).
  at::Tensor weigh(const Tensors& products, const at::Tensor* grad_rows) const {
    const auto wide = products.front().scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor pairs = factors_for(given.factors, wide).view({routing.pairs(), 1});
    const at::Tensor factors = dispatched(pairs, 1);
    const at::Tensor dots = at::zeros({routing.rows(), 1}, factors.options());
    recorded(group, Kind::kConsume, op, [&] {
      for (size_t i = 0; i < products.size(); ++i)
        weigh_rows(products[i], TokenRows(given.rows[i]), factors, dots);
      if (grad_rows != nullptr) scale_rows(*grad_rows, factors);
    });
    return dots;
  }

 private:
  static void weigh_rows(const at::Tensor& to, const TokenRows& others, const at::Tensor& factors,
                         const at::Tensor& dots) {
    run(to, {to.mutable_data_ptr(), others.data, others.pitch, factors.const_data_ptr(),
             dots.mutable_data_ptr(), to.size(1), static_cast<DType>(to.scalar_type())});
  }
  static void scale_rows(const at::Tensor& to, const at::Tensor& factors) {
    run(to, {to.mutable_data_ptr(), nullptr, 0, factors.const_data_ptr(), nullptr, to.size(1),
             static_cast<DType>(to.scalar_type())});
  }
  static void run(const at::Tensor& to, const WeighedRows& rows) {
    const int64_t grain =
        std::max<int64_t>(1, (int64_t{32} << 10) / std::max<int64_t>(1, rows.width));
    parallel_for(0, to.size(0), grain,
                 [&](int64_t first, int64_t last) { symm_cp::weigh_rows(rows, first, last); });
  }
};

CombineGradients combine_backward(Group& group, const at::Tensor& grad,
                                  const CombineArguments& given, bool of_weights) {
  constexpr const char* op = kCombineBackward;
  const Routing routing(op, given.table, given.experts, group);
  check_products(op, given, routing.local());
  check_combine(op, given.rows.front(), given.factors, routing, given.top_k);
  check_matrix(op, "grad", grad);
  const std::array<int64_t, 2> sizes{routing.pairs() / given.top_k, given.weights.front().size(2)};
  TORCH_CHECK_VALUE(grad.sizes() == at::IntArrayRef(sizes), op, ": grad ", grad.sizes(),
                    " must be ", at::IntArrayRef(sizes), ", as the forward pass returned");
  TORCH_CHECK_TYPE(grad.scalar_type() == given.rows.front().scalar_type(), op, ": grad is ",
                   name_dtype(grad.scalar_type()), ", must be ",
                   name_dtype(given.rows.front().scalar_type()), " as the rows are");
  const at::AutoDispatchBelowADInplaceOrView below;
  const CombineBackward call{op, group, routing, given};
  const at::Tensor grad_rows = call.dispatched(grad, given.top_k);
  CombineGradients results;
  results.factors = at::empty({0}, grad.options());
  recorded(group, Kind::kConsume, op, [&] { results.rows = call.products(grad_rows); });
  at::Tensor dots;
  if (given.factors.defined()) dots = call.weigh(results.rows, of_weights ? &grad_rows : nullptr);
  // Peers wait only for the dots, at the end; until then errors are reported to them.
  const auto finish = [&] {
    for (size_t i = 0; of_weights && i < given.rows.size(); ++i)
      results.weights.push_back(weight_grad(routing, given.rows[i], grad_rows, given.weights[i]));
  };
  if (!given.factors.defined()) {
    after_exchange(group, op, finish);
    return results;
  }
  recorded(group, Kind::kConsume, op, finish);
  results.factors = combine_rows(group, dots, {}, given.table, 1, given.experts, op)
                        .view_as(given.factors)
                        .to(given.factors.scalar_type());
  return results;
}

// Arguments: grad, rows, weights, factors, table, top_k, num_experts, group name, whether the
// gradients of weights are needed.
void combine_backward_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  CombineGradients results;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    const CombineArguments given{arguments.tensors(1),         arguments.tensors(2),
                                 arguments.optional_tensor(3), arguments.tensor(4),
                                 arguments.number(5),          arguments.number(6)};
    results = combine_backward(*group, arguments.tensor(0), given, arguments.flag(8));
  };
  if (!guarded(kCombineBackward, arguments, 7, kSync, body)) return call_python(op, stack);
  arguments.end(std::move(results.rows), std::move(results.weights), std::move(results.factors));
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  m.impl(kDispatchBackward, torch::CppFunction::makeFromBoxedFunction<&dispatch_backward_kernel>());
  m.impl(kCombineBackward, torch::CppFunction::makeFromBoxedFunction<&combine_backward_kernel>());
}

}  // namespace symm_cp::experts
