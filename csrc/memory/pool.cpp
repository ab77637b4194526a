#include "memory/pool.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include "memory/blocks.h"

namespace symm_cp {

namespace {

void report_block(void* address, int64_t bytes) {
  if (!c10::memoryProfilingEnabled()) return;
  const BlockUsage usage = Blocks::instance().usage();
  c10::reportMemoryUsageToProfiler(address, bytes, usage.in_use, usage.in_use + usage.kept,
                                   c10::Device(c10::kCPU));
}

void give_block(void* address) {
  const auto size = static_cast<int64_t>(Blocks::instance().give(address));
  report_block(address, -size);
}

// A storage keeps its allocator and calls it again when it is resized, so this must handle any
// size.
class BlockAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const bool large = bytes >= static_cast<size_t>(kPooledBytes);
    const Block block = large ? Blocks::instance().take(bytes) : Block{};
    if (block.address == nullptr) return c10::GetCPUAllocator()->allocate(bytes);
    report_block(block.address, static_cast<int64_t>(block.size));
    return {block.address, block.address, give_block, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

bool fills_memory() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

at::Tensor new_result(const at::Tensor& like, at::IntArrayRef shape, at::ScalarType dtype) {
  return pooled_empty(shape, like.options().dtype(dtype));
}

}  // namespace

at::Tensor pooled_empty(at::IntArrayRef shape, const at::TensorOptions& options) {
  static BlockAllocator& allocator = *new BlockAllocator;
  if (!options.device().is_cpu() || options.layout() != c10::kStrided || options.requires_grad() ||
      options.pinned_memory() || fills_memory())
    return at::empty(shape, options);
  const auto bytes =
      c10::multiply_integers(shape) * static_cast<int64_t>(options.dtype().itemsize());
  // Bypasses the dispatcher, which takes longer than the allocation.
  return at::detail::empty_generic(shape,
                                   bytes < kPooledBytes ? c10::GetCPUAllocator() : &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   c10::typeMetaToScalarType(options.dtype()), std::nullopt);
}

TORCH_LIBRARY_FRAGMENT(symm_cp, m) {
  // An empty tensor on the device of `like`, for the result of a kernel.
  m.def("new_result(Tensor like, int[] shape, ScalarType dtype) -> Tensor",
        torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, new_result));
}

// The result has no autograd link to `like`.
TORCH_LIBRARY_IMPL(symm_cp, Autograd, m) {
  m.impl("new_result", torch::CppFunction::makeFallthrough());
}

}  // namespace symm_cp
