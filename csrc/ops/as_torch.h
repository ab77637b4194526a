// For ops that torch has on GPUs: raises what torch's kernels raise and, while a program for GPUs
// is tested (symm_cp.testing.cuda_on_cpu), refuses what they refuse.
#pragma once

#include "ops/kernels.h"

namespace symm_cp::kernels {

// Runs `body` and turns ValueError and TypeError into RuntimeError: torch checks the arguments of
// these ops by TORCH_CHECK, and programs catch RuntimeError.
template <class Body>
auto raising_as_torch(const Body& body) {
  try {
    return body();
  } catch (const c10::ValueError& error) {
    TORCH_CHECK(false, error.what_without_backtrace());
  } catch (const c10::TypeError& error) {
    TORCH_CHECK(false, error.what_without_backtrace());
  }
}

// `guarded`, with the errors of torch.
inline bool guarded_as_torch(const char* op, const Arguments& arguments, size_t group_name,
                             int channel,
                             c10::function_ref<void(const std::shared_ptr<Group>&)> body) {
  return raising_as_torch([&] {
    return guarded(op, arguments, group_name, channel, [&](const std::shared_ptr<Group>& group) {
      raising_as_torch([&] { body(group); });
    });
  });
}

// Whether arguments are checked as torch's CUDA kernels check them.
bool checks_as_gpus();

// The largest of 16, 8 and 4 bytes that divides a tensor's offset and size; raises an error if the
// tensor cannot be read in elements of at least 4 bytes.
size_t alignment_on_gpus(const char* op, const char* name, const at::Tensor& tensor);

// These do nothing unless `checks_as_gpus()`; they raise RuntimeError.
//
// Kernels that sum take contiguous float32 and bfloat16 in symmetric memory.
void check_sum_on_gpus(const char* op, const at::Tensor& input, const std::string& reduce_op);
// Tensors that are written in the vectors of the input: their alignment must not be smaller.
void check_output_on_gpus(const char* op, const char* name, const at::Tensor& input,
                          const at::Tensor& output);
// Kernels that are compiled for 2, 4 and 8 ranks.
void check_ranks_on_gpus(const char* op, const at::Tensor& input, const Group& group);
void check_scatter_on_gpus(const char* op, const at::Tensor& input, const at::Tensor& output,
                           bool split_last_dim, const Group& group);

}  // namespace symm_cp::kernels
