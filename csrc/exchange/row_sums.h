// Weighted sums of rows that lie anywhere.
#pragma once

#include <cstdint>

#include "channel/wire.h"

namespace symm_cp {

// Sums of `terms` rows of `width` elements each; sums follow one another, and so do the rows and
// factors of a sum.
struct RowSums {
  void* sums;
  const char* const* rows;  // null: none
  const void* factors;      // of the type in which rows are added; null: all are 1
  int64_t terms;
  int64_t width;
  DType dtype;  // floating
};

// Writes the sums from `first` to before `last`, each added in the order of its rows, 16-bit types
// in float32, and rounded once.
void add_rows(const RowSums& given, int64_t first, int64_t last);

}  // namespace symm_cp
