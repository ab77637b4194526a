// The steps of attention between the products of a row of scores: from scores to weights, and from
// gradients of weights to gradients of scores.
#pragma once

#include <cstdint>

#include "channel/wire.h"
#include "exchange/float16.h"

namespace symm_cp {

// The terms of a row's scores, by columns of a block of keys, and the columns that the row sees.
template <class A>
struct RowTerms {
  A scale;
  A softcap;            // 0: none
  const A* mask;        // null: none
  int64_t mask_step;    // 1, or 0 for the same number in all columns
  const A* bias;        // null: none
  const uint8_t* kept;  // a bit for each column, 1: dropout keeps it; null: no dropout
  A kept_factor;        // of weights that are kept
  int64_t begin, end;   // the columns that the row sees
  int64_t columns;      // of the block

  bool scales_only() const { return softcap == 0 && mask == nullptr && bias == nullptr; }
};

// The state of a row after some blocks: weights are exp(score - largest), or exp(score) while
// `largest` is -infinity.
template <class A>
struct RowState {
  A largest;
  A sum;
};

// Replaces a row of products by weights, relative to the largest score so far, and 0 in hidden
// columns; Weight is A, in place, or BFloat16. Returns the factor by which the row's earlier
// weights must be multiplied. A score of NaN leaves NaN in the sum and in its weight.
template <class A, class Weight>
A weigh_row(A* scores, Weight* weights, const RowTerms<A>& terms, RowState<A>& state);

// Computes the weights after dropout and the gradients of the products, from the products of
// queries and keys (`scores`) and of output gradients and values (`through`). `inner` is the row's
// sum of output times output gradient, less the gradient of lse. Weight is A or BFloat16; outputs
// may overwrite inputs. The gradient of the bias is added to `grad_bias`, unless that is null.
template <class A, class Weight>
void gradient_row(const A* scores, const A* through, Weight* weights, Weight* grads, A* grad_bias,
                  const RowTerms<A>& terms, A lse, A inner);

// Sums of products of two rows of numbers of one dtype.
template <class A>
A product_of_rows(const void* left, const void* right, DType dtype, int64_t count);

// Writes a row times `factor` as another dtype, plus `share` times the old content of `to`, which
// is not read if `share` is 0.
template <class A>
void store_row(const A* from, A factor, A share, void* to, DType dtype, int64_t count);

// Multiplies a row.
template <class A>
void scale_row(A* row, A factor, int64_t count);

// Pairs rows of 16-bit numbers: out[r / 2][c][r % 2] = in[r][c]. A missing last row is 0, and so
// are rows up to `padded`, an even number.
void interleave_rows(const uint16_t* in, int64_t in_stride, int64_t rows, int64_t columns,
                     uint16_t* out, int64_t out_stride, int64_t padded);

// Copies rows, with zeros up to `out_stride`.
void copy_rows(const uint16_t* in, int64_t in_stride, int64_t rows, int64_t columns, uint16_t* out,
               int64_t out_stride);

// out[c][r] = in[r][c].
void transpose(const uint32_t* in, int64_t in_stride, int64_t rows, int64_t columns, uint32_t* out,
               int64_t out_stride);

// The same for 16-bit numbers, with zeros for the rows up to `padded`.
void transpose(const uint16_t* in, int64_t in_stride, int64_t rows, int64_t columns, uint16_t* out,
               int64_t out_stride, int64_t padded);

// out[c][r] += in[r][c].
void add_transposed(const float* in, int64_t in_stride, int64_t rows, int64_t columns, float* out,
                    int64_t out_stride);

// Transposes pairs of columns: out[c / 2][r][c % 2] = in[r][c]. Columns from `columns` to `padded`,
// an even number, are 0.
void transpose_pairs(const uint16_t* in, int64_t in_stride, int64_t rows, int64_t columns,
                     uint16_t* out, int64_t out_stride, int64_t padded);

}  // namespace symm_cp
