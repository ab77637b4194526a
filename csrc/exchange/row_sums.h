// Weighted sums of rows that lie anywhere, and the gradients of such sums.
#pragma once

#include <cstdint>

#include "channel/wire.h"

namespace symm_cp {

// Sums of `terms` rows of `width` elements each; the sums are contiguous, and so are the entries of
// each sum in `rows` and `factors`.
struct RowSums {
  void* sums;
  const char* const* rows;  // null entries are skipped
  const void* factors;      // of the type in which rows are added; null: all are 1
  int64_t terms;
  int64_t width;
  DType dtype;  // floating
};

// Writes the sums from `first` to before `last`, each added in the order of its rows, 16-bit types
// in float32, and rounded once.
void add_rows(const RowSums& given, int64_t first, int64_t last);

// Contiguous rows of `width` elements each, which are multiplied by their factors.
struct WeighedRows {
  void* rows;
  const char* others;  // rows of `width` elements, `pitch` bytes apart
  int64_t pitch;
  const void* factors;  // one for each row, of the type in which rows are added
  void* dots;           // one for each row, of the same type
  int64_t width;
  DType dtype;  // floating
};

// For the rows from `first` to before `last`: adds row . other to its dot, then rounds row * factor
// to the row. Reads each row from memory once.
void weigh_rows(const WeighedRows& given, int64_t first, int64_t last);

}  // namespace symm_cp
