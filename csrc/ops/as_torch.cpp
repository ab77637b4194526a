// Source of the rules: torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu.
#include "ops/as_torch.h"

#include <algorithm>
#include <atomic>

namespace symm_cp {

namespace {

std::atomic<bool> as_gpus{false};

}  // namespace

namespace kernels {

bool checks_as_gpus() { return as_gpus.load(std::memory_order_relaxed); }

size_t alignment_on_gpus(const char* op, const char* name, const at::Tensor& tensor) {
  const auto least = std::max<size_t>(4, tensor.element_size());
  const size_t bytes = static_cast<size_t>(tensor.storage_offset()) * tensor.element_size() |
                       static_cast<size_t>(tensor.numel()) * tensor.element_size() | 16;
  const size_t alignment = bytes & -bytes;  // the lowest bit
  TORCH_CHECK(alignment >= least, op, ": ", name, " has ", tensor.numel(), " elements of ",
              tensor.element_size(), " bytes at offset ", tensor.storage_offset(),
              "; on GPUs its offset and its size must be divisible by ", least, " bytes");
  return alignment;
}

void check_sum_on_gpus(const char* op, const at::Tensor& input, const std::string& reduce_op) {
  if (!checks_as_gpus()) return;
  check_dense(op, "input", input);
  check_sum(op, "reduce_op", reduce_op);
  check_symmetric(op, "input", input);
  if (input.numel() == 0) return;
  alignment_on_gpus(op, "input", input);
  const at::ScalarType dtype = input.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(dtype == at::kFloat || dtype == at::kBFloat16, op, ": input is ",
                              name_dtype(dtype),
                              ", torch's kernel on GPUs takes torch.float32 and torch.bfloat16");
}

void check_output_on_gpus(const char* op, const char* name, const at::Tensor& input,
                          const at::Tensor& output) {
  if (!checks_as_gpus() || input.numel() == 0) return;
  const size_t least = alignment_on_gpus(op, "input", input);
  TORCH_CHECK(alignment_on_gpus(op, name, output) >= least, op, ": ", name, " at offset ",
              output.storage_offset(), " must be aligned to ", least,
              " bytes on GPUs, as input is");
}

void check_ranks_on_gpus(const char* op, const at::Tensor& input, const Group& group) {
  if (!checks_as_gpus() || input.numel() == 0) return;
  const int ranks = group.world_size();
  TORCH_CHECK(ranks == 2 || ranks == 4 || ranks == 8, op,
              ": torch's kernel on GPUs takes 2, 4 or 8 ", "ranks, the group has ", ranks);
}

void check_scatter_on_gpus(const char* op, const at::Tensor& input, const at::Tensor& output,
                           bool split_last_dim, const Group& group) {
  if (!checks_as_gpus()) return;
  check_sum_on_gpus(op, input, "sum");
  TORCH_CHECK(split_last_dim || input.dim() == 1, op, ": input has ", input.dim(),
              " dimensions; on GPUs it must have 1 unless split_last_dim is set");
  if (input.numel() == 0) return;
  const auto vectors = static_cast<int64_t>(alignment_on_gpus(op, "input", input)) /
                       input.element_size() * group.world_size();
  const int64_t length = split_last_dim ? input.size(-1) : input.numel();
  TORCH_CHECK(length % vectors == 0, op, ": ", length,
              " elements are scattered; on GPUs their "
              "number must be divisible by ",
              vectors, ", one vector for each rank");
  check_output_on_gpus(op, "output", input, output);
  check_ranks_on_gpus(op, input, group);
}

}  // namespace kernels

}  // namespace symm_cp

extern "C" {

void symm_cp_check_as_gpus(int on) { symm_cp::as_gpus = on != 0; }

}  // extern "C"
