// Fused all-gather-matmul, matmul-reduce-scatter and their gradients: gather, then one matmul, or
// one matmul, then scatter. Python's kernels handle larger matrices, and raise the errors for wrong
// arguments.
//
// For the shapes see matmul_parts.h. The choice of the kernel depends on the dtype and the whole
// shape of the exchanged tensor, which are the same on all ranks, and not on the other dimension of
// a product, which may differ from rank to rank.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/matmul_parts.h"

namespace symm_cp::fused_matmuls {

namespace {

using namespace kernels;
using namespace matmul_parts;
using torch::jit::Stack;

constexpr const char* kScatter = "fused_matmul_reduce_scatter";
constexpr const char* kScatterSum = "_fused_matmuls_reduce_scatter";
constexpr const char* kWeightGrad = "_fused_all_gather_weight_grad";
constexpr const char* kScatterBackward = "_fused_matmul_reduce_scatter_backward";

// The most bytes of a whole tensor that is exchanged at once. Larger tensors are exchanged shard by
// shard, and each shard is multiplied in place. That saves the memory for the whole, but is never
// faster: with two ranks it takes 1.1 to 1.3 times as long at 0.5 MiB, and the same time from 8 MiB
// on (1.08 times as long in bfloat16 on a processor with AMX).
constexpr int64_t kWholeBytes = int64_t{64} << 20;

bool is_served(at::ScalarType dtype, int64_t whole_elements) {
  if (!has_native_matmul(dtype)) return false;
  const int64_t bytes = whole_elements * static_cast<int64_t>(c10::elementSize(dtype));
  return bytes > 0 && bytes <= kWholeBytes && may_serve();
}

// Returns nullopt if the kernel in Python is needed.
std::optional<Division> division_of_shard(const at::Tensor& shard, int64_t dim, const Sizes& given,
                                          const Group& group) {
  auto division = divided_shard(shard, dim, given, group);
  if (!division || !is_plain(shard, shard.scalar_type())) return {};
  const auto whole = with_length(shard.sizes(), division->dim, division->length());
  if (!is_served(shard.scalar_type(), c10::multiply_integers(whole))) return {};
  return division;
}

at::Tensor multiplied(const at::Tensor& a, const at::Tensor& b) {
  at::Tensor out = new_output(a, {a.size(0), b.size(1)});
  return at::mm_out(out, a, b);
}

// Returns a product, in memory laid out by columns if `transposed`.
at::Tensor multiplied(const at::Tensor& a, const at::Tensor& b, bool transposed) {
  if (!transposed) return multiplied(a, b);
  at::Tensor out = new_output(a, {b.size(1), a.size(0)}).t();
  return at::mm_out(out, a, b);
}

// --- fused_matmul_reduce_scatter -----------------------------------------------------------------

struct ScatterArguments {
  const char* op;
  Terms terms;
  std::string reduce_op;
  int64_t dim;
  Sizes sizes;
};

// Writes this rank's terms of the sum, for the parts of all ranks, to `sum`.
void add_up_to(const at::Tensor& sum, const Terms& terms, const Scattered& scattered, int ranks) {
  Terms rows = terms;
  for (at::Tensor& left : rows.lefts) left = scattered.rows_of(left);
  if (terms.addend.defined()) rows.addend = scattered.rows_of(terms.addend).contiguous();
  if (!scattered.by_columns() || ranks == 1)
    return rows.add_up(sum.view({-1, scattered.shape().back()}));
  scattered.for_columns(sum, [&](const at::Tensor& part, int64_t begin, int64_t length) {
    Terms columns = rows;
    for (at::Tensor& right : columns.rights) right = right.narrow(1, begin, length);
    if (rows.addend.defined()) columns.addend = rows.addend.narrow(1, begin, length).contiguous();
    columns.add_up(part);
  });
}

// Returns an undefined tensor if the kernel in Python is needed.
at::Tensor matmul_reduce_scatter(Group& group, const ScatterArguments& given) {
  const at::DimVector shape = given.terms.shape();
  if (shape.empty() || (given.reduce_op != "avg" && given.reduce_op != "sum")) return {};
  const auto division = divided_whole(shape, given.dim, given.sizes, group.world_size());
  if (!division || !is_served(given.terms.like().scalar_type(), c10::multiply_integers(shape)))
    return {};
  const at::AutoDispatchBelowADInplaceOrView below;
  const Scattered scattered(given.op, shape, *division, given.reduce_op);
  const at::Tensor sum = new_output(given.terms.like(), scattered.shape());
  const int ranks = group.world_size();
  if (ranks == 1) {
    add_up_to(sum, given.terms, scattered, ranks);
    return scattered.as_given(sum);
  }
  recorded(group, Kind::kProduce, given.op, [&] { add_up_to(sum, given.terms, scattered, ranks); });
  return scattered.as_given(scattered.reduce(group, sum));
}

// Arguments: A, B, reduce_op, scatter_dim, group name, [sizes, rank].
void matmul_reduce_scatter_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  at::Tensor output;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    output = matmul_reduce_scatter(*group, {kScatter,
                                            {{arguments.tensor(0)}, {arguments.tensor(1)}, {}, {}},
                                            arguments.text(2),
                                            arguments.number(3),
                                            arguments.sizes(5, *group)});
  };
  if (!guarded(kScatter, arguments, 4, kSync, body) || !output.defined())
    return call_python(op, stack);
  arguments.end(std::move(output));
}

// Arguments: As, Bs, addend, reduce_op, scatter_dim, group name, sizes, rank.
void matmuls_reduce_scatter_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  at::Tensor output;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    Terms terms{arguments.tensors(0), arguments.tensors(1), arguments.optional_tensor(2), {}};
    output = matmul_reduce_scatter(*group, {kScatterSum, std::move(terms), arguments.text(3),
                                            arguments.number(4), arguments.sizes(6, *group)});
  };
  if (!guarded(kScatterSum, arguments, 5, kSync, body) || !output.defined())
    return call_python(op, stack);
  arguments.end(std::move(output));
}

// --- gradients -----------------------------------------------------------------------------------

struct WeightGradArguments {
  at::Tensor x_shard;
  std::vector<at::Tensor> grads;
  int64_t dim;
  Sizes sizes;
  bool transposed;
};

// Returns gathered(x_shard)^T @ grad for each gradient.
std::optional<std::vector<at::Tensor>> weight_grad(Group& group, const WeightGradArguments& given) {
  const auto division = division_of_shard(given.x_shard, given.dim, given.sizes, group);
  if (!division) return {};
  const at::AutoDispatchBelowADInplaceOrView below;
  Gathered gathered(kWeightGrad, "gather_dim", given.x_shard, *division);
  gathered.gather(group, /*keep=*/false);
  std::vector<at::Tensor> results;
  after_exchange(group, kWeightGrad, [&] {
    const at::Tensor left = gathered.rows().t();
    for (const at::Tensor& grad : given.grads)
      results.push_back(multiplied(left, gathered.rows_like(grad), given.transposed));
  });
  return results;
}

// Arguments: A_shard, grads, gather_dim, group name, sizes, rank, transposed.
void weight_grad_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  std::optional<std::vector<at::Tensor>> results;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    results = weight_grad(*group, {arguments.tensor(0), arguments.tensors(1), arguments.number(2),
                                   arguments.sizes(4, *group), arguments.flag(6)});
  };
  if (!guarded(kWeightGrad, arguments, 3, kSync, body) || !results) return call_python(op, stack);
  arguments.end(std::move(*results));
}

struct ScatterBackwardArguments {
  at::Tensor grad_shard, a, weight;
  bool mean;
  int64_t dim;
  bool need_a, need_weight;
  Sizes sizes;
};

// Returns gathered(grad) @ weight^T and a^T @ gathered(grad).
std::optional<std::pair<at::Tensor, at::Tensor>> scatter_backward(
    Group& group, const ScatterBackwardArguments& given) {
  const auto division = division_of_shard(given.grad_shard, given.dim, given.sizes, group);
  if (!division) return {};
  const at::AutoDispatchBelowADInplaceOrView below;
  Gathered gathered(kScatterBackward, "dim", given.grad_shard, *division);
  gathered.gather(group, /*keep=*/false);
  std::pair<at::Tensor, at::Tensor> results{given.a.new_empty({0, 0}),
                                            given.weight.new_empty({0, 0})};
  after_exchange(group, kScatterBackward, [&] {
    const at::Tensor rows = gathered.rows();
    if (given.need_a)
      results.first = gathered.product(multiplied(rows, given.weight.t())).contiguous();
    if (given.need_weight)
      results.second =
          multiplied(gathered.rows_like(given.a).t(), rows, is_transposed(given.weight));
    for (at::Tensor* grad : {&results.first, &results.second})
      if (given.mean && grad->numel() > 0) grad->div_(group.world_size());
  });
  return results;
}

// Arguments: grad, A, B, reduce_op, scatter_dim, group name, need_a, need_b, sizes, rank.
void scatter_backward_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  std::optional<std::pair<at::Tensor, at::Tensor>> results;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    results = scatter_backward(
        *group,
        {arguments.tensor(0), arguments.tensor(1), arguments.tensor(2), arguments.text(3) == "avg",
         arguments.number(4), arguments.flag(6), arguments.flag(7), arguments.sizes(8, *group)});
  };
  if (!guarded(kScatterBackward, arguments, 5, kSync, body) || !results)
    return call_python(op, stack);
  arguments.end(std::move(results->first), std::move(results->second));
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  for (const char* name : {kScatter, "_matmul_reduce_scatter_split"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&matmul_reduce_scatter_kernel>());
  m.impl(kScatterSum, torch::CppFunction::makeFromBoxedFunction<&matmuls_reduce_scatter_kernel>());
  m.impl(kWeightGrad, torch::CppFunction::makeFromBoxedFunction<&weight_grad_kernel>());
  m.impl(kScatterBackward, torch::CppFunction::makeFromBoxedFunction<&scatter_backward_kernel>());
}

}  // namespace symm_cp::fused_matmuls
