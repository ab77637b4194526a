// Merging of attention over parts of the keys, by log-sum-exp.
#pragma once

#include <cstdint>

#include "channel/wire.h"

namespace symm_cp {

// A tensor of rows by batch, row and head; strides are in elements.
struct Rows {
  void* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
};

struct MergeSizes {
  int64_t heads;
  int64_t rows;
  int64_t features;
};

// Merges attention over more keys, `part` and `part_lse`, into rows begin to end of `out` and
// `lse`. Rows are numbered by batch, then position, then head, like the kernel's output in memory;
// the features of a row are contiguous. `lse` and `part_lse` are float64 for float64 parts, else
// float32. Returns false for an unsupported pair of types.
bool merge_rows(const Rows& out, DType out_dtype, const Rows& lse, const Rows& part,
                DType part_dtype, const Rows& part_lse, const MergeSizes& sizes, int64_t begin,
                int64_t end);

}  // namespace symm_cp
