// The products of attention's blocks with torch's GEMMs, in the inputs' own dtype. packed.h has
// classes with the same functions for processors that multiply small blocks.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include <cstdint>
#include <memory>
#include <new>

#include "attention/terms.h"

namespace symm_cp {

// Memory at a multiple of 64 bytes, not initialised.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : data_(static_cast<T*>(::operator new[](
            static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T), std::align_val_t{64}))) {}
  T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* data) const { ::operator delete[](data, std::align_val_t{64}); }
  };
  std::unique_ptr<T[], Free> data_;
};

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

struct TileSizes {
  int64_t samples, heads, groups, rows, keys, features, value_features;

  int64_t group_of(int64_t head) const { return head / (heads / groups); }
};

// Returns a row-major (rows, columns) view of memory that it does not own.
template <class A>
at::Tensor matrix(const A* data, int64_t rows, int64_t columns, int64_t stride) {
  constexpr at::ScalarType kType = std::is_same_v<A, double> ? at::kDouble : at::kFloat;
  return at::from_blob(const_cast<A*>(data), {rows, columns}, {stride, 1}, kType);
}

// c = a b, plus c when `adds`.
inline void multiply(const at::Tensor& a, const at::Tensor& b, bool adds, at::Tensor c) {
  // torch exports no GEMM of these types; these functions add the least around it.
  if (adds)
    at::cpu::addmm_out(c, c, a, b, 1, 1);
  else
    at::cpu::mm_out(c, a, b);
}

// Rows of a block under a narrow band.
inline constexpr int64_t kBandRows = 64;

// The tensors that the products of a pass read.
template <class T>
struct TileInputs {
  TileSizes sizes;
  Strided<const T> query, key, value, grad_out;
};

template <class A>
struct TileGradients {
  Strided<A> query, key, value;
};

// The forward pass in the inputs' own dtype: weights overwrite scores.
template <class A>
class PlainForward {
 public:
  using Number = A;
  using Weight = A;
  static constexpr int64_t kAlign = 1;  // of the number of columns
  static constexpr int64_t kStart = 1;  // of the first column
  static constexpr int64_t kBandRows = symm_cp::kBandRows;

  // What all tasks share.
  struct Shared {
    Shared(const TileInputs<A>& inputs, bool) : in(inputs) {}
    const TileInputs<A>& in;
  };

  PlainForward(const Shared& shared, int64_t) : in_(shared.in) {}

  void enter_rows(int64_t b, int64_t h, int64_t first, int64_t count) {
    b_ = b, g_ = in_.sizes.group_of(h), rows_ = count;
    query_ = matrix(in_.query.at(b, h, first), count, in_.sizes.features, in_.query.row);
  }

  // The products of the rows with keys from `first` on.
  void scores(int64_t first, int64_t columns, A* out, int64_t stride) {
    multiply(query_, keys(in_.key, in_.sizes.features, first, columns).t(), false,
             matrix(out, rows_, columns, stride));
  }

  // Adds the weighted values from `first` on, or sets `out` to them.
  void add_values(int64_t first, int64_t columns, const A* weights, int64_t stride, bool adds,
                  A* out) {
    const int64_t features = in_.sizes.value_features;
    multiply(matrix(weights, rows_, columns, stride), keys(in_.value, features, first, columns),
             adds, matrix(out, rows_, features, features));
  }

 private:
  at::Tensor keys(const Strided<const A>& of, int64_t features, int64_t first,
                  int64_t count) const {
    return matrix(of.at(b_, g_, first), count, features, of.row);
  }

  const TileInputs<A>& in_;
  at::Tensor query_;
  int64_t b_ = 0, g_ = 0, rows_ = 0;
};

// The backward pass in the inputs' own dtype: weights overwrite scores, and the gradients of the
// products overwrite the gradients of the weights.
template <class A>
class PlainBackward {
 public:
  using Number = A;
  using Weight = A;
  static constexpr int64_t kAlign = 1;
  static constexpr int64_t kStart = 1;
  static constexpr int64_t kBandRows = symm_cp::kBandRows;
  static constexpr bool kRolls = false;  // whether it has `roll_keys`

  PlainBackward(const TileInputs<A>& inputs, const TileGradients<A>& grads, int64_t b, int64_t g,
                int64_t, int64_t)
      : in_(inputs), grads_(grads), b_(b), g_(g) {}

  void enter_keys(int64_t first, int64_t) { key_ = first; }

  void enter_rows(int64_t h, int64_t first, int64_t count) {
    const TileSizes& sizes = in_.sizes;
    rows_ = count;
    query_ = matrix(in_.query.at(b_, h, first), count, sizes.features, in_.query.row);
    grad_out_ =
        matrix(in_.grad_out.at(b_, h, first), count, sizes.value_features, in_.grad_out.row);
    grad_query_ = matrix(grads_.query.at(b_, h, first), count, sizes.features, grads_.query.row);
  }

  // Products of queries and keys, and of output gradients and values; columns are counted from the
  // first key entered.
  void products(int64_t first, int64_t columns, A* scores, A* through, int64_t stride) {
    const TileSizes& sizes = in_.sizes;
    multiply(query_, keys(in_.key, sizes.features, first, columns).t(), false,
             matrix(scores, rows_, columns, stride));
    multiply(grad_out_, keys(in_.value, sizes.value_features, first, columns).t(), false,
             matrix(through, rows_, columns, stride));
  }

  void add_gradients(int64_t first, int64_t columns, const A* weights, const A* back,
                     int64_t stride) {
    const TileSizes& sizes = in_.sizes;
    const at::Tensor back_matrix = matrix(back, rows_, columns, stride);
    multiply(matrix(weights, rows_, columns, stride).t(), grad_out_, true,
             keys(grads_.value, sizes.value_features, first, columns));
    multiply(back_matrix.t(), query_, true, keys(grads_.key, sizes.features, first, columns));
    multiply(back_matrix, keys(in_.key, sizes.features, first, columns), true, grad_query_);
  }

  void leave_keys() {}

 private:
  template <class T>
  at::Tensor keys(const Strided<T>& of, int64_t features, int64_t first, int64_t count) const {
    return matrix<A>(of.at(b_, g_, key_ + first), count, features, of.row);
  }

  const TileInputs<A>& in_;
  const TileGradients<A>& grads_;
  at::Tensor query_, grad_out_, grad_query_;
  int64_t b_, g_, key_ = 0, rows_ = 0;
};

}  // namespace symm_cp
