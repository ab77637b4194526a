// Fused all-gather-matmul, matmul-reduce-scatter and matmul-all-reduce of float8 matrices with
// scales: gather, then one matmul, or one matmul, then the reduction. On CPU that is never slower
// than working shard by shard, which would hide only a gather of one byte per number, and would
// make torch's kernel rearrange or convert the whole weight once per shard. Python's kernels handle
// forced strategies, groups that span hosts and empty matrices, and raise the errors for wrong
// arguments.
//
// For the shapes see matmul_parts.h. A scale is one number, or one for each row or column.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/clamp.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <limits>

#include "ops/matmul_parts.h"

namespace symm_cp::scaled_matmuls {

namespace {

using namespace kernels;
using namespace matmul_parts;
using torch::jit::Stack;

constexpr const char* kScaledGather = "fused_all_gather_scaled_matmul";
constexpr const char* kScaledScatter = "fused_scaled_matmul_reduce_scatter";
constexpr const char* kScaledReduce = "fused_scaled_matmul_all_reduce";

// torch 2.11's `_scaled_mm` takes no scales of rows on CPU.
constexpr bool kTorchScalesRows = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR > 11;

bool is_float8(at::ScalarType dtype) {
  return dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2 ||
         dtype == at::kFloat8_e4m3fnuz || dtype == at::kFloat8_e5m2fnuz;
}

double largest(at::ScalarType float8) {
  if (float8 == at::kFloat8_e4m3fn) return std::numeric_limits<c10::Float8_e4m3fn>::max();
  if (float8 == at::kFloat8_e4m3fnuz) return std::numeric_limits<c10::Float8_e4m3fnuz>::max();
  return std::numeric_limits<c10::Float8_e5m2>::max();  // e5m2fnuz has the same
}

bool is_float8(const at::Tensor& tensor) {
  return is_float8(tensor.scalar_type()) && is_plain(tensor, tensor.scalar_type());
}

// Returns the dtype that a product is rounded to, by default the dtype of `a`; nullopt if
// `_scaled_mm` has no such products.
std::optional<at::ScalarType> result_dtype(const c10::IValue& given, const at::Tensor& a) {
  const auto dtype = given.isNone() ? a.scalar_type() : static_cast<at::ScalarType>(given.toInt());
  const bool known = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  return known || is_float8(dtype) ? std::optional(dtype) : std::nullopt;
}

// A weight matrix and the arguments of `_scaled_mm` that belong to it.
struct Weight {
  at::Tensor matrix, scale;
  at::Tensor bias, result_scale;  // undefined: none
  at::ScalarType dtype;           // of products
  bool fast;

  int64_t columns() const { return matrix.size(1); }
  // The dtype of the ranks' terms: sums in float8 would lose nearly all digits.
  at::ScalarType partial_dtype() const { return is_float8(dtype) ? at::kFloat : dtype; }
  // The weight without bias and result scale, for the products that ranks add up.
  Weight alone() const { return {matrix, scale, {}, {}, dtype, fast}; }
  bool fits(int64_t inner) const {
    if (matrix.dim() != 2 || !is_float8(matrix) || matrix.size(0) != inner) return false;
    if (!is_plain(scale, at::kFloat)) return false;
    if (scale.numel() != 1 && !(kTorchScalesRows && scale.sizes() == at::IntArrayRef{1, columns()}))
      return false;
    if (bias.defined() && !is_plain(bias, bias.scalar_type())) return false;
    return !result_scale.defined() ||
           (is_plain(result_scale, at::kFloat) && result_scale.numel() == 1);
  }
};

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

// Gives scales the shape that `_scaled_mm` requires when the other operand has several.
at::Tensor spread(const at::Tensor& scale, at::IntArrayRef shape) {
  return aligned(scale.numel() == 1 ? scale.reshape({1, 1}).expand(shape) : scale);
}

// Like `scaled_mm_out` of ops/matmul/scaled_mm.py: writes to the matrix `out`, in its dtype.
void multiply_scaled(at::Tensor out, const at::Tensor& rows, const at::Tensor& scale,
                     const Weight& weight) {
  if (out.numel() == 0) return;
  // Spreads even a single scale: on processors that multiply float8, torch takes hundreds of times
  // as long with one scale as with many (torch 2.13 on an Intel processor with AMX; elsewhere both
  // take the same time).
  const at::Tensor scale_a = kTorchScalesRows ? spread(scale, {rows.size(0), 1}) : scale;
  const at::Tensor scale_b =
      kTorchScalesRows ? spread(weight.scale, {1, weight.columns()}) : weight.scale;
  // torch 2.11 assumes that a bias is contiguous.
  const at::Tensor bias = weight.bias.defined() ? weight.bias.contiguous() : weight.bias;
  at::_scaled_mm_out(out, aligned(rows), weight.matrix, scale_a, scale_b, optional(bias),
                     optional(weight.result_scale), out.scalar_type(), weight.fast);
}

// --- fused_all_gather_scaled_matmul --------------------------------------------------------------

struct GatherArguments {
  at::Tensor x_shard;
  at::Tensor scale;
  std::vector<Weight> weights;
  int64_t dim;
  Sizes sizes;
};

// Returns nullopt if the lists differ in length, or a dtype is not supported.
std::optional<std::vector<Weight>> weights_of(const Arguments& arguments) {
  const auto matrices = arguments.tensors(1), scales = arguments.tensors(3);
  const auto biases = arguments.at(6).toListRef(), result_scales = arguments.at(7).toListRef();
  const auto dtypes = arguments.at(8).toListRef();
  const c10::List<bool> fast = arguments.at(9).toBoolList();
  const size_t count = matrices.size();
  if (scales.size() != count || biases.size() != count || result_scales.size() != count ||
      dtypes.size() != count || fast.size() != count)
    return {};
  const auto tensor = [](const c10::IValue& value) {
    return value.isNone() ? at::Tensor() : value.toTensor();
  };
  std::vector<Weight> weights;
  for (size_t i = 0; i < count; ++i) {
    const auto dtype = result_dtype(dtypes[i], arguments.tensor(0));
    if (!dtype) return {};
    weights.push_back(
        {matrices[i], scales[i], tensor(biases[i]), tensor(result_scales[i]), *dtype, fast.get(i)});
  }
  return weights;
}

// The scale of A, as in `RowScales` of ops/matmul/scaled_mm.py: one number, the scales of all
// ranks' rows, or (`travels`) the scales of this rank's rows, which are gathered.
struct RowScale {
  at::Tensor scale;
  bool travels;
  Detail detail;
};

// Returns nullopt for any other shape.
std::optional<RowScale> row_scale(const at::Tensor& x_shard, const at::Tensor& scale,
                                  const Division& division, int rank) {
  if (!is_plain(scale, at::kFloat)) return {};
  if (!kTorchScalesRows && scale.numel() != 1) return {};
  const auto own = with_length(x_shard.sizes(), x_shard.dim() - 1, 1);
  // Gathering the last dimension makes rows longer but adds none.
  const bool by_columns = division.dim == x_shard.dim() - 1, equal = division.is_equal();
  const auto full = by_columns ? own : with_length(own, division.dim, division.length());
  const Detail shape{"scale", at::DimVector(scale.sizes())};
  if (scale.sizes() == own)
    return RowScale{scale, !by_columns, equal ? shape : Detail{"scale sharded", {}}};
  if (scale.numel() == 1 && (equal || by_columns || scale.dim() < x_shard.dim()))
    return RowScale{scale, false, equal ? shape : Detail{"scale tensor", {}}};
  if (scale.sizes() != full) return {};
  if (equal) return RowScale{scale, false, shape};
  // Takes this rank's scales and gathers them like a sharded scale: if one rank has all rows, it
  // cannot tell the two forms apart.
  return RowScale{scale.narrow(division.dim, division.begin_of(rank), division.sizes[rank]), true,
                  Detail{"scale sharded", {}}};
}

struct GatherResults {
  at::Tensor gathered;
  std::vector<at::Tensor> products;
};

// Returns nullopt if the kernel in Python is needed.
std::optional<GatherResults> all_gather_scaled_matmul(Group& group, const GatherArguments& given) {
  const at::Tensor& shard = given.x_shard;
  const auto division = divided_shard(shard, given.dim, given.sizes, group);
  if (!division || !is_float8(shard) || !may_serve()) return {};
  const auto whole = with_length(shard.sizes(), division->dim, division->length());
  if (c10::multiply_integers(whole) == 0) return {};
  const bool fit =
      std::all_of(given.weights.begin(), given.weights.end(), [&](const Weight& weight) {
        if (weight.bias.defined() && weight.bias.numel() != weight.columns()) return false;
        return weight.fits(whole.back());
      });
  const auto row = row_scale(shard, given.scale, *division, group.rank());
  if (!fit || !row) return {};
  const at::AutoDispatchBelowADInplaceOrView below;
  Gathered gathered(kScaledGather, "gather_dim", shard, *division, row->detail);
  gathered.gather(group, /*keep=*/true);
  at::Tensor scale = row->scale;
  if (row->travels) {
    Gathered scales(kScaledGather, "gather_dim", scale, *division, {"scales", {}});
    scales.gather(group, /*keep=*/false);
    scale = scales.rows();
  } else if (scale.numel() != 1) {
    scale = gathered.rows_like(scale);
  }
  GatherResults results;
  after_exchange(group, kScaledGather, [&] {
    const at::Tensor rows = gathered.rows();
    for (const Weight& weight : given.weights) {
      const at::Tensor out =
          pooled_empty({rows.size(0), weight.columns()}, shard.options().dtype(weight.dtype));
      multiply_scaled(out, rows, scale, weight);
      results.products.push_back(gathered.product(out));
    }
    results.gathered = gathered.whole();
  });
  return results;
}

// Arguments: A, Bs, A_scale, B_scales, gather_dim, group name, biases, result_scales, out_dtypes,
// use_fast_accum, [sizes, rank].
void all_gather_scaled_matmul_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  std::optional<GatherResults> results;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    if (auto weights = weights_of(arguments))
      results = all_gather_scaled_matmul(
          *group, {arguments.tensor(0), arguments.tensor(2), std::move(*weights),
                   arguments.number(4), arguments.sizes(10, *group)});
  };
  if (!guarded(kScaledGather, arguments, 5, kSync, body) || !results) return call_python(op, stack);
  arguments.end(std::move(results->gathered), std::move(results->products));
}

// --- fused_scaled_matmul_reduce_scatter ----------------------------------------------------------

struct ScatterArguments {
  at::Tensor a, scale;
  Weight weight;  // its dtype is the result's
  std::string reduce_op;
  int64_t dim, dim_of_a;
  std::optional<std::vector<int64_t>> output_shape;
  Sizes sizes;

  at::DimVector product_shape() const {
    return with_length(a.sizes(), a.dim() - 1, weight.columns());
  }
};

bool fits(const at::Tensor& a, const at::Tensor& scale, const Weight& weight) {
  if (!is_float8(a) || a.dim() < 2 || !weight.fits(a.sizes().back())) return false;
  if (!is_plain(scale, at::kFloat)) return false;
  return scale.numel() == 1 ||
         (kTorchScalesRows && scale.sizes() == with_length(a.sizes(), a.dim() - 1, 1));
}

bool fits(const ScatterArguments& given) {
  const at::Tensor& a = given.a;
  if (!fits(a, given.scale, given.weight) || a.numel() == 0) return false;
  if (given.dim_of_a < -a.dim() || given.dim_of_a >= a.dim()) return false;
  return given.reduce_op == "sum" || given.reduce_op == "avg";
}

// Returns the output's shape; empty if it does not fit the product.
at::DimVector shape_of_output(const ScatterArguments& given) {
  const at::DimVector product = given.product_shape();
  if (!given.output_shape) return product;
  const auto& shape = *given.output_shape;
  if (shape.empty() || shape.back() != product.back()) return {};
  if (*std::min_element(shape.begin(), shape.end()) < 0) return {};
  if (c10::multiply_integers(shape) != c10::multiply_integers(product)) return {};
  return at::DimVector(shape);
}

// Adds the bias once, to the sum, instead of once per rank; rounds like `_scaled_mm`.
at::Tensor finish(at::Tensor total, const at::Tensor& bias, const Weight& weight) {
  if (bias.defined()) total = total.add(bias);
  if (is_float8(weight.dtype)) {
    if (weight.result_scale.defined()) total = total.div(weight.result_scale);
    const double limit = largest(weight.dtype);
    total = at::clamp(total.to(at::kFloat), -limit, limit);
  }
  return total.scalar_type() == weight.dtype ? total : total.to(weight.dtype);
}

// Writes this rank's product, divided into the parts of all ranks.
void multiply_parts(const at::Tensor& out, const ScatterArguments& given, at::IntArrayRef shape,
                    const Scattered& scattered, int ranks) {
  const Weight weight = given.weight.alone();
  const auto with_rows = [&](const at::Tensor& tensor, int64_t columns) {
    const at::DimVector sizes = with_length(shape, shape.size() - 1, columns);
    return scattered.rows_of(tensor.sizes() == sizes ? tensor : tensor.reshape(sizes));
  };
  const at::Tensor rows = with_rows(given.a, given.a.size(-1));
  // `_scaled_mm` takes a (1, 1) scale as one number; for a single row both mean the same.
  const at::Tensor scale =
      given.scale.numel() == 1 ? given.scale.reshape({1, 1}) : with_rows(given.scale, 1);
  if (!scattered.by_columns() || ranks == 1)
    return multiply_scaled(as_matrix(out), rows, scale, weight);
  // A separate product for each rank's columns would make torch convert A once per rank.
  const at::Tensor product = new_output(out, {rows.size(0), weight.columns()});
  multiply_scaled(product, rows, scale, weight);
  scattered.for_columns(out, [&](const at::Tensor& part, int64_t begin, int64_t length) {
    part.copy_(product.narrow(1, begin, length));
  });
}

// Returns an undefined tensor if the kernel in Python is needed.
at::Tensor scaled_matmul_reduce_scatter(Group& group, const ScatterArguments& given) {
  if (!may_serve() || !fits(given)) return {};
  const at::DimVector shape = shape_of_output(given);
  if (shape.empty() || c10::multiply_integers(shape) == 0) return {};
  const auto division = divided_whole(shape, given.dim, given.sizes, group.world_size());
  if (!division) return {};
  const at::AutoDispatchBelowADInplaceOrView below;
  const Detail operands{std::string(c10::getDtypeNames(given.a.scalar_type()).first),
                        {given.a.size(-1)}};
  const Scattered scattered(kScaledScatter, shape, *division, given.reduce_op, operands);
  const int ranks = group.world_size();
  at::Tensor total =
      pooled_empty(scattered.shape(), given.a.options().dtype(given.weight.partial_dtype()));
  const auto multiply = [&] { multiply_parts(total, given, shape, scattered, ranks); };
  if (ranks == 1) {
    multiply();
  } else {
    recorded(group, Kind::kProduce, kScaledScatter, multiply);
    total = scattered.reduce(group, total);
  }
  at::Tensor output;
  after_exchange(group, kScaledScatter, [&] {
    at::Tensor bias = given.weight.bias;
    if (bias.defined() && bias.dim() > 0 && scattered.by_columns())
      bias = bias.narrow(-1, division->begin_of(group.rank()), division->sizes[group.rank()]);
    output = finish(scattered.as_given(total), bias, given.weight).contiguous();
  });
  return output;
}

// Arguments: A, B, A_scale, B_scale, reduce_op, the output's scatter_dim, A's scatter_dim, group
// name, output_shape, bias, result_scale, out_dtype, use_fast_accum, [sizes, rank].
void scaled_matmul_reduce_scatter_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  at::Tensor output;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    const auto dtype = result_dtype(arguments.at(11), arguments.tensor(0));
    if (!dtype) return;
    const Weight weight{arguments.tensor(1),
                        arguments.tensor(3),
                        arguments.optional_tensor(9),
                        arguments.optional_tensor(10),
                        *dtype,
                        arguments.flag(12)};
    output = scaled_matmul_reduce_scatter(
        *group,
        {arguments.tensor(0), arguments.tensor(2), weight, arguments.text(4), arguments.number(5),
         arguments.number(6), arguments.numbers(8), arguments.sizes(13, *group)});
  };
  if (!guarded(kScaledScatter, arguments, 7, kSync, body) || !output.defined())
    return call_python(op, stack);
  arguments.end(std::move(output));
}

// --- fused_scaled_matmul_all_reduce --------------------------------------------------------------

// Returns an undefined tensor if the kernel in Python is needed; this does not depend on K, which
// may differ from rank to rank and be 0.
at::Tensor scaled_matmul_all_reduce(Group& group, const at::Tensor& a, const at::Tensor& scale,
                                    const Weight& weight, const std::string& reduce_op) {
  if (!may_serve() || !fits(a, scale, weight)) return {};
  if (weight.bias.defined() && weight.bias.sizes() != at::IntArrayRef(weight.columns())) return {};
  if (reduce_op != "sum" && reduce_op != "avg") return {};
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto shape = with_length(a.sizes(), a.dim() - 1, weight.columns());
  const at::Tensor total = pooled_empty(shape, a.options().dtype(weight.partial_dtype()));
  recorded(group, Kind::kProduce, kScaledReduce, [&] {
    if (a.size(-1) == 0) {
      total.zero_();
      return;
    }
    const at::Tensor rows = as_matrix(a);
    const auto scales = scale.numel() == 1 ? at::DimVector{1, 1} : at::DimVector{rows.size(0), 1};
    multiply_scaled(as_matrix(total), rows, scale.reshape(scales), weight.alone());
  });
  all_reduce(group, kScaledReduce, total, reduce_op);
  at::Tensor output;
  after_exchange(group, kScaledReduce,
                 [&] { output = finish(total, weight.bias, weight).contiguous(); });
  return output;
}

// Arguments: A, B, A_scale, B_scale, reduce_op, group name, bias, result_scale, out_dtype,
// use_fast_accum.
void scaled_matmul_all_reduce_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  at::Tensor output;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    const at::Tensor& a = arguments.tensor(0);
    const auto dtype = result_dtype(arguments.at(8), a);
    if (!dtype) return;
    const Weight weight{arguments.tensor(1),
                        arguments.tensor(3),
                        arguments.optional_tensor(6),
                        arguments.optional_tensor(7),
                        *dtype,
                        arguments.flag(9)};
    output = scaled_matmul_all_reduce(*group, a, arguments.tensor(2), weight, arguments.text(4));
  };
  if (!guarded(kScaledReduce, arguments, 5, kSync, body) || !output.defined())
    return call_python(op, stack);
  arguments.end(std::move(output));
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  for (const char* name : {kScaledGather, "_all_gather_scaled_matmul_split"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&all_gather_scaled_matmul_kernel>());
  for (const char* name : {kScaledScatter, "_scaled_matmul_reduce_scatter_split"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&scaled_matmul_reduce_scatter_kernel>());
  m.impl(kScaledReduce,
         torch::CppFunction::makeFromBoxedFunction<&scaled_matmul_all_reduce_kernel>());
}

}  // namespace symm_cp::scaled_matmuls
