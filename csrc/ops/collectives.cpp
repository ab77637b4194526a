// The ops that all-reduce or reduce-scatter in the calling thread, from the dispatcher to memory.
// Registered boxed, because the C++ signatures of torch's own registrations differ between its
// builds. The gradients are in gradients.cpp.
#include <ATen/MemoryOverlap.h>
#include <torch/library.h>

#include "ops/as_torch.h"
#include "ops/kernels.h"

namespace symm_cp {

namespace {

using namespace kernels;
using torch::jit::Stack;

constexpr const char* kOneShot = "one_shot_all_reduce";
constexpr const char* kOneShotCopy = "one_shot_all_reduce_copy";
constexpr const char* kTwoShot = "two_shot_all_reduce_";
constexpr const char* kTwoShotOut = "two_shot_all_reduce_out";
constexpr const char* kReduceScatter = "reduce_scatter_out";

// `output` is contiguous, with the input's shape and dtype. With `in_parts` it may be the input.
void all_reduce(const char* op, Group& group, const at::Tensor& given, std::string_view reduce_by,
                const at::Tensor& output, bool in_parts = false) {
  const at::ScalarType dtype = given.scalar_type();
  const ReduceOp reduce_op = check_reduce_op(op, "input", dtype, reduce_by);
  at::Tensor input = given.contiguous();
  bool in_place = input.is_same(given) && is_symmetric(group, input);
  const bool onto_itself = input.const_data_ptr() == output.const_data_ptr();
  // Peers read a symmetric input while this rank writes its output, so the two may share memory
  // only if the call reduces in parts.
  if (overlap(input, output) && (in_place ? !in_parts : !onto_itself)) {
    input = input.clone();
    in_place = false;
  }
  const int ranks = group.world_size();
  CallKey key{reinterpret_cast<intptr_t>(op), ranks, static_cast<int64_t>(reduce_op), in_place,
              onto_itself};
  add_tensor(key, input);
  const auto call = CheckedCalls::of_this_thread().take(key, [&](CheckedCall& call) {
    call.exchange.call_name = name_call(op, dtype, input.sizes(), std::string(reduce_by));
    set_reduction(call.exchange, dtype, reduce_op);
    const auto bytes = static_cast<int64_t>(input.nbytes());
    call.set_all_reduce(bytes, ranks, in_place && onto_itself);
  });
  call->bind(input.const_data_ptr(), output.mutable_data_ptr());
  call->exchange.in_place = in_place;
  run(group, call->exchange);
}

// Compiled programs call ops of our own: their inputs need not lie in symmetric memory.
bool is_torchs(const c10::OperatorHandle& op) {
  return op.schema().name().find("::_") == std::string::npos;
}

void one_shot(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  at::Tensor output;
  if (!guarded_as_torch(kOneShot, arguments, 2, kSync, [&](const std::shared_ptr<Group>& group) {
        const at::Tensor& input = arguments.tensor(0);
        if (is_torchs(op)) check_sum_on_gpus(kOneShot, input, arguments.text(1));
        output = new_output(input, input.sizes());
        all_reduce(kOneShot, *group, input, arguments.text(1), output);
      }))
    return call_python(op, stack);
  arguments.end(std::move(output));
}

void all_reduce_out(const char* name, bool in_parts, const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const at::Tensor output = arguments.tensor(3);
  if (!guarded_as_torch(name, arguments, 2, kSync, [&](const std::shared_ptr<Group>& group) {
        const at::Tensor& input = arguments.tensor(0);
        check_sum_on_gpus(name, input, arguments.text(1));
        check_out(name, "out", output, input.sizes(), input.scalar_type());
        if (in_parts) {
          check_output_on_gpus(name, "out", input, output);
          check_ranks_on_gpus(name, input, *group);
        }
        all_reduce(name, *group, input, arguments.text(1), output);
      }))
    return call_python(op, stack);
  arguments.end(output);
}

void one_shot_out(const c10::OperatorHandle& op, Stack* stack) {
  all_reduce_out(kOneShot, false, op, stack);
}

void two_shot_out(const c10::OperatorHandle& op, Stack* stack) {
  all_reduce_out(kTwoShotOut, true, op, stack);
}

// torch's ops copy the input to the buffer, where the peers read it. Here the group has its own
// memory for the exchange, so the buffer is only checked.
void check_buffer(const at::Tensor& buffer, const at::Tensor& input, const std::string& reduce_op) {
  kernels::check_dense(kOneShotCopy, "symm_buffer", buffer);
  TORCH_CHECK_VALUE(buffer.scalar_type() == input.scalar_type() && buffer.numel() >= input.numel(),
                    kOneShotCopy, ": symm_buffer is ", name_dtype(buffer.scalar_type()), " ",
                    buffer.sizes(), ", needs ", name_dtype(input.scalar_type()),
                    " and room for local_input of shape ", input.sizes());
  check_sum_on_gpus(kOneShotCopy, buffer, reduce_op);
  if (!checks_as_gpus()) return;
  kernels::check_dense(kOneShotCopy, "local_input", input);
  TORCH_CHECK(buffer.sizes() == input.sizes(), kOneShotCopy, ": local_input has shape ",
              input.sizes(), ", on GPUs it must be symm_buffer's: ", buffer.sizes());
  check_output_on_gpus(kOneShotCopy, "local_input", buffer, input);
  check_output_on_gpus(kOneShotCopy, "symm_buffer", input, buffer);  // equal alignments
}

void one_shot_copy(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  at::Tensor output;
  if (!guarded_as_torch(kOneShotCopy, arguments, 3, kSync,
                        [&](const std::shared_ptr<Group>& group) {
                          const at::Tensor& input = arguments.tensor(1);
                          check_buffer(arguments.tensor(0), input, arguments.text(2));
                          output = new_output(input, input.sizes());
                          all_reduce(kOneShotCopy, *group, input, arguments.text(2), output);
                        }))
    return call_python(op, stack);
  arguments.end(std::move(output));
}

void one_shot_copy_out(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const at::Tensor output = arguments.tensor(4);
  if (!guarded_as_torch(
          kOneShotCopy, arguments, 3, kSync, [&](const std::shared_ptr<Group>& group) {
            const at::Tensor& input = arguments.tensor(1);
            check_buffer(arguments.tensor(0), input, arguments.text(2));
            check_out(kOneShotCopy, "out", output, input.sizes(), input.scalar_type());
            all_reduce(kOneShotCopy, *group, input, arguments.text(2), output);
          }))
    return call_python(op, stack);
  arguments.end(output);
}

void two_shot_in_place(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const at::Tensor input = arguments.tensor(0);
  if (!guarded_as_torch(kTwoShot, arguments, 2, kSync, [&](const std::shared_ptr<Group>& group) {
        TORCH_CHECK_VALUE(at::has_internal_overlap(input) != at::MemOverlap::Yes, kTwoShot,
                          ": input is written to, it must not be expanded: sizes ", input.sizes(),
                          ", strides ", input.strides());
        check_sum_on_gpus(kTwoShot, input, arguments.text(1));
        const at::Tensor dense = input.contiguous();
        all_reduce(kTwoShot, *group, dense, arguments.text(1), dense, true);
        if (!dense.is_same(input)) input.copy_(dense);
      }))
    return call_python(op, stack);
  arguments.end(input);
}

// torch's multicast kernels sum in the switch between GPUs, and take contiguous tensors in
// symmetric memory. Here the ranks read each other's memory.
constexpr const char* kMultimem = "multimem_all_reduce_";
constexpr const char* kMultimemOneShot = "multimem_one_shot_all_reduce";

void check_multimem(const char* op, const Arguments& arguments) {
  kernels::check_dense(op, "input", arguments.tensor(0));
  check_symmetric(op, "input", arguments.tensor(0));
  check_sum(op, "reduce_op", arguments.text(1));
  check_sum_on_gpus(op, arguments.tensor(0), arguments.text(1));
}

void multimem_in_place(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const at::Tensor input = arguments.tensor(0);
  if (!guarded_as_torch(kMultimem, arguments, 2, kSync, [&](const std::shared_ptr<Group>& group) {
        check_multimem(kMultimem, arguments);
        all_reduce(kMultimem, *group, input, "sum", input, true);
      }))
    return call_python(op, stack);
  arguments.end(input);
}

// With a fourth argument, that is the output.
void multimem_one_shot(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  at::Tensor output = arguments.count() == 4 ? arguments.tensor(3) : at::Tensor();
  if (!guarded_as_torch(
          kMultimemOneShot, arguments, 2, kSync, [&](const std::shared_ptr<Group>& group) {
            const at::Tensor& input = arguments.tensor(0);
            check_multimem(kMultimemOneShot, arguments);
            if (output.defined())
              check_out(kMultimemOneShot, "out", output, input.sizes(), input.scalar_type());
            else
              output = new_output(input, input.sizes());
            all_reduce(kMultimemOneShot, *group, input, "sum", output);
          }))
    return call_python(op, stack);
  arguments.end(std::move(output));
}

// The sizes of the output of a reduce-scatter.
at::DimVector scattered_sizes(const at::Tensor& input, bool split_last_dim, int ranks) {
  check_has_dims(kReduceScatter, "input", input);
  check_reduce_op(kReduceScatter, "input", input.scalar_type(), "sum");
  const int64_t dim = split_last_dim ? input.dim() - 1 : 0;
  TORCH_CHECK_VALUE(input.size(dim) % ranks == 0, kReduceScatter, ": dimension dim=", dim,
                    " has length ", input.size(dim), ", which is not divisible by world size ",
                    ranks);
  at::DimVector sizes(input.sizes());
  sizes[dim] /= ranks;
  return sizes;
}

// Makes the columns of each rank's part contiguous.
at::Tensor columns_together(const at::Tensor& input, int ranks) {
  return input.unflatten(-1, {ranks, input.size(-1) / ranks}).movedim(-2, 0).contiguous();
}

void reduce_scatter(Group& group, const at::Tensor& given, bool split_last_dim, bool as_torchs,
                    at::Tensor& output) {
  const int ranks = group.world_size();
  const auto sizes = scattered_sizes(given, split_last_dim, ranks);
  if (output.defined()) {
    check_out(kReduceScatter, "output", output, sizes, given.scalar_type());
  } else {
    output = new_output(given, sizes);
  }
  if (as_torchs) check_scatter_on_gpus(kReduceScatter, given, output, split_last_dim, group);
  const bool by_columns = split_last_dim && given.dim() > 1;
  at::Tensor input = by_columns ? columns_together(given, ranks) : given.contiguous();
  bool in_place = !by_columns && input.is_same(given) && is_symmetric(group, input);
  if (overlap(input, output)) {
    input = input.clone();
    in_place = false;
  }
  CallKey key{reinterpret_cast<intptr_t>(kReduceScatter), ranks, split_last_dim};
  add_tensor(key, given);
  const auto call = CheckedCalls::of_this_thread().take(key, [&](CheckedCall& call) {
    const int64_t part = static_cast<int64_t>(output.nbytes());
    call.exchange.kind = ExchangeKind::kReduceScatter;
    call.exchange.call_name =
        name_call(kReduceScatter, given.scalar_type(), given.sizes(),
                  split_last_dim ? "split_last_dim=True" : "split_last_dim=False");
    set_reduction(call.exchange, given.scalar_type(), ReduceOp::kSum);
    for (int rank = 0; rank < ranks; ++rank) call.add_input(rank * part, part);
    call.add_output(0, part);
  });
  call->bind(input.const_data_ptr(), output.mutable_data_ptr());
  call->exchange.in_place = in_place;
  run(group, call->exchange);
}

// With a fourth argument, that is the output.
void reduce_scatter_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const bool to_argument = op.schema().arguments().size() == 4;
  at::Tensor output = to_argument ? arguments.tensor(3) : at::Tensor();
  if (!guarded_as_torch(
          kReduceScatter, arguments, 1, kSync, [&](const std::shared_ptr<Group>& group) {
            reduce_scatter(*group, arguments.tensor(0), arguments.flag(2), to_argument, output);
          }))
    return call_python(op, stack);
  arguments.end(std::move(output));
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  for (const char* name : {"one_shot_all_reduce", "_one_shot_all_reduce", "_all_reduce"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&one_shot>());
  m.impl("one_shot_all_reduce_out", torch::CppFunction::makeFromBoxedFunction<&one_shot_out>());
  m.impl("one_shot_all_reduce_copy", torch::CppFunction::makeFromBoxedFunction<&one_shot_copy>());
  m.impl("one_shot_all_reduce_copy_out",
         torch::CppFunction::makeFromBoxedFunction<&one_shot_copy_out>());
  m.impl("two_shot_all_reduce_", torch::CppFunction::makeFromBoxedFunction<&two_shot_in_place>());
  m.impl("two_shot_all_reduce_out", torch::CppFunction::makeFromBoxedFunction<&two_shot_out>());
  m.impl("multimem_all_reduce_", torch::CppFunction::makeFromBoxedFunction<&multimem_in_place>());
  for (const char* name : {"multimem_one_shot_all_reduce", "multimem_one_shot_all_reduce_out"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&multimem_one_shot>());
  for (const char* name : {"reduce_scatter_out", "_reduce_scatter"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&reduce_scatter_kernel>());
}

}  // namespace symm_cp
