// What the native fused matmuls share: how a dimension is divided among the ranks, and the exchange
// before or after their products.
//
// Shapes: x_shard (..., M, K) is gathered along one of its dimensions; a @ weight is (..., M, N).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ops/kernels.h"

namespace symm_cp::matmul_parts {

using kernels::Sizes;

// Whether native kernels compute products: not while a way is forced, which Python has all of.
bool may_serve();
// Whether they do with a dtype; Python has the others, as integers.
bool has_native_matmul(at::ScalarType dtype);

bool is_plain(const at::Tensor& tensor, at::ScalarType dtype);
bool is_matrix(const at::Tensor& tensor, at::ScalarType dtype, int64_t rows);

at::DimVector with_length(at::IntArrayRef shape, int64_t dim, int64_t length);
// The tensor as a matrix with its last dimension, whose rows are in the order of `dim`.
at::Tensor as_rows(const at::Tensor& tensor, int64_t dim);
// Returns a contiguous tensor at a multiple of 64 bytes: results must not depend on addresses, see
// tensors/alignment.py.
at::Tensor aligned(const at::Tensor& tensor);

// The part of a tensor along a dimension that travels, and those of all ranks.
struct Division {
  int64_t dim;
  std::vector<int64_t> sizes;

  int64_t length() const { return kernels::total(sizes); }
  bool is_equal() const;
  int64_t begin_of(int rank) const;
};

// Nothing where the arguments do not fit each other: Python says what is wrong with them.
std::optional<Division> divided_shard(const at::Tensor& shard, int64_t dim, const Sizes& given,
                                      const Group& group);
std::optional<Division> divided_whole(at::IntArrayRef shape, int64_t dim, const Sizes& given,
                                      int ranks);

// What ranks must agree on besides the op, the division, and the dtype and shape of what travels.
struct Detail {
  std::string word;
  at::DimVector numbers;

  void append_to(kernels::CallKey& key) const;
  std::string text() const;  // empty without a word
};

// Gathers a shard as rows of a matrix: along its last dimension the rows become longer, along
// another one there are more of them, in the order of that dimension.
class Gathered {
 public:
  Gathered(const char* op, const char* argument, const at::Tensor& shard, const Division& division,
           Detail detail = {});

  // `keep`: the result must not be the shard itself, where there is one rank.
  void gather(Group& group, bool keep);

  at::Tensor rows() const { return shape_.size() == 2 ? whole_ : whole_.flatten(0, -2); }
  // What was gathered, as the shard's dimensions are.
  at::Tensor whole() const { return as_given(whole_); }
  // A product of the rows, likewise.
  at::Tensor product(const at::Tensor& rows) const;
  // Rows of a tensor that has the gathered one's dimensions but for the last.
  at::Tensor rows_like(const at::Tensor& tensor) const {
    return by_columns_ ? tensor.flatten(0, -2) : as_rows(tensor, division_.dim);
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

// Products that are added up, with an addend and a bias; either may be undefined.
struct Terms {
  std::vector<at::Tensor> lefts, rights;
  at::Tensor addend;
  at::Tensor bias;  // is added to every row

  const at::Tensor& like() const { return lefts.empty() ? addend : lefts.front(); }
  // The shape of the sum; empty where the terms do not fit each other.
  at::DimVector shape() const;
  // Writes the sum to a matrix, in float32 for several 16-bit terms, and rounds it once more: as
  // `Sum` of ops/matmul/products.py does. The terms must be matrices.
  void add_up(const at::Tensor& out) const;
};

// Adds up what all ranks have in `partial`, in its place. `detail`: what ranks must agree on beside
// the dtype and the shape.
void all_reduce(Group& group, const char* op, const at::Tensor& partial,
                const std::string& reduce_op, const char* detail = "");

// A whole that is scattered: the ranks' parts one behind the other, each with the scattered
// dimension in front or, where that is the last one, at the end.
class Scattered {
 public:
  // `shape`: of the whole.
  Scattered(const char* op, at::IntArrayRef shape, const Division& division,
            const std::string& reduce_op, Detail detail = {});

  bool by_columns() const { return by_columns_; }
  // Of the whole, and of a rank's part, as they travel.
  at::IntArrayRef shape() const { return shape_; }
  at::DimVector shape_of(int rank) const {
    return with_length(shape_, dim_, division_.sizes[rank]);
  }
  // Rows of a tensor that has the whole's dimensions but for the last, in the order of the parts.
  at::Tensor rows_of(const at::Tensor& tensor) const {
    return by_columns_ ? tensor.flatten(0, -2) : as_rows(tensor, division_.dim);
  }
  // Calls `write(part, begin, length)` for the columns of each rank's part in `whole`, a matrix
  // with as many rows as the whole. Only where columns are scattered.
  void for_columns(
      const at::Tensor& whole,
      c10::function_ref<void(const at::Tensor& part, int64_t begin, int64_t length)> write) const;
  // Adds up what all ranks have; returns this rank's part.
  at::Tensor reduce(Group& group, const at::Tensor& whole) const;
  // A part as the whole's dimensions are, contiguous.
  at::Tensor as_given(const at::Tensor& part) const;

 private:
  void prepare(kernels::CheckedCall& call, const at::Tensor& whole, int rank) const;

  const char* op_;
  const Division& division_;
  const std::string& reduce_op_;
  Detail detail_;
  bool by_columns_;
  at::DimVector shape_;
  int64_t dim_;  // the scattered one of `shape_`
};

}  // namespace symm_cp::matmul_parts
