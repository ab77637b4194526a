// Fused all-gather-matmul, matmul-reduce-scatter and their gradients, of matrices that take less
// time to travel than Python takes to pipeline them: gather, then one matmul, or one matmul, then
// scatter. The kernels in Python have the larger matrices, and say what is wrong with arguments.
//
// Shapes: x_shard (..., M, K) is gathered along one of its dimensions; a @ weight is (..., M, N).
// Which kernel runs is decided by what is the same on all ranks: the dtype and the whole shape of
// what travels, not by the other dimension of a product, which may differ from rank to rank.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/movedim.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>

#include "ops/kernels.h"

namespace symm_cp::fused_matmuls {

namespace {

using namespace kernels;
using torch::jit::Stack;

constexpr const char* kGather = "fused_all_gather_matmul";
constexpr const char* kScatter = "fused_matmul_reduce_scatter";
constexpr const char* kScatterSum = "_fused_matmuls_reduce_scatter";
constexpr const char* kWeightGrad = "_fused_all_gather_weight_grad";
constexpr const char* kScatterBackward = "_fused_matmul_reduce_scatter_backward";

// The largest whole that travels in one go. A gather of so many bytes takes 50 to 100 us; the steps
// of a pipeline in Python, which would hide it, take longer.
constexpr int64_t kWholeBytes = kPieceBytes;

bool is_served(at::ScalarType dtype, int64_t whole_elements) {
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf && dtype != at::kDouble)
    return false;
  const int64_t bytes = whole_elements * static_cast<int64_t>(c10::elementSize(dtype));
  if (bytes == 0 || bytes > kWholeBytes) return false;
  return serves_small_matmuls() && std::getenv("SYMM_CP_WAY") == nullptr;
}

bool is_plain(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.scalar_type() == dtype;
}

bool is_matrix(const at::Tensor& tensor, at::ScalarType dtype, int64_t rows) {
  return is_plain(tensor, dtype) && tensor.dim() == 2 && tensor.size(0) == rows;
}

// Returns -1 for a dimension that is out of range.
int64_t wrapped(int64_t dim, int64_t dims) {
  if (dim < -dims || dim >= dims) return -1;
  return dim < 0 ? dim + dims : dim;
}

at::Tensor moved(const at::Tensor& tensor, int64_t from, int64_t to) {
  return from == to ? tensor : tensor.movedim(from, to);
}

at::Tensor as_rows(const at::Tensor& tensor, int64_t dim) {
  return moved(tensor, dim, 0).flatten(0, -2);
}

at::DimVector with_length(at::IntArrayRef shape, int64_t dim, int64_t length) {
  at::DimVector sizes(shape);
  sizes[dim] = length;
  return sizes;
}

// Returns a contiguous tensor at a multiple of 64 bytes: results must not depend on addresses, see
// tensors/alignment.py.
at::Tensor aligned(const at::Tensor& tensor) {
  constexpr uintptr_t kAlignment = 64;
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  if (tensor.is_contiguous() && address % kAlignment == 0) return tensor.view(tensor.sizes());
  return new_output(tensor, tensor.sizes()).copy_(tensor);
}

// The part of a tensor along a dimension that travels, and those of all ranks.
struct Division {
  int64_t dim;
  std::vector<int64_t> sizes;

  int64_t length() const { return total(sizes); }
};

// Nothing where the kernel in Python is needed.
std::optional<Division> division_of_shard(const at::Tensor& shard, int64_t dim, const Sizes& given,
                                          const Group& group) {
  dim = wrapped(dim, shard.dim());
  if (dim < 0 || shard.dim() < 2) return {};
  Division division{dim,
                    given ? *given : std::vector<int64_t>(group.world_size(), shard.size(dim))};
  const auto& sizes = division.sizes;
  if (sizes.size() != static_cast<size_t>(group.world_size())) return {};
  if (*std::min_element(sizes.begin(), sizes.end()) < 0) return {};
  if (sizes[group.rank()] != shard.size(dim)) return {};
  const auto whole = with_length(shard.sizes(), dim, division.length());
  if (!is_plain(shard, shard.scalar_type())) return {};
  if (!is_served(shard.scalar_type(), c10::multiply_integers(whole))) return {};
  return division;
}

std::optional<Division> division_of_whole(at::IntArrayRef shape, at::ScalarType dtype, int64_t dim,
                                          const Sizes& given, int ranks) {
  const auto dims = static_cast<int64_t>(shape.size());
  dim = wrapped(dim, dims);
  if (dim < 0 || dims < 2) return {};
  if (!given && shape[dim] % ranks != 0) return {};
  Division division{dim, given ? *given : std::vector<int64_t>(ranks, shape[dim] / ranks)};
  const auto& sizes = division.sizes;
  if (sizes.size() != static_cast<size_t>(ranks) || division.length() != shape[dim]) return {};
  if (*std::min_element(sizes.begin(), sizes.end()) < 0) return {};
  if (!is_served(dtype, c10::multiply_integers(shape))) return {};
  return division;
}

CallKey key_of(const char* op, const Group& group, at::ScalarType dtype, at::IntArrayRef shape,
               const Division& division) {
  CallKey key{reinterpret_cast<intptr_t>(op), group.world_size(), group.rank(), division.dim,
              static_cast<int64_t>(dtype)};
  key.append(shape.begin(), shape.end());
  key.append(division.sizes.begin(), division.sizes.end());
  return key;
}

std::string name_whole(const char* op, at::ScalarType dtype, at::IntArrayRef shape,
                       const char* argument, const Division& division, const std::string& more) {
  const std::string uneven = name_sizes(division.sizes);
  std::string detail = std::string(argument) + "=" + std::to_string(division.dim);
  if (!more.empty()) detail += " " + more;
  if (!uneven.empty()) detail += " " + uneven;
  return name_call(op, dtype, with_length(shape, division.dim, division.length()), detail);
}

// Gathers a shard as rows of a matrix: along its last dimension the rows become longer, along
// another one there are more of them, in the order of that dimension.
class Gathered {
 public:
  Gathered(const char* op, const char* argument, const at::Tensor& shard, const Division& division)
      : op_(op), argument_(argument), division_(division) {
    by_columns_ = division.dim == shard.dim() - 1;
    shard_ = by_columns_ ? shard : moved(shard, division.dim, 0);
    shape_ = with_length(shard_.sizes(), by_columns_ ? shard.dim() - 1 : 0, division.length());
  }

  void gather(Group& group, bool keep) {
    if (group.world_size() == 1) {
      whole_ = keep ? new_output(shard_, shape_).copy_(shard_) : aligned(shard_);
      return;
    }
    const auto call = CheckedCalls::of_this_thread().take(
        key_of(op_, group, shard_.scalar_type(), shard_.sizes(), division_),
        [&](CheckedCall& call) { prepare(call, group.rank()); });
    const at::Tensor input = shard_.contiguous();
    whole_ = new_output(shard_, shape_);
    call->bind(input.const_data_ptr(), whole_.mutable_data_ptr());
    note_small_matmul(call->exchange.call_name);
    run(group, call->exchange);
  }

  at::Tensor rows() const { return shape_.size() == 2 ? whole_ : whole_.flatten(0, -2); }
  // What was gathered, as the shard's dimensions are.
  at::Tensor whole() const { return as_given(whole_); }
  // A product of the rows, likewise.
  at::Tensor product(const at::Tensor& rows) const {
    if (shape_.size() == 2) return as_given(rows);
    return as_given(rows.view(with_length(shape_, shape_.size() - 1, rows.size(1))));
  }
  int64_t columns() const { return shape_.back(); }
  // Rows of a tensor that has the gathered one's dimensions but for the last.
  at::Tensor rows_like(const at::Tensor& tensor) const {
    return by_columns_ ? tensor.flatten(0, -2) : as_rows(tensor, division_.dim);
  }
  bool by_columns() const { return by_columns_; }

 private:
  at::Tensor as_given(const at::Tensor& tensor) const {
    return by_columns_ ? tensor : moved(tensor, 0, division_.dim);
  }

  // A shard is a run of bytes for each row, or one for all rows.
  void prepare(CheckedCall& call, int rank) const {
    const auto size = static_cast<int64_t>(shard_.element_size());
    const int64_t rows = by_columns_ ? c10::multiply_integers(shape_.begin(), shape_.end() - 1) : 1;
    const int64_t inner =
        by_columns_ ? size : size * c10::multiply_integers(shape_.begin() + 1, shape_.end());
    const int64_t pitch = division_.length() * inner;
    call.exchange.kind = ExchangeKind::kAllGather;
    call.exchange.call_name =
        name_whole(op_, shard_.scalar_type(), as_given(shard_).sizes(), argument_, division_, "");
    call.add_input(0, rows * division_.sizes[rank] * inner);
    int64_t begin = 0;
    for (const int64_t length : division_.sizes) {
      const int64_t row = length * inner;
      call.add_output(begin, rows * row, rows > 1 ? row : 0, pitch);
      begin += row;
    }
  }

  const char* op_;
  const char* argument_;
  const Division& division_;
  bool by_columns_;
  at::Tensor shard_;
  at::DimVector shape_;  // of the whole
  at::Tensor whole_;
};

at::Tensor multiplied(const at::Tensor& a, const at::Tensor& b) {
  at::Tensor out = new_output(a, {a.size(0), b.size(1)});
  return at::mm_out(out, a, b);
}

// Writes to memory that is laid out by columns if `transposed`.
at::Tensor multiplied(const at::Tensor& a, const at::Tensor& b, bool transposed) {
  if (!transposed) return multiplied(a, b);
  at::Tensor out = new_output(a, {b.size(1), a.size(0)}).t();
  return at::mm_out(out, a, b);
}

// --- fused_all_gather_matmul ---------------------------------------------------------------------

struct GatherArguments {
  at::Tensor x_shard;
  std::vector<at::Tensor> weights;
  int64_t dim;
  Sizes sizes;
  bool return_gathered;
};

bool fits(const GatherArguments& given, const Division& division) {
  const at::Tensor& shard = given.x_shard;
  const bool by_columns = division.dim == shard.dim() - 1;
  const int64_t inner = by_columns ? division.length() : shard.sizes().back();
  return std::all_of(given.weights.begin(), given.weights.end(), [&](const at::Tensor& weight) {
    return is_matrix(weight, shard.scalar_type(), inner);
  });
}

struct GatherResults {
  std::optional<at::Tensor> gathered;
  std::vector<at::Tensor> products;
};

std::optional<GatherResults> all_gather_matmul(Group& group, const GatherArguments& given) {
  const auto division = division_of_shard(given.x_shard, given.dim, given.sizes, group);
  if (!division || !fits(given, *division)) return {};
  const at::AutoDispatchBelowADInplaceOrView below;
  Gathered gathered(kGather, "gather_dim", given.x_shard, *division);
  gathered.gather(group, given.return_gathered);
  GatherResults results;
  after_exchange(group, kGather, [&] {
    const at::Tensor rows = gathered.rows();
    for (const at::Tensor& weight : given.weights)
      results.products.push_back(gathered.product(multiplied(rows, weight)));
    if (given.return_gathered) results.gathered = gathered.whole();
  });
  return results;
}

// Arguments: A, Bs, gather_dim, group name, [sizes, rank,] return_A.
void all_gather_matmul_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const size_t count = op.schema().arguments().size();
  std::optional<GatherResults> results;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    results = all_gather_matmul(
        *group, {arguments.tensor(0), arguments.tensors(1), arguments.number(2),
                 count > 5 ? arguments.sizes(4, *group) : Sizes(), arguments.flag(count - 1)});
  };
  if (!guarded(kGather, arguments, 3, kSync, body) || !results) return call_python(op, stack);
  arguments.end(std::move(results->gathered), std::move(results->products));
}

// --- fused_matmul_reduce_scatter -----------------------------------------------------------------

struct ScatterArguments {
  const char* op;
  std::vector<at::Tensor> lefts, rights;
  at::Tensor addend;  // undefined: none
  std::string reduce_op;
  int64_t dim;
  Sizes sizes;

  const at::Tensor& like() const { return lefts.empty() ? addend : lefts.front(); }
};

// The shape of the sum; empty where the arguments do not fit each other.
at::DimVector shape_of_sum(const ScatterArguments& given) {
  if (given.lefts.size() != given.rights.size()) return {};
  if (given.lefts.empty() && !given.addend.defined()) return {};
  const at::ScalarType dtype = given.like().scalar_type();
  at::DimVector shape;
  if (given.addend.defined()) shape = at::DimVector(given.addend.sizes());
  if (given.addend.defined() && !is_plain(given.addend, dtype)) return {};
  for (size_t i = 0; i < given.lefts.size(); ++i) {
    const at::Tensor &left = given.lefts[i], &right = given.rights[i];
    if (!is_plain(left, dtype) || left.dim() < 2) return {};
    if (!is_matrix(right, dtype, left.sizes().back())) return {};
    auto product = with_length(left.sizes(), left.dim() - 1, right.size(1));
    if (shape.empty()) shape = product;
    if (shape != product) return {};
  }
  return shape;
}

// Writes the sum of the products and the addend, in float32 for 16-bit types, and rounds it once
// more: as `Sum` of ops/products.py does.
void add_up(const at::Tensor& out, const std::vector<at::Tensor>& lefts,
            const std::vector<at::Tensor>& rights, const at::Tensor& addend) {
  const bool narrow = out.element_size() == 2 && lefts.size() + addend.defined() > 1;
  const at::Tensor sum = narrow ? pooled_empty(out.sizes(), out.options().dtype(at::kFloat)) : out;
  at::Tensor part = narrow ? new_output(out, out.sizes()) : at::Tensor();
  bool empty = true;
  for (size_t i = 0; i < lefts.size(); ++i) {
    if (narrow) {
      at::mm_out(part, lefts[i], rights[i]);
      empty ? sum.copy_(part) : sum.add_(part);
    } else if (empty) {
      at::Tensor total = sum;
      at::mm_out(total, lefts[i], rights[i]);
    } else {
      sum.addmm_(lefts[i], rights[i]);
    }
    empty = false;
  }
  if (addend.defined()) empty ? sum.copy_(addend.view_as(sum)) : sum.add_(addend.view_as(sum));
  if (narrow) out.copy_(sum);
}

// The sum as the ranks' parts, one behind the other.
class Parts {
 public:
  Parts(const ScatterArguments& given, at::IntArrayRef shape, const Division& division)
      : given_(given), division_(division) {
    const auto dims = static_cast<int64_t>(shape.size());
    by_columns_ = division.dim == dims - 1;
    shape_ = at::DimVector(shape);
    if (!by_columns_) {
      shape_.erase(shape_.begin() + division.dim);
      shape_.insert(shape_.begin(), shape[division.dim]);
    }
    dim_ = by_columns_ ? dims - 1 : 0;
  }

  // The shape of a rank's part, with the scattered dimension in front or at the end.
  at::DimVector shape_of(int rank) const {
    return with_length(shape_, dim_, division_.sizes[rank]);
  }

  // Writes this rank's contribution to the parts of all ranks.
  void add_up_to(const at::Tensor& sum) const {
    std::vector<at::Tensor> lefts;
    for (const at::Tensor& left : given_.lefts) lefts.push_back(rows_of(left));
    const at::Tensor addend = given_.addend.defined() ? rows_of(given_.addend) : at::Tensor();
    if (!by_columns_ || division_.sizes.size() == 1) {
      const at::Tensor out = sum.view({-1, shape_.back()});
      return add_up(out, lefts, given_.rights, addend.defined() ? addend.contiguous() : addend);
    }
    const int64_t rows = c10::multiply_integers(shape_.begin(), shape_.end() - 1);
    const at::Tensor numbers = sum.view(-1);
    int64_t begin = 0;
    for (const int64_t length : division_.sizes) {
      std::vector<at::Tensor> rights;
      for (const at::Tensor& right : given_.rights)
        rights.push_back(right.narrow(1, begin, length));
      const at::Tensor part = numbers.narrow(0, rows * begin, rows * length).view({rows, length});
      add_up(part, lefts, rights,
             addend.defined() ? addend.narrow(1, begin, length).contiguous() : addend);
      begin += length;
    }
  }

  void prepare(CheckedCall& call, int rank, const std::string& name) const {
    const at::ScalarType dtype = given_.like().scalar_type();
    const int64_t bytes =
        c10::multiply_integers(shape_) / shape_[dim_] * given_.like().element_size();
    call.exchange.kind = ExchangeKind::kReduceScatter;
    call.exchange.call_name = name;
    set_reduction(call.exchange, dtype,
                  given_.reduce_op == "avg" ? ReduceOp::kAvg : ReduceOp::kSum);
    int64_t begin = 0;
    for (const int64_t length : division_.sizes) {
      call.add_input(begin, length * bytes);
      begin += length * bytes;
    }
    call.add_output(0, division_.sizes[rank] * bytes);
  }

  at::Tensor as_given(const at::Tensor& part) const {
    return by_columns_ || division_.dim == 0 ? part : part.movedim(0, division_.dim).contiguous();
  }
  at::IntArrayRef shape() const { return shape_; }

 private:
  at::Tensor rows_of(const at::Tensor& tensor) const {
    return by_columns_ ? tensor.flatten(0, -2) : as_rows(tensor, division_.dim);
  }

  const ScatterArguments& given_;
  const Division& division_;
  bool by_columns_;
  at::DimVector shape_;
  int64_t dim_;  // the scattered one of `shape_`
};

// Undefined where the kernel in Python is needed.
at::Tensor matmul_reduce_scatter(Group& group, const ScatterArguments& given) {
  const bool mean = given.reduce_op == "avg";
  const at::DimVector shape = shape_of_sum(given);
  if (shape.empty() || (!mean && given.reduce_op != "sum")) return {};
  const at::ScalarType dtype = given.like().scalar_type();
  const auto division = division_of_whole(shape, dtype, given.dim, given.sizes, group.world_size());
  if (!division) return {};
  const at::AutoDispatchBelowADInplaceOrView below;
  const Parts parts(given, shape, *division);
  at::Tensor output = new_output(given.like(), parts.shape_of(group.rank()));
  if (group.world_size() == 1) {
    parts.add_up_to(output);
    return parts.as_given(output);
  }
  CallKey key = key_of(given.op, group, dtype, shape, *division);
  key.push_back(mean);
  const auto call = CheckedCalls::of_this_thread().take(key, [&](CheckedCall& call) {
    parts.prepare(call, group.rank(),
                  name_whole(given.op, dtype, shape, "scatter_dim", *division, given.reduce_op));
  });
  const at::Tensor sum = new_output(given.like(), parts.shape());
  recorded(group, Kind::kProduce, given.op, [&] { parts.add_up_to(sum); });
  call->bind(sum.const_data_ptr(), output.mutable_data_ptr());
  note_small_matmul(call->exchange.call_name);
  run(group, call->exchange);
  return parts.as_given(output);
}

// Arguments: A, B, reduce_op, scatter_dim, group name, [sizes, rank].
void matmul_reduce_scatter_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  at::Tensor output;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    output = matmul_reduce_scatter(*group, {kScatter,
                                            {arguments.tensor(0)},
                                            {arguments.tensor(1)},
                                            {},
                                            arguments.text(2),
                                            arguments.number(3),
                                            arguments.sizes(5, *group)});
  };
  if (!guarded(kScatter, arguments, 4, kSync, body) || !output.defined())
    return call_python(op, stack);
  arguments.end(std::move(output));
}

// Arguments: As, Bs, addend, reduce_op, scatter_dim, group name, sizes, rank.
void matmuls_reduce_scatter_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  at::Tensor output;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    output = matmul_reduce_scatter(*group, {kScatterSum, arguments.tensors(0), arguments.tensors(1),
                                            arguments.optional_tensor(2), arguments.text(3),
                                            arguments.number(4), arguments.sizes(6, *group)});
  };
  if (!guarded(kScatterSum, arguments, 5, kSync, body) || !output.defined())
    return call_python(op, stack);
  arguments.end(std::move(output));
}

// --- gradients -----------------------------------------------------------------------------------

struct WeightGradArguments {
  at::Tensor x_shard;
  std::vector<at::Tensor> grads;
  int64_t dim;
  Sizes sizes;
  bool transposed;
};

// gathered(x_shard)^T @ grad, for each gradient.
std::optional<std::vector<at::Tensor>> weight_grad(Group& group, const WeightGradArguments& given) {
  const auto division = division_of_shard(given.x_shard, given.dim, given.sizes, group);
  if (!division) return {};
  const at::AutoDispatchBelowADInplaceOrView below;
  Gathered gathered(kWeightGrad, "gather_dim", given.x_shard, *division);
  gathered.gather(group, /*keep=*/false);
  std::vector<at::Tensor> results;
  after_exchange(group, kWeightGrad, [&] {
    const at::Tensor left = gathered.rows().t();
    for (const at::Tensor& grad : given.grads)
      results.push_back(multiplied(left, gathered.rows_like(grad), given.transposed));
  });
  return results;
}

// Arguments: A_shard, grads, gather_dim, group name, sizes, rank, transposed.
void weight_grad_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  std::optional<std::vector<at::Tensor>> results;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    results = weight_grad(*group, {arguments.tensor(0), arguments.tensors(1), arguments.number(2),
                                   arguments.sizes(4, *group), arguments.flag(6)});
  };
  if (!guarded(kWeightGrad, arguments, 3, kSync, body) || !results) return call_python(op, stack);
  arguments.end(std::move(*results));
}

struct ScatterBackwardArguments {
  at::Tensor grad_shard, a, weight;
  bool mean;
  int64_t dim;
  bool need_a, need_weight;
  Sizes sizes;
};

// Whether a gradient should be laid out by columns, as the weight is: see ops/matmul_grad.py.
bool is_transposed(const at::Tensor& weight) {
  return weight.t().is_contiguous() && !weight.is_contiguous();
}

// gathered(grad) @ weight^T and a^T @ gathered(grad).
std::optional<std::pair<at::Tensor, at::Tensor>> scatter_backward(
    Group& group, const ScatterBackwardArguments& given) {
  const auto division = division_of_shard(given.grad_shard, given.dim, given.sizes, group);
  if (!division) return {};
  const at::AutoDispatchBelowADInplaceOrView below;
  Gathered gathered(kScatterBackward, "dim", given.grad_shard, *division);
  gathered.gather(group, /*keep=*/false);
  std::pair<at::Tensor, at::Tensor> results{given.a.new_empty({0, 0}),
                                            given.weight.new_empty({0, 0})};
  after_exchange(group, kScatterBackward, [&] {
    const at::Tensor rows = gathered.rows();
    if (given.need_a)
      results.first = gathered.product(multiplied(rows, given.weight.t())).contiguous();
    if (given.need_weight)
      results.second =
          multiplied(gathered.rows_like(given.a).t(), rows, is_transposed(given.weight));
    for (at::Tensor* grad : {&results.first, &results.second})
      if (given.mean && grad->numel() > 0) grad->div_(group.world_size());
  });
  return results;
}

// Arguments: grad, A, B, reduce_op, scatter_dim, group name, need_a, need_b, sizes, rank.
void scatter_backward_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  std::optional<std::pair<at::Tensor, at::Tensor>> results;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    results = scatter_backward(
        *group,
        {arguments.tensor(0), arguments.tensor(1), arguments.tensor(2), arguments.text(3) == "avg",
         arguments.number(4), arguments.flag(6), arguments.flag(7), arguments.sizes(8, *group)});
  };
  if (!guarded(kScatterBackward, arguments, 5, kSync, body) || !results)
    return call_python(op, stack);
  arguments.end(std::move(results->first), std::move(results->second));
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  for (const char* name : {kGather, "_all_gather_matmul_split"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&all_gather_matmul_kernel>());
  for (const char* name : {kScatter, "_matmul_reduce_scatter_split"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&matmul_reduce_scatter_kernel>());
  m.impl(kScatterSum, torch::CppFunction::makeFromBoxedFunction<&matmuls_reduce_scatter_kernel>());
  m.impl(kWeightGrad, torch::CppFunction::makeFromBoxedFunction<&weight_grad_kernel>());
  m.impl(kScatterBackward, torch::CppFunction::makeFromBoxedFunction<&scatter_backward_kernel>());
}

}  // namespace symm_cp::fused_matmuls
