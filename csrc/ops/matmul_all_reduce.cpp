// `fused_matmul_all_reduce`, and the sum of several such products: each rank adds up its own
// products, then the sums are all-reduced in place. Working shard by shard, as Python's kernels do
// for other devices, is never faster on CPU, where nothing copies while a rank multiplies, and
// takes up to 1.3 times as long from 0.25 MiB on. Writing products directly to the slot may also be
// slower, as its memory is in the peers' caches (1024 x 256 float32, two ranks: 1.2 times as long).
// The scaled form is in scaled_matmuls.cpp, the gradient in gradients.cpp. Python handles groups
// that span hosts, forced strategies and wrong arguments.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <utility>

#include "ops/matmul_parts.h"

namespace symm_cp {

namespace {

using namespace kernels;
using matmul_parts::as_matrix;
using matmul_parts::has_native_matmul;
using matmul_parts::may_serve;
using matmul_parts::Terms;
using torch::jit::Stack;

constexpr const char* kMatmulAllReduce = "fused_matmul_all_reduce";
constexpr const char* kSum = "_fused_matmuls_all_reduce";

// Returns an undefined tensor if the kernel in Python is needed; this does not depend on K, which
// may differ from rank to rank.
at::Tensor add_up_and_all_reduce(Group& group, const char* op, Terms terms,
                                 const std::string& reduce_op) {
  const at::DimVector shape = terms.shape();
  if (shape.empty() || !has_native_matmul(terms.like().scalar_type()) || !may_serve()) return {};
  const bool mean = reduce_op == "avg";
  if (!mean && reduce_op != "sum") return {};
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor output = new_output(terms.like(), shape), bias = terms.bias;
  // The bias is added once: by rank 0 to its contribution, or by all ranks to the average.
  if (mean || group.rank() != 0) terms.bias = at::Tensor();
  recorded(group, Kind::kProduce, op, [&] {
    for (at::Tensor& left : terms.lefts) left = as_matrix(left);
    terms.add_up(as_matrix(output));
  });
  matmul_parts::all_reduce(group, op, output, reduce_op, bias.defined() ? " bias" : "");
  if (mean && bias.defined()) after_exchange(group, op, [&] { output.add_(bias); });
  return output;
}

void serve(const c10::OperatorHandle& op, Stack* stack, const char* name, size_t reduce_op,
           c10::function_ref<Terms(const Arguments&)> terms_of) {
  Arguments arguments(op, stack);
  at::Tensor output;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    output = add_up_and_all_reduce(*group, name, terms_of(arguments), arguments.text(reduce_op));
  };
  if (!guarded(name, arguments, reduce_op + 1, kSync, body) || !output.defined())
    return call_python(op, stack);
  arguments.end(std::move(output));
}

// Arguments: A, B, bias, reduce op, group name.
void matmul_all_reduce(const c10::OperatorHandle& op, Stack* stack) {
  serve(op, stack, kMatmulAllReduce, 3, [](const Arguments& given) -> Terms {
    return {{given.tensor(0)}, {given.tensor(1)}, {}, given.optional_tensor(2)};
  });
}

// Arguments: As, Bs, addend, bias, reduce op, group name.
void matmuls_all_reduce(const c10::OperatorHandle& op, Stack* stack) {
  serve(op, stack, kSum, 4, [](const Arguments& given) -> Terms {
    return {given.tensors(0), given.tensors(1), given.optional_tensor(2), given.optional_tensor(3)};
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  m.impl(kMatmulAllReduce, torch::CppFunction::makeFromBoxedFunction<&matmul_all_reduce>());
  m.impl(kSum, torch::CppFunction::makeFromBoxedFunction<&matmuls_all_reduce>());
}

}  // namespace symm_cp
