// The ops that attend to one tile, with options that torch's kernels lack: explained in
// symm_cp/ops/attention/native_tiles.py.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "attention/passes.h"
#include "attention/tile.h"
#include "memory/pool.h"

namespace symm_cp {

namespace {

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

// Returns the fewest runs of consecutive positions.
std::vector<KeyRun> runs_of(const std::optional<at::Tensor>& positions, int64_t keys) {
  if (!positions) return {{0, keys, 0}};
  const int64_t* at = positions->const_data_ptr<int64_t>();
  std::vector<KeyRun> runs;
  for (int64_t i = 0; i < keys; ++i) {
    if (i > 0 && at[i] == at[i - 1] + 1)
      ++runs.back().end;
    else
      runs.push_back({i, i + 1, at[i]});
  }
  return runs;
}

// Raises unless all positions are at least 0 and every distance is within the bias.
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
  for (const KeyRun& run : terms.runs) {
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

// Converts a mask for reading by rows: dtype `wide`, expanded, with the stride of keys 1 or 0.
at::Tensor readable_mask(at::Tensor mask, const TileSizes& sizes, at::ScalarType wide) {
  while (mask.dim() < 4) mask = mask.unsqueeze(0);
  for (int64_t d = 0; d < 4; ++d)
    if (mask.stride(d) == 0 && mask.size(d) > 1) mask = mask.narrow(d, 0, 1);
  mask = mask.to(wide);
  if (mask.size(3) > 1 && mask.stride(3) != 1) mask = mask.contiguous();
  return mask.expand({sizes.samples, sizes.heads, sizes.rows, sizes.keys});
}

// Keeps the tensors that the terms point to alive in `tensors`.
template <class A>
TileTerms<A> terms_of(const TileOptions& options, const TileSizes& sizes,
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
  // Rounds to the nearest, halves to even, like Python.
  terms.dropout = {static_cast<uint64_t>(options.dropout_seed),
                   static_cast<uint32_t>(std::nearbyint(p * 65536))};
  terms.sample_offset = options.sample_offset, terms.head_offset = options.head_offset;
  check_distances(terms, sizes);
  return terms;
}

// Converts a tensor to `dtype`, with rows that GEMMs can read.
at::Tensor readable(const at::Tensor& tensor, at::ScalarType dtype) {
  const at::Tensor converted = tensor.to(dtype);
  const bool dense = (converted.size(3) <= 1 || converted.stride(3) == 1) &&
                     converted.stride(2) >= std::max<int64_t>(converted.size(3), 1);
  return dense ? converted : converted.contiguous();
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

bool is_blocked(const TileSizes& sizes) {
#if defined(CPUBLAS_BRGEMM_F32F32F32)
  return multiplies_blocks() && sizes.features > 0 && sizes.value_features > 0;
#else
  return false;
#endif
}

void check_result(const at::Tensor& tensor, at::IntArrayRef sizes, at::ScalarType dtype,
                  const char* name) {
  TORCH_CHECK_VALUE(tensor.sizes() == sizes && tensor.scalar_type() == dtype,
                    "attention_tile: ", name, " must be ", sizes, " of ", dtype, ", not ",
                    tensor.sizes(), " of ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.dim() < 4 || tensor.size(3) <= 1 || tensor.stride(3) == 1,
                    "attention_tile: the features of ", name, " must be contiguous");
}

at::ScalarType wide(const at::Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace

void attention_tile(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const at::Tensor& out, const at::Tensor& lse, const TileOptions& options) {
  const TileSizes sizes = check_sizes(query, key, value);
  check_result(out, {sizes.samples, sizes.heads, sizes.rows, sizes.value_features},
               out.scalar_type() == query.scalar_type() ? query.scalar_type() : wide(query), "out");
  check_result(lse, {sizes.samples, sizes.heads, sizes.rows}, wide(query), "lse");
  if (lse.numel() == 0) return;
  const bool packs = by_tiles(query);
  const auto as = packs ? at::kBFloat16 : wide(query);
  const at::Tensor q = readable(query, as), k = readable(key, as), v = readable(value, as);
  std::vector<at::Tensor> kept;
  if (query.scalar_type() == at::kDouble) {
    attend<PlainForward<double>>(inputs_of<double>(sizes, q, k, v),
                                 terms_of<double>(options, sizes, kept), out, lse);
    return;
  }
  const TileTerms<float> terms = terms_of<float>(options, sizes, kept);
  if (packs) return attend<PackedForward>(inputs_of<BFloat16>(sizes, q, k, v), terms, out, lse);
#if defined(CPUBLAS_BRGEMM_F32F32F32)
  if (is_blocked(sizes))
    return attend<BlockedForward>(inputs_of<float>(sizes, q, k, v), terms, out, lse);
#endif
  attend<PlainForward<float>>(inputs_of<float>(sizes, q, k, v), terms, out, lse);
}

at::Tensor attention_inner(const at::Tensor& grad_out, const at::Tensor& out,
                           const std::optional<at::Tensor>& grad_lse) {
  TORCH_CHECK_VALUE(grad_out.dim() == 4 && grad_out.sizes() == out.sizes(),
                    "attention_inner: shapes differ: ", grad_out.sizes(), " and ", out.sizes());
  const at::Tensor inner = at::empty(out.sizes().slice(0, 3), out.options().dtype(wide(out)));
  if (inner.numel() == 0) return inner;
  const at::Tensor grad = readable(grad_out, out.scalar_type()),
                   result = readable(out, out.scalar_type());
  std::optional<at::Tensor> less;
  if (grad_lse) less = grad_lse->to(wide(out));
  if (out.scalar_type() == at::kDouble)
    fill_inner<double>(grad, result, less, inner);
  else
    fill_inner<float>(grad, result, less, inner);
  return inner;
}

namespace {

template <class Products, class T>
void run_backward(const TileInputs<T>& inputs, const TileOptions& options,
                  const GradientTensors& grads, const at::Tensor& lse, const at::Tensor& inner) {
  using A = typename Products::Number;
  std::vector<at::Tensor> kept;
  const TileTerms<A> terms = terms_of<A>(options, inputs.sizes, kept);
  const TileGradients<A> to{strided<A>(grads.query), strided<A>(grads.key),
                            strided<A>(grads.value)};
  A* bias = grads.bias ? grads.bias->mutable_data_ptr<A>() : nullptr;
  attend_backward<Products, T>(inputs, terms, to, lse, inner, bias);
}

}  // namespace

void attention_tile_backward(const at::Tensor& grad_out, const at::Tensor& query,
                             const at::Tensor& key, const at::Tensor& value, const at::Tensor& lse,
                             const at::Tensor& inner, const GradientTensors& grads,
                             const TileOptions& options) {
  const TileSizes sizes = check_sizes(query, key, value);
  const auto numbers = wide(query);
  check_result(grads.query, query.sizes(), numbers, "grad_query");
  check_result(grads.key, key.sizes(), numbers, "grad_key");
  check_result(grads.value, value.sizes(), numbers, "grad_value");
  check_result(lse, {sizes.samples, sizes.heads, sizes.rows}, numbers, "lse");
  check_result(inner, lse.sizes(), numbers, "inner");
  TORCH_CHECK_VALUE(
      !grads.bias || (options.bias && grads.bias->is_contiguous() &&
                      grads.bias->sizes() ==
                          at::IntArrayRef{sizes.samples, sizes.heads, options.bias->size(1)}),
      "attention_tile: grad_bias must be contiguous: a bias for each of ", sizes.samples,
      " samples");
  if (sizes.samples * sizes.heads * sizes.rows == 0 || sizes.keys == 0) return;
  const bool packs = by_tiles(query);
  const auto as = packs ? at::kBFloat16 : numbers;
  const at::Tensor q = readable(query, as), k = readable(key, as), v = readable(value, as);
  const at::Tensor grad = readable(grad_out, as);
  const auto run = [&]<class Products, class T>() {
    TileInputs<T> inputs = inputs_of<T>(sizes, q, k, v);
    inputs.grad_out = strided<const T>(grad);
    run_backward<Products, T>(inputs, options, grads, lse, inner);
  };
  if (numbers == at::kDouble) return run.template operator()<PlainBackward<double>, double>();
  if (packs) return run.template operator()<PackedBackward, BFloat16>();
#if defined(CPUBLAS_BRGEMM_F32F32F32)
  if (is_blocked(sizes)) return run.template operator()<BlockedBackward, float>();
#endif
  run.template operator()<PlainBackward<float>, float>();
}

bool attention_has_blocks(at::ScalarType dtype) {
  const bool has_float32 = is_blocked({1, 1, 1, 1, 1, 1, 1});
  switch (dtype) {
    case at::kFloat: return has_float32;
    case at::kBFloat16: return has_float32 || at::native::cpublas::could_pack(at::kBFloat16);
    case at::kHalf: return has_float32 && !at::native::cpublas::could_pack(at::kHalf);
    default: return false;
  }
}

// The schemas name the fields of `TileOptions`.
#define SYMM_CP_TILE_OPTIONS                                                                      \
  "Tensor? mask, int? low, int? high, float scale, float? softcap, Tensor? bias, int bias_zero, " \
  "Tensor? query_positions, Tensor? key_positions, float dropout_p, int dropout_seed, "           \
  "int sample_offset, int head_offset"

using OptionalTensor = const std::optional<at::Tensor>&;

TORCH_LIBRARY_FRAGMENT(symm_cp, m) {
  m.def(
      "attention_tile(Tensor query, Tensor key, Tensor value, Tensor(a!) out, Tensor(b!) "
      "lse, " SYMM_CP_TILE_OPTIONS ") -> ()",
      torch::dispatch(
          c10::DispatchKey::CPU,
          [](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
             const at::Tensor& out, const at::Tensor& lse, OptionalTensor mask,
             std::optional<int64_t> low, std::optional<int64_t> high, double scale,
             std::optional<double> softcap, OptionalTensor bias, int64_t bias_zero,
             OptionalTensor query_positions, OptionalTensor key_positions, double dropout_p,
             int64_t dropout_seed, int64_t sample_offset, int64_t head_offset) {
            attention_tile(query, key, value, out, lse,
                           {mask, low, high, scale, softcap, bias, bias_zero, query_positions,
                            key_positions, dropout_p, dropout_seed, sample_offset, head_offset});
          }));
  m.def("attention_inner(Tensor grad_out, Tensor out, Tensor? grad_lse) -> Tensor",
        torch::dispatch(c10::DispatchKey::CPU, &attention_inner));
  m.def(
      "attention_tile_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
      "Tensor lse, Tensor inner, Tensor(a!) grad_query, Tensor(b!) grad_key, "
      "Tensor(c!) grad_value, Tensor(d!)? grad_bias, " SYMM_CP_TILE_OPTIONS ") -> ()",
      torch::dispatch(
          c10::DispatchKey::CPU,
          [](const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key,
             const at::Tensor& value, const at::Tensor& lse, const at::Tensor& inner,
             const at::Tensor& grad_query, const at::Tensor& grad_key, const at::Tensor& grad_value,
             OptionalTensor grad_bias, OptionalTensor mask, std::optional<int64_t> low,
             std::optional<int64_t> high, double scale, std::optional<double> softcap,
             OptionalTensor bias, int64_t bias_zero, OptionalTensor query_positions,
             OptionalTensor key_positions, double dropout_p, int64_t dropout_seed,
             int64_t sample_offset, int64_t head_offset) {
            attention_tile_backward(
                grad_out, query, key, value, lse, inner,
                {grad_query, grad_key, grad_value, grad_bias},
                {mask, low, high, scale, softcap, bias, bias_zero, query_positions, key_positions,
                 dropout_p, dropout_seed, sample_offset, head_offset});
          }));
  m.def("attention_has_blocks(ScalarType dtype) -> bool", attention_has_blocks);
}

}  // namespace symm_cp
