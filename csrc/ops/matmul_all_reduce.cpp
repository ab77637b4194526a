// `fused_matmul_all_reduce` of few rows: each rank multiplies into its slot, and sums the slots of
// all ranks. The kernel in Python computes larger results, and raises for wrong arguments. The
// gradient is in gradients.cpp.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/matmul_parts.h"

namespace symm_cp {

namespace {

using namespace kernels;
using matmul_parts::is_plain;
using matmul_parts::may_serve;
using torch::jit::Stack;

constexpr const char* kMatmulAllReduce = "fused_matmul_all_reduce";

// The largest result: up to here there is less to hide behind the matmul than Python costs.
constexpr int64_t kFewBytes = kPieceBytes;

struct Arrays {
  const at::Tensor &a, &weight;
  at::Tensor bias;  // undefined: none
  const std::string& reduce_op;

  int64_t columns() const { return weight.size(1); }
  int64_t rows() const { return c10::multiply_integers(a.sizes().slice(0, a.dim() - 1)); }
  bool mean() const { return reduce_op == "avg"; }
};

// Of K, which may differ between ranks, nothing depends.
bool is_served(const Arrays& given) {
  const at::ScalarType dtype = given.a.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf && dtype != at::kDouble)
    return false;
  if (!is_plain(given.a, dtype) || !is_plain(given.weight, dtype)) return false;
  if (given.a.dim() < 2 || given.weight.dim() != 2) return false;
  if (given.a.sizes().back() != given.weight.size(0)) return false;
  if (given.bias.defined() && !(is_plain(given.bias, dtype) && given.bias.dim() == 1 &&
                                given.bias.size(0) == given.columns()))
    return false;
  if (!given.mean() && given.reduce_op != "sum") return false;
  const auto size = static_cast<int64_t>(given.a.element_size());
  if (given.rows() * given.columns() * size > kFewBytes) return false;
  return may_serve();
}

void prepare(CheckedCall& call, const Arrays& given, at::IntArrayRef shape, int ranks) {
  const at::ScalarType dtype = given.a.scalar_type();
  const int64_t row = given.columns() * static_cast<int64_t>(given.a.element_size());
  const int64_t bytes = given.rows() * row;
  Exchange& exchange = call.exchange;
  std::string detail = given.reduce_op;
  if (given.bias.defined()) detail += " bias";
  exchange.call_name = name_call(kMatmulAllReduce, dtype, shape, detail);
  set_reduction(exchange, dtype, given.mean() ? ReduceOp::kAvg : ReduceOp::kSum);
  call.output_shape.assign(shape.begin(), shape.end());
  if (given.bias.defined() && !given.mean()) exchange.addend.bytes = row;
  if (two_shot(ranks, bytes)) {
    exchange.kind = ExchangeKind::kProducedTwoShotAllReduce;
    exchange.piece_bytes = ranks * call.add_parts(bytes, ranks);
  } else {
    exchange.kind = ExchangeKind::kProducedAllReduce;
    call.add_input(0, bytes);
    call.add_output(0, bytes);
  }
}

// The matmul of a call, which the exchange has written to the slot.
class Product {
 public:
  Product(const Arrays& given, CheckedCall& call) : given_(given), call_(call) {}

  void write(void* slot) {
    try {
      const at::AutoDispatchBelowADInplaceOrView below;
      at::Tensor& out = view_of(slot);
      if (given_.a.dim() == 2)
        at::mm_out(out, given_.a, given_.weight);
      else
        at::mm_out(out, given_.a.reshape({given_.rows(), given_.a.size(-1)}), given_.weight);
    } catch (const std::exception& error) {
      failure_ = std::current_exception();
      throw std::runtime_error(describe(error));
    }
  }
  const std::exception_ptr& failure() const { return failure_; }

 private:
  // The calls take turns with the slots. To make such a tensor costs as much as a small product.
  at::Tensor& view_of(void* slot) {
    for (at::Tensor& view : call_.products)
      if (view.defined() && view.const_data_ptr() == slot) return view;
    const c10::InferenceMode normal(false);
    std::swap(call_.products.front(), call_.products.back());
    at::Tensor& made = call_.products.front();
    made = at::from_blob(slot, {given_.rows(), given_.columns()}, given_.a.options());
    return made;
  }

  const Arrays& given_;
  CheckedCall& call_;
  std::exception_ptr failure_;
};

void multiply_alone(const Arrays& given, at::Tensor& output) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor a = given.a.reshape({given.rows(), given.a.size(-1)});
  at::Tensor out = output.view({given.rows(), given.columns()});
  if (given.bias.defined())
    at::addmm_out(out, given.bias, a, given.weight);
  else
    at::mm_out(out, a, given.weight);
}

at::Tensor multiply_and_all_reduce(Group& group, const Arrays& given) {
  const int ranks = group.world_size();
  at::DimVector shape(given.a.sizes());
  shape.back() = given.columns();
  at::Tensor output = new_output(given.a, shape);
  if (ranks == 1) {
    multiply_alone(given, output);
    return output;
  }
  CallKey key{reinterpret_cast<intptr_t>(kMatmulAllReduce), ranks, given.mean(),
              given.bias.defined(), static_cast<int64_t>(given.a.scalar_type())};
  key.append(shape.begin(), shape.end());
  const auto call = CheckedCalls::of_this_thread().take(
      key, [&](CheckedCall& call) { prepare(call, given, shape, ranks); });
  const at::Tensor bias = given.bias.defined() ? given.bias.contiguous() : given.bias;
  if (call->exchange.addend.bytes > 0)
    call->exchange.addend.data = const_cast<void*>(bias.const_data_ptr());
  call->bind(nullptr, output.mutable_data_ptr());
  Product product(given, *call);
  call->exchange.produce = [&product](void* slot) { product.write(slot); };
  note_small_matmul(call->exchange.call_name);
  try {
    run(group, call->exchange);
  } catch (...) {
    if (product.failure()) throw Failed(product.failure());
    throw;
  }
  if (bias.defined() && given.mean()) output.add_(bias);
  return output;
}

// Arguments: A, B, bias, reduce op, group name.
void matmul_all_reduce(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const Arrays given{arguments.tensor(0), arguments.tensor(1), arguments.optional_tensor(2),
                     arguments.text(3)};
  at::Tensor output;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    output = multiply_and_all_reduce(*group, given);
  };
  if (!is_served(given) || !guarded(kMatmulAllReduce, arguments, 4, kSync, body))
    return call_python(op, stack);
  arguments.end(std::move(output));
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  m.impl("fused_matmul_all_reduce",
         torch::CppFunction::makeFromBoxedFunction<&matmul_all_reduce>());
}

}  // namespace symm_cp
