// The ops that attend to one tile, with what torch's kernels lack: explained in
// symm_cp/ops/attention/native_tiles.py.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "attention_passes.h"
#include "pool.h"

namespace symm_cp {

namespace {

// The options of both ops, in the order of their schemas.
struct Options {
  std::optional<at::Tensor> mask;
  std::optional<int64_t> low, high;
  double scale;
  std::optional<double> softcap;
  std::optional<at::Tensor> bias;
  int64_t bias_zero;
  std::optional<at::Tensor> query_positions, key_positions;
  double dropout_p;
  int64_t dropout_seed, sample_offset, head_offset;
};

void check_positions(const std::optional<at::Tensor>& positions, int64_t length, const char* name) {
  if (!positions) return;
  TORCH_CHECK_VALUE(positions->scalar_type() == at::kLong && positions->dim() == 1 &&
                        positions->size(0) == length && positions->is_contiguous(),
                    "attention_tile: ", name, " must be ", length,
                    " contiguous int64 numbers, not ", positions->sizes(), " of ",
                    positions->scalar_type());
}

TileSizes check_sizes(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  for (const at::Tensor& tensor : {query, key, value}) {
    TORCH_CHECK_VALUE(tensor.dim() == 4, "attention_tile: tensors must have 4 dimensions, not ",
                      tensor.dim());
    TORCH_CHECK_TYPE(tensor.scalar_type() == query.scalar_type(),
                     "attention_tile: dtypes differ: ", query.scalar_type(), " and ",
                     tensor.scalar_type());
  }
  const TileSizes sizes{query.size(0), query.size(1), key.size(1),  query.size(2),
                        key.size(2),   query.size(3), value.size(3)};
  TORCH_CHECK_VALUE(key.size(0) == sizes.samples && value.size(0) == sizes.samples &&
                        key.size(3) == sizes.features && value.size(2) == sizes.keys &&
                        value.size(1) == sizes.groups &&
                        (sizes.groups == 0 ? sizes.heads == 0 : sizes.heads % sizes.groups == 0),
                    "attention_tile: shapes do not match: query ", query.sizes(), ", key ",
                    key.sizes(), ", value ", value.sizes());
  return sizes;
}

// Consecutive positions, as few runs as there are.
std::vector<Run> runs_of(const std::optional<at::Tensor>& positions, int64_t keys) {
  if (!positions) return {{0, keys, 0}};
  const int64_t* at = positions->const_data_ptr<int64_t>();
  std::vector<Run> runs;
  for (int64_t i = 0; i < keys; ++i) {
    if (i > 0 && at[i] == at[i - 1] + 1)
      ++runs.back().end;
    else
      runs.push_back({i, i + 1, at[i]});
  }
  return runs;
}

// Positions are not negative, and every distance is within the bias.
template <class A>
void check_distances(const TileTerms<A>& terms, const TileSizes& sizes) {
  if ((terms.bias == nullptr && !terms.drops) || sizes.rows == 0 || sizes.keys == 0) return;
  int64_t first_query = 0, last_query = sizes.rows - 1;
  if (terms.query_positions != nullptr) {
    const auto ends =
        std::minmax_element(terms.query_positions, terms.query_positions + sizes.rows);
    first_query = *ends.first, last_query = *ends.second;
  }
  int64_t first_key = terms.runs[0].position, last_key = first_key;
  for (const Run& run : terms.runs) {
    first_key = std::min(first_key, run.position);
    last_key = std::max(last_key, run.position + run.end - run.begin - 1);
  }
  TORCH_CHECK_VALUE(first_query >= 0 && first_key >= 0,
                    "attention_tile: positions must not be negative: queries begin at ",
                    first_query, ", keys at ", first_key);
  if (terms.bias == nullptr) return;
  const int64_t least = first_key - last_query + terms.bias_zero;
  const int64_t most = last_key - first_query + terms.bias_zero;
  TORCH_CHECK_INDEX(least >= 0 && most < terms.distances, "attention_tile: bias has ",
                    terms.distances, " distances; the tile needs those from ", least, " to ", most);
}

// A mask as rows can be read: of dtype `wide`, expanded, with keys one after the other or all
// alike.
at::Tensor readable_mask(at::Tensor mask, const TileSizes& sizes, at::ScalarType wide) {
  while (mask.dim() < 4) mask = mask.unsqueeze(0);
  for (int64_t d = 0; d < 4; ++d)
    if (mask.stride(d) == 0 && mask.size(d) > 1) mask = mask.narrow(d, 0, 1);
  mask = mask.to(wide);
  if (mask.size(3) > 1 && mask.stride(3) != 1) mask = mask.contiguous();
  return mask.expand({sizes.samples, sizes.heads, sizes.rows, sizes.keys});
}

// What the terms point to is kept alive by `tensors`.
template <class A>
TileTerms<A> terms_of(const Options& options, const TileSizes& sizes,
                      std::vector<at::Tensor>& tensors) {
  constexpr int64_t kFar = int64_t{1} << 40;
  constexpr at::ScalarType kWide = std::is_same_v<A, double> ? at::kDouble : at::kFloat;
  check_positions(options.query_positions, sizes.rows, "query_positions");
  check_positions(options.key_positions, sizes.keys, "key_positions");
  const double p = options.dropout_p;
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, "attention_tile: dropout_p must be from 0 to 1, not ", p);
  TileTerms<A> terms;
  terms.scale = static_cast<A>(options.scale);
  terms.softcap = static_cast<A>(options.softcap.value_or(0));
  terms.low = std::clamp(options.low.value_or(-kFar), -kFar, kFar);
  terms.high = std::clamp(options.high.value_or(kFar), -kFar, kFar);
  if (options.mask) {
    tensors.push_back(readable_mask(*options.mask, sizes, kWide));
    terms.mask = strided<const A>(tensors.back());
    terms.mask_step = tensors.back().stride(3) == 0 ? 0 : 1;
  }
  if (options.bias) {
    TORCH_CHECK_VALUE(options.bias->dim() == 2 && options.bias->size(0) == sizes.heads,
                      "attention_tile: bias must be (", sizes.heads, ", distances), not ",
                      options.bias->sizes());
    tensors.push_back(options.bias->to(kWide).contiguous());
    terms.bias = tensors.back().const_data_ptr<A>();
    terms.distances = options.bias->size(1);
    terms.bias_zero = options.bias_zero;
  }
  if (options.query_positions)
    terms.query_positions = options.query_positions->const_data_ptr<int64_t>();
  terms.runs = runs_of(options.key_positions, sizes.keys);
  terms.drops = p > 0;
  terms.kept_factor = p < 1 ? static_cast<A>(1 / (1 - p)) : 0;
  // To the nearest, halves to even, as Python rounds.
  terms.dropout = {static_cast<uint64_t>(options.dropout_seed),
                   static_cast<uint32_t>(std::nearbyint(p * 65536))};
  terms.sample_offset = options.sample_offset, terms.head_offset = options.head_offset;
  check_distances(terms, sizes);
  return terms;
}

// With rows that GEMMs can read; converted to `dtype`.
at::Tensor readable(const at::Tensor& tensor, at::ScalarType dtype) {
  const at::Tensor converted = tensor.to(dtype);
  const bool dense = (converted.size(3) <= 1 || converted.stride(3) == 1) &&
                     converted.stride(2) >= std::max<int64_t>(converted.size(3), 1);
  return dense ? converted : converted.contiguous();
}

// By rows with adjacent heads, as torch's kernels return it.
at::Tensor rows_first(const TileSizes& sizes, int64_t heads, int64_t rows, int64_t features,
                      const at::TensorOptions& options) {
  return pooled_empty({sizes.samples, rows, heads, features}, options).zero_().transpose(1, 2);
}

bool by_tiles(const at::Tensor& query) {
  return query.scalar_type() == at::kBFloat16 && at::native::cpublas::could_pack(at::kBFloat16);
}

template <class T>
TileInputs<T> inputs_of(const TileSizes& sizes, const at::Tensor& query, const at::Tensor& key,
                        const at::Tensor& value) {
  return {sizes, strided<const T>(query), strided<const T>(key), strided<const T>(value), {}};
}

// --- ops ---------------------------------------------------------------------------------------

std::tuple<at::Tensor, at::Tensor> attention_tile(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& value, const Options& options) {
  const TileSizes sizes = check_sizes(query, key, value);
  const bool is_double = query.scalar_type() == at::kDouble, packs = by_tiles(query);
  const auto wide = is_double ? at::kDouble : at::kFloat;
  const at::Tensor out =
      rows_first(sizes, sizes.heads, sizes.rows, sizes.value_features, query.options());
  const at::Tensor lse =
      at::full({sizes.samples, sizes.heads, sizes.rows}, -std::numeric_limits<double>::infinity(),
               query.options().dtype(wide));
  if (lse.numel() == 0 || sizes.keys == 0) return {out, lse};
  const auto as = packs ? at::kBFloat16 : wide;
  const at::Tensor q = readable(query, as), k = readable(key, as), v = readable(value, as);
  std::vector<at::Tensor> kept;
  if (is_double) {
    attend<PlainForward<double>>(inputs_of<double>(sizes, q, k, v),
                                 terms_of<double>(options, sizes, kept), out, lse);
  } else {
    const TileTerms<float> terms = terms_of<float>(options, sizes, kept);
    if (packs) attend<PackedForward>(inputs_of<BFloat16>(sizes, q, k, v), terms, out, lse);
#if defined(CPUBLAS_BRGEMM_F32F32F32)
    else if (multiplies_blocks() && sizes.features > 0 && sizes.value_features > 0)
      attend<BlockedForward>(inputs_of<float>(sizes, q, k, v), terms, out, lse);
#endif
    else
      attend<PlainForward<float>>(inputs_of<float>(sizes, q, k, v), terms, out, lse);
  }
  return {out, lse};
}

template <class Products, class T>
void run_backward(const TileInputs<T>& inputs, const Options& options,
                  const std::array<at::Tensor, 3>& grads, const at::Tensor& lse,
                  const at::Tensor& inner, const at::Tensor& grad_bias) {
  using A = typename Products::Number;
  std::vector<at::Tensor> kept;
  const TileTerms<A> terms = terms_of<A>(options, inputs.sizes, kept);
  const TileGradients<A> to{strided<A>(grads[0]), strided<A>(grads[1]), strided<A>(grads[2])};
  A* bias = grad_bias.defined() ? grad_bias.mutable_data_ptr<A>() : nullptr;
  attend_backward<Products, T>(inputs, terms, to, lse, inner, bias);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_tile_backward(
    const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
    const std::optional<at::Tensor>& grad_lse, const Options& options) {
  const TileSizes sizes = check_sizes(query, key, value);
  const bool is_double = query.scalar_type() == at::kDouble, packs = by_tiles(query);
  const auto wide = is_double ? at::kDouble : at::kFloat;
  const auto numbers = query.options().dtype(wide);
  const std::array<at::Tensor, 3> grads{
      rows_first(sizes, sizes.heads, sizes.rows, sizes.features, numbers),
      rows_first(sizes, sizes.groups, sizes.keys, sizes.features, numbers),
      rows_first(sizes, sizes.groups, sizes.keys, sizes.value_features, numbers)};
  at::Tensor grad_bias;
  if (options.bias)
    grad_bias = at::zeros({sizes.samples, sizes.heads, options.bias->size(1)}, numbers);
  if (sizes.samples * sizes.heads * sizes.rows > 0 && sizes.keys > 0) {
    const auto as = packs ? at::kBFloat16 : wide;
    const at::Tensor q = readable(query, as), k = readable(key, as), v = readable(value, as);
    const at::Tensor grad = readable(grad_out, as), result = readable(out, as);
    const at::Tensor inner = at::empty({sizes.samples, sizes.heads, sizes.rows}, numbers);
    // exp(score - inf) is 0.
    const at::Tensor seen = lse.to(wide).masked_fill(
        lse.eq(-std::numeric_limits<double>::infinity()), std::numeric_limits<double>::infinity());
    std::optional<at::Tensor> less;
    if (grad_lse) less = grad_lse->to(wide);
    const auto run = [&]<class Products, class T>() {
      fill_inner<typename Products::Number>(grad, result, less, inner);
      TileInputs<T> inputs = inputs_of<T>(sizes, q, k, v);
      inputs.grad_out = strided<const T>(grad);
      run_backward<Products, T>(inputs, options, grads, seen, inner, grad_bias);
    };
    if (is_double)
      run.template operator()<PlainBackward<double>, double>();
    else if (packs)
      run.template operator()<PackedBackward, BFloat16>();
    else
      run.template operator()<PlainBackward<float>, float>();
  }
  if (grad_bias.defined()) grad_bias = grad_bias.sum(0);
  return {grads[0], grads[1], grads[2], grad_bias};
}

}  // namespace

// The schemas name the fields of `Options`.
#define SYMM_CP_TILE_OPTIONS                                                                      \
  "Tensor? mask, int? low, int? high, float scale, float? softcap, Tensor? bias, int bias_zero, " \
  "Tensor? query_positions, Tensor? key_positions, float dropout_p, int dropout_seed, "           \
  "int sample_offset, int head_offset"

using OptionalTensor = const std::optional<at::Tensor>&;

TORCH_LIBRARY_FRAGMENT(symm_cp, m) {
  m.def("attention_tile(Tensor query, Tensor key, Tensor value, " SYMM_CP_TILE_OPTIONS
        ") -> (Tensor, Tensor)",
        torch::dispatch(
            c10::DispatchKey::CPU,
            [](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               OptionalTensor mask, std::optional<int64_t> low, std::optional<int64_t> high,
               double scale, std::optional<double> softcap, OptionalTensor bias, int64_t bias_zero,
               OptionalTensor query_positions, OptionalTensor key_positions, double dropout_p,
               int64_t dropout_seed, int64_t sample_offset, int64_t head_offset) {
              return attention_tile(
                  query, key, value,
                  {mask, low, high, scale, softcap, bias, bias_zero, query_positions, key_positions,
                   dropout_p, dropout_seed, sample_offset, head_offset});
            }));
  m.def(
      "attention_tile_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
      "Tensor out, Tensor lse, Tensor? grad_lse, " SYMM_CP_TILE_OPTIONS
      ") -> (Tensor, Tensor, Tensor, Tensor)",
      torch::dispatch(c10::DispatchKey::CPU,
                      [](const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
                         OptionalTensor grad_lse, OptionalTensor mask, std::optional<int64_t> low,
                         std::optional<int64_t> high, double scale, std::optional<double> softcap,
                         OptionalTensor bias, int64_t bias_zero, OptionalTensor query_positions,
                         OptionalTensor key_positions, double dropout_p, int64_t dropout_seed,
                         int64_t sample_offset, int64_t head_offset) {
                        return attention_tile_backward(
                            grad_out, query, key, value, out, lse, grad_lse,
                            {mask, low, high, scale, softcap, bias, bias_zero, query_positions,
                             key_positions, dropout_p, dropout_seed, sample_offset, head_offset});
                      }));
}

}  // namespace symm_cp
