// Tensors for large results, in memory that is reused (blocks.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace symm_cp {

// Results of fewer bytes come from torch's allocator, as the C library reuses small memory itself.
inline constexpr int64_t kPooledBytes = int64_t{1} << 20;

// Like at::empty: a contiguous tensor, uninitialised unless torch's deterministic mode fills it. A
// large tensor on CPU is made of blocks, and its memory behaves like other tensors' memory (it may
// be resized, moved to shared memory, viewed); its address is a multiple of 2 MiB.
at::Tensor pooled_empty(at::IntArrayRef shape, const at::TensorOptions& options);

}  // namespace symm_cp
