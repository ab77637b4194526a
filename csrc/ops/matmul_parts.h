// Shared by the native fused matmuls: the division of a dimension among the ranks, and the exchange
// before or after the products.
//
// Shapes: x_shard (..., M, K) is gathered along one of its dimensions; a @ weight is (..., M, N).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ops/kernels.h"

namespace symm_cp::matmul_parts {

using kernels::Sizes;

// Whether native kernels compute products. While a strategy is forced, Python computes them: only
// Python has all strategies.
bool may_serve();
// Whether native kernels multiply a dtype; Python multiplies the others, such as integers.
bool has_native_matmul(at::ScalarType dtype);

bool is_plain(const at::Tensor& tensor, at::ScalarType dtype);
bool is_matrix(const at::Tensor& tensor, at::ScalarType dtype, int64_t rows);

at::DimVector with_length(at::IntArrayRef shape, int64_t dim, int64_t length);
// Returns the tensor as a matrix with its last dimension as columns; returns a matrix as it is,
// without a call of the dispatcher.
inline at::Tensor as_matrix(const at::Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.flatten(0, -2);
}
// Like `as_matrix`, but with the rows in the order of `dim`.
at::Tensor as_rows(const at::Tensor& tensor, int64_t dim);
// Returns a contiguous tensor at a multiple of 64 bytes: results must not depend on addresses, see
// tensors/alignment.py.
at::Tensor aligned(const at::Tensor& tensor);

// How a tensor is divided among the ranks: the dimension, and the lengths of all ranks' parts.
struct Division {
  int64_t dim;
  std::vector<int64_t> sizes;

  int64_t length() const { return kernels::total(sizes); }
  bool is_equal() const;
  int64_t begin_of(int rank) const;
};

// These return nullopt if the arguments are inconsistent; Python then raises the error.
std::optional<Division> divided_shard(const at::Tensor& shard, int64_t dim, const Sizes& given,
                                      const Group& group);
std::optional<Division> divided_whole(at::IntArrayRef shape, int64_t dim, const Sizes& given,
                                      int ranks);

// Further details of a call that ranks must agree on, besides the op, the division, and the dtype
// and shape of the exchanged tensor.
struct Detail {
  std::string word;
  at::DimVector numbers;

  void append_to(kernels::CallKey& key) const;
  std::string text() const;  // empty without a word
};

// Gathers a shard as rows of a matrix. Gathering the last dimension makes the rows longer;
// gathering another dimension adds rows, in the order of that dimension.
class Gathered {
 public:
  Gathered(const char* op, const char* argument, const at::Tensor& shard, const Division& division,
           Detail detail = {});

  // With `keep` the result is never the shard itself, even with one rank.
  void gather(Group& group, bool keep);

  at::Tensor rows() const { return as_matrix(whole_); }
  // The gathered tensor, with the shard's order of dimensions.
  at::Tensor whole() const { return as_given(whole_); }
  // Returns `rows`, a product of the gathered rows, with the shard's order of dimensions.
  at::Tensor product(const at::Tensor& rows) const;
  // Rows of a tensor whose dimensions match the gathered tensor's, except the last.
  at::Tensor rows_like(const at::Tensor& tensor) const {
    return by_columns_ ? as_matrix(tensor) : as_rows(tensor, division_.dim);
  }
  bool by_columns() const { return by_columns_; }

 private:
  at::Tensor as_given(const at::Tensor& tensor) const;
  void prepare(kernels::CheckedCall& call, int rank) const;

  const char* op_;
  const char* argument_;
  const Division& division_;
  Detail detail_;
  bool by_columns_;
  at::Tensor shard_;
  at::DimVector shape_;  // of the whole
  at::Tensor whole_;
};

// A sum of products, an addend and a bias; addend and bias may be undefined.
struct Terms {
  std::vector<at::Tensor> lefts, rights;
  at::Tensor addend;
  at::Tensor bias;  // added to every row

  const at::Tensor& like() const { return lefts.empty() ? addend : lefts.front(); }
  // The shape of the sum; empty if the shapes of the terms are inconsistent.
  at::DimVector shape() const;
  // Writes the sum to a matrix. Several 16-bit terms are added in float32 and the sum is rounded
  // once more, as in `Sum` of ops/matmul/products.py. The terms must be matrices.
  void add_up(const at::Tensor& out) const;
};

// Adds up all ranks' `partial`, in place. `detail` is text that ranks must agree on, besides the
// dtype and the shape.
void all_reduce(Group& group, const char* op, const at::Tensor& partial,
                const std::string& reduce_op, const char* detail = "");

// A tensor to reduce-scatter, as one consecutive part per rank. In a part the scattered dimension
// comes first, unless it is the tensor's last dimension, which stays last.
class Scattered {
 public:
  // `shape` is the shape of the whole tensor.
  Scattered(const char* op, at::IntArrayRef shape, const Division& division,
            const std::string& reduce_op, Detail detail = {});

  bool by_columns() const { return by_columns_; }
  // The shapes of the whole, and of a rank's part, as exchanged.
  at::IntArrayRef shape() const { return shape_; }
  at::DimVector shape_of(int rank) const {
    return with_length(shape_, dim_, division_.sizes[rank]);
  }
  // Rows of a tensor whose dimensions match the whole's except the last, in the order of the parts.
  at::Tensor rows_of(const at::Tensor& tensor) const {
    return by_columns_ ? as_matrix(tensor) : as_rows(tensor, division_.dim);
  }
  // Calls `write(part, begin, length)` for the columns of each rank's part in `whole`, a matrix
  // with the rows of the whole. Only if columns are scattered.
  void for_columns(
      const at::Tensor& whole,
      c10::function_ref<void(const at::Tensor& part, int64_t begin, int64_t length)> write) const;
  // Adds up all ranks' tensors; returns this rank's part of the sum.
  at::Tensor reduce(Group& group, const at::Tensor& whole) const;
  // Returns a part in the whole's order of dimensions, contiguous.
  at::Tensor as_given(const at::Tensor& part) const;

 private:
  void prepare(kernels::CheckedCall& call, const at::Tensor& whole, int rank) const;

  const char* op_;
  const Division& division_;
  const std::string& reduce_op_;
  Detail detail_;
  bool by_columns_;
  at::DimVector shape_;
  int64_t dim_;  // the scattered dimension of `shape_`
};

}  // namespace symm_cp::matmul_parts
