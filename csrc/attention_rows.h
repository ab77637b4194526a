// What attention does to a row of scores between its products: from scores to weights, and from
// what flows back to weights to what flows back to scores.
#pragma once

#include <cstdint>

#include "float16.h"
#include "wire.h"

namespace symm_cp {

// What is added to the scores of a row, by columns of a block of keys, and which columns it sees.
template <class A>
struct RowTerms {
  A scale;
  A softcap;            // 0: none
  const A* mask;        // null: none
  int64_t mask_step;    // 1, or 0 for the same number in all columns
  const A* bias;        // null: none
  const uint8_t* kept;  // a bit for each column, which dropout keeps; null: no dropout
  A kept_factor;        // of weights that are kept
  int64_t begin, end;   // the columns that the row sees
  int64_t columns;      // of the block

  bool scales_only() const { return softcap == 0 && mask == nullptr && bias == nullptr; }
};

// What a row has seen so far: weights are exp(score - largest), or exp(score) when there is none.
template <class A>
struct RowState {
  A largest;
  A sum;
};

// Replaces a row of products by weights, relative to the largest score so far, and 0 in columns
// that it does not see; Weight is A, in place, or BFloat16. Returns what the row's earlier weights
// must be multiplied by. A score of NaN leaves NaN in the sum and in its weight.
template <class A, class Weight>
A weigh_row(A* scores, Weight* weights, const RowTerms<A>& terms, RowState<A>& state);

// From products of queries and keys (`scores`) and of what flows back and values (`through`): the
// weights after dropout, and what flows back to the products. `inner` is what the latter has in
// common in a row. A, or BFloat16; in place or not. What flows back to the bias goes to
// `grad_bias`, unless that is null.
template <class A, class Weight>
void gradient_row(const A* scores, const A* through, Weight* weights, Weight* grads, A* grad_bias,
                  const RowTerms<A>& terms, A lse, A inner);

// Sums of products of two rows of numbers of one dtype.
template <class A>
A product_of_rows(const void* left, const void* right, DType dtype, int64_t count);

// Writes a row times `factor` as another dtype; adds it to what is there times `share`, which is
// not read if that is 0.
template <class A>
void store_row(const A* from, A factor, A share, void* to, DType dtype, int64_t count);

// Multiplies a row.
template <class A>
void scale_row(A* row, A factor, int64_t count);

// Rows of 16-bit numbers to pairs of rows: out[r / 2][c][r % 2] = in[r][c]. A missing last row is
// 0, and so are rows up to `padded`, an even number.
void interleave_rows(const uint16_t* in, int64_t in_stride, int64_t rows, int64_t columns,
                     uint16_t* out, int64_t out_stride, int64_t padded);

// Rows, with zeros up to `out_stride`.
void copy_rows(const uint16_t* in, int64_t in_stride, int64_t rows, int64_t columns, uint16_t* out,
               int64_t out_stride);

// out[c][r] = in[r][c].
void transpose(const uint32_t* in, int64_t in_stride, int64_t rows, int64_t columns, uint32_t* out,
               int64_t out_stride);

// The same of 16-bit numbers, with zeros for the rows up to `padded`.
void transpose(const uint16_t* in, int64_t in_stride, int64_t rows, int64_t columns, uint16_t* out,
               int64_t out_stride, int64_t padded);

// out[c][r] += in[r][c].
void add_transposed(const float* in, int64_t in_stride, int64_t rows, int64_t columns, float* out,
                    int64_t out_stride);

// Pairs of columns to pairs of rows: out[c / 2][r][c % 2] = in[r][c]. Columns from `columns` to
// `padded`, an even number, are 0.
void transpose_pairs(const uint16_t* in, int64_t in_stride, int64_t rows, int64_t columns,
                     uint16_t* out, int64_t out_stride, int64_t padded);

}  // namespace symm_cp
