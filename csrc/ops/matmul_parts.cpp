#include "ops/matmul_parts.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/movedim.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <sstream>
#include <utility>

namespace symm_cp::matmul_parts {

using namespace kernels;

namespace {

// Returns -1 for a dimension that is out of range.
int64_t wrapped(int64_t dim, int64_t dims) {
  if (dim < -dims || dim >= dims) return -1;
  return dim < 0 ? dim + dims : dim;
}

at::Tensor moved(const at::Tensor& tensor, int64_t from, int64_t to) {
  return from == to ? tensor : tensor.movedim(from, to);
}

CallKey key_of(const char* op, const Group& group, at::ScalarType dtype, at::IntArrayRef shape,
               const Division& division, const Detail& detail) {
  CallKey key{reinterpret_cast<intptr_t>(op), group.world_size(), group.rank(), division.dim,
              static_cast<int64_t>(dtype)};
  key.append(shape.begin(), shape.end());
  key.append(division.sizes.begin(), division.sizes.end());
  detail.append_to(key);
  return key;
}

std::string name_whole(const char* op, at::ScalarType dtype, at::IntArrayRef shape,
                       const char* argument, const Division& division, const std::string& more) {
  const std::string uneven = name_sizes(division.sizes);
  std::string detail = std::string(argument) + "=" + std::to_string(division.dim);
  if (!more.empty()) detail += " " + more;
  if (!uneven.empty()) detail += " " + uneven;
  if (uneven.empty()) return name_call(op, dtype, shape, detail);
  return name_call(op, dtype, with_length(shape, division.dim, division.length()), detail);
}

}  // namespace

bool may_serve() { return serves_small_matmuls() && std::getenv("SYMM_CP_WAY") == nullptr; }

bool has_native_matmul(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
         dtype == at::kDouble;
}

bool is_plain(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.scalar_type() == dtype;
}

bool is_matrix(const at::Tensor& tensor, at::ScalarType dtype, int64_t rows) {
  return is_plain(tensor, dtype) && tensor.dim() == 2 && tensor.size(0) == rows;
}

at::DimVector with_length(at::IntArrayRef shape, int64_t dim, int64_t length) {
  at::DimVector sizes(shape);
  sizes[dim] = length;
  return sizes;
}

at::Tensor as_rows(const at::Tensor& tensor, int64_t dim) {
  return as_matrix(moved(tensor, dim, 0));
}

at::Tensor aligned(const at::Tensor& tensor) {
  constexpr uintptr_t kAlignment = 64;
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (tensor.is_contiguous() && address % kAlignment == 0) {
    // A contiguous tensor may have any stride along a dimension of length 1, and kernels may
    // mistake such a stride for another layout.
    const at::DimVector strides = c10::contiguous_strides(tensor.sizes());
    return tensor.strides() == strides ? tensor : tensor.as_strided(tensor.sizes(), strides);
  }
  return new_output(tensor, tensor.sizes()).copy_(tensor);
}

bool Division::is_equal() const {
  return std::adjacent_find(sizes.begin(), sizes.end(), std::not_equal_to<>()) == sizes.end();
}

int64_t Division::begin_of(int rank) const {
  return std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
}

std::optional<Division> divided_shard(const at::Tensor& shard, int64_t dim, const Sizes& given,
                                      const Group& group) {
  dim = wrapped(dim, shard.dim());
  if (dim < 0 || shard.dim() < 2) return {};
  Division division{dim,
                    given ? *given : std::vector<int64_t>(group.world_size(), shard.size(dim))};
  const auto& sizes = division.sizes;
  if (sizes.size() != static_cast<size_t>(group.world_size())) return {};
  if (*std::min_element(sizes.begin(), sizes.end()) < 0) return {};
  if (sizes[group.rank()] != shard.size(dim)) return {};
  return division;
}

std::optional<Division> divided_whole(at::IntArrayRef shape, int64_t dim, const Sizes& given,
                                      int ranks) {
  const auto dims = static_cast<int64_t>(shape.size());
  dim = wrapped(dim, dims);
  if (dim < 0 || dims < 2) return {};
  if (!given && shape[dim] % ranks != 0) return {};
  Division division{dim, given ? *given : std::vector<int64_t>(ranks, shape[dim] / ranks)};
  const auto& sizes = division.sizes;
  if (sizes.size() != static_cast<size_t>(ranks) || division.length() != shape[dim]) return {};
  if (*std::min_element(sizes.begin(), sizes.end()) < 0) return {};
  return division;
}

void Detail::append_to(CallKey& key) const {
  key.append(word.begin(), word.end());
  key.append(numbers.begin(), numbers.end());
}

std::string Detail::text() const {
  std::ostringstream text;
  text << word;
  if (!numbers.empty()) text << at::IntArrayRef(numbers);
  return text.str();
}

// --- Gathered ------------------------------------------------------------------------------------

Gathered::Gathered(const char* op, const char* argument, const at::Tensor& shard,
                   const Division& division, Detail detail)
    : op_(op), argument_(argument), division_(division), detail_(std::move(detail)) {
  by_columns_ = division.dim == shard.dim() - 1;
  shard_ = by_columns_ ? shard : moved(shard, division.dim, 0);
  shape_ = with_length(shard_.sizes(), by_columns_ ? shard.dim() - 1 : 0, division.length());
}

void Gathered::gather(Group& group, bool keep) {
  if (group.world_size() == 1) {
    whole_ = keep ? new_output(shard_, shape_).copy_(shard_) : aligned(shard_);
    return;
  }
  const auto call = CheckedCalls::of_this_thread().take(
      key_of(op_, group, shard_.scalar_type(), shard_.sizes(), division_, detail_),
      [&](CheckedCall& call) { prepare(call, group.rank()); });
  const at::Tensor input = shard_.contiguous();
  whole_ = new_output(shard_, shape_);
  call->bind(input.const_data_ptr(), whole_.mutable_data_ptr());
  note_small_matmul(call->exchange.call_name);
  run(group, call->exchange);
}

at::Tensor Gathered::product(const at::Tensor& rows) const {
  if (shape_.size() == 2) return as_given(rows);
  return as_given(rows.view(with_length(shape_, shape_.size() - 1, rows.size(1))));
}

at::Tensor Gathered::as_given(const at::Tensor& tensor) const {
  return by_columns_ ? tensor : moved(tensor, 0, division_.dim);
}

// A shard is one run of bytes per row, or one run for all rows.
void Gathered::prepare(CheckedCall& call, int rank) const {
  const auto size = static_cast<int64_t>(shard_.element_size());
  const int64_t rows = by_columns_ ? c10::multiply_integers(shape_.begin(), shape_.end() - 1) : 1;
  const int64_t inner =
      by_columns_ ? size : size * c10::multiply_integers(shape_.begin() + 1, shape_.end());
  const int64_t pitch = division_.length() * inner;
  call.exchange.kind = ExchangeKind::kAllGather;
  call.exchange.call_name = name_whole(op_, shard_.scalar_type(), as_given(shard_).sizes(),
                                       argument_, division_, detail_.text());
  call.add_input(0, rows * division_.sizes[rank] * inner);
  int64_t begin = 0;
  for (const int64_t length : division_.sizes) {
    const int64_t row = length * inner;
    call.add_output(begin, rows * row, rows > 1 ? row : 0, pitch);
    begin += row;
  }
}

// --- Terms ---------------------------------------------------------------------------------------

at::DimVector Terms::shape() const {
  if (lefts.size() != rights.size() || (lefts.empty() && !addend.defined())) return {};
  const at::ScalarType dtype = like().scalar_type();
  at::DimVector shape;
  if (addend.defined()) shape = at::DimVector(addend.sizes());
  if (addend.defined() && !is_plain(addend, dtype)) return {};
  for (size_t i = 0; i < lefts.size(); ++i) {
    const at::Tensor &left = lefts[i], &right = rights[i];
    if (!is_plain(left, dtype) || left.dim() < 2) return {};
    if (!is_matrix(right, dtype, left.sizes().back())) return {};
    auto product = with_length(left.sizes(), left.dim() - 1, right.size(1));
    if (shape.empty()) shape = product;
    if (shape != product) return {};
  }
  if (bias.defined() && !(is_plain(bias, dtype) && bias.sizes() == at::IntArrayRef(shape.back())))
    return {};
  return shape;
}

void Terms::add_up(const at::Tensor& out) const {
  const bool bias_alone = bias.defined() && lefts.empty();
  const bool narrow = out.element_size() == 2 && lefts.size() + addend.defined() + bias_alone > 1;
  const at::Tensor sum = narrow ? pooled_empty(out.sizes(), out.options().dtype(at::kFloat)) : out;
  const at::Tensor part = narrow ? new_output(out, out.sizes()) : at::Tensor();
  for (size_t i = 0; i < lefts.size(); ++i) {
    if (i > 0 && !narrow) {
      sum.addmm_(lefts[i], rights[i]);
      continue;
    }
    at::Tensor product = narrow ? part : sum;
    if (i == 0 && bias.defined())
      at::addmm_out(product, bias, lefts[i], rights[i]);
    else
      at::mm_out(product, lefts[i], rights[i]);
    if (narrow) i == 0 ? sum.copy_(part) : sum.add_(part);
  }
  if (addend.defined()) {  // a gradient, of any strides
    const at::Tensor added = addend.reshape(sum.sizes());
    lefts.empty() ? sum.copy_(added) : sum.add_(added);
  }
  if (bias_alone) sum.add_(bias);
  if (narrow) out.copy_(sum);
}

void all_reduce(Group& group, const char* op, const at::Tensor& partial,
                const std::string& reduce_op, const char* detail) {
  const int ranks = group.world_size();
  if (ranks == 1) return;
  const bool mean = reduce_op == "avg";
  CallKey key{reinterpret_cast<intptr_t>(op), reinterpret_cast<intptr_t>(detail), ranks, mean};
  add_tensor(key, partial);
  const auto call = CheckedCalls::of_this_thread().take(key, [&](CheckedCall& call) {
    const at::ScalarType dtype = partial.scalar_type();
    call.exchange.call_name = name_call(op, dtype, partial.sizes(), reduce_op + detail);
    set_reduction(call.exchange, dtype, mean ? ReduceOp::kAvg : ReduceOp::kSum);
    call.set_all_reduce(static_cast<int64_t>(partial.nbytes()), ranks);
  });
  call->bind(partial.const_data_ptr(), partial.mutable_data_ptr());
  note_small_matmul(call->exchange.call_name);
  run(group, call->exchange);
}

// --- Scattered -----------------------------------------------------------------------------------

Scattered::Scattered(const char* op, at::IntArrayRef shape, const Division& division,
                     const std::string& reduce_op, Detail detail)
    : op_(op), division_(division), reduce_op_(reduce_op), detail_(std::move(detail)) {
  const auto dims = static_cast<int64_t>(shape.size());
  by_columns_ = division.dim == dims - 1;
  shape_ = at::DimVector(shape);
  if (!by_columns_) {
    shape_.erase(shape_.begin() + division.dim);
    shape_.insert(shape_.begin(), shape[division.dim]);
  }
  dim_ = by_columns_ ? dims - 1 : 0;
}

void Scattered::for_columns(
    const at::Tensor& whole,
    c10::function_ref<void(const at::Tensor& part, int64_t begin, int64_t length)> write) const {
  const int64_t rows = c10::multiply_integers(shape_.begin(), shape_.end() - 1);
  const at::Tensor numbers = whole.view(-1);
  int64_t begin = 0;
  for (const int64_t length : division_.sizes) {
    write(numbers.narrow(0, rows * begin, rows * length).view({rows, length}), begin, length);
    begin += length;
  }
}

at::Tensor Scattered::reduce(Group& group, const at::Tensor& whole) const {
  at::Tensor output = new_output(whole, shape_of(group.rank()));
  CallKey key = key_of(op_, group, whole.scalar_type(), shape_, division_, detail_);
  key.push_back(reduce_op_ == "avg");
  const auto call = CheckedCalls::of_this_thread().take(
      key, [&](CheckedCall& call) { prepare(call, whole, group.rank()); });
  call->bind(whole.const_data_ptr(), output.mutable_data_ptr());
  note_small_matmul(call->exchange.call_name);
  run(group, call->exchange);
  return output;
}

void Scattered::prepare(CheckedCall& call, const at::Tensor& whole, int rank) const {
  const at::ScalarType dtype = whole.scalar_type();
  const int64_t bytes = c10::multiply_integers(shape_) / shape_[dim_] * whole.element_size();
  at::DimVector shape = shape_;
  if (!by_columns_) {
    shape.erase(shape.begin());
    shape.insert(shape.begin() + division_.dim, shape_[0]);
  }
  const std::string more = detail_.word.empty() ? reduce_op_ : reduce_op_ + " " + detail_.text();
  call.exchange.kind = ExchangeKind::kReduceScatter;
  call.exchange.call_name = name_whole(op_, dtype, shape, "scatter_dim", division_, more);
  set_reduction(call.exchange, dtype, reduce_op_ == "avg" ? ReduceOp::kAvg : ReduceOp::kSum);
  int64_t begin = 0;
  for (const int64_t length : division_.sizes) {
    call.add_input(begin, length * bytes);
    begin += length * bytes;
  }
  call.add_output(0, division_.sizes[rank] * bytes);
}

at::Tensor Scattered::as_given(const at::Tensor& part) const {
  return by_columns_ || division_.dim == 0 ? part : part.movedim(0, division_.dim).contiguous();
}

}  // namespace symm_cp::matmul_parts
