// Attention to one tile, with options that torch's kernels lack: explained in
// symm_cp/ops/attention/native_tiles.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace symm_cp {

// The options of a tile, in the order of the ops' schemas.
struct TileOptions {
  std::optional<at::Tensor> mask;
  std::optional<int64_t> low, high;
  double scale;
  std::optional<double> softcap;
  std::optional<at::Tensor> bias;
  int64_t bias_zero = 0;
  std::optional<at::Tensor> query_positions, key_positions;
  double dropout_p = 0;
  int64_t dropout_seed = 0, sample_offset = 0, head_offset = 0;
};

// Merges attention to further keys into `out` and `lse`.
void attention_tile(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const at::Tensor& out, const at::Tensor& lse, const TileOptions& options);

// Whether this is faster than torch's kernel for the dtype: if the processor multiplies small
// blocks of it, or if it multiplies small blocks of float32 and torch does not multiply small
// blocks of the dtype.
bool attention_has_blocks(at::ScalarType dtype);

// Returns the sum of grad_out * out of each row, less grad_lse: see native_tiles.py.
at::Tensor attention_inner(const at::Tensor& grad_out, const at::Tensor& out,
                           const std::optional<at::Tensor>& grad_lse);

// The gradients to add to, in the order of the schema.
struct GradientTensors {
  at::Tensor query, key, value;
  std::optional<at::Tensor> bias = std::nullopt;
};

// Adds the gradients of a tile. `lse` is inf in rows that see no key.
void attention_tile_backward(const at::Tensor& grad_out, const at::Tensor& query,
                             const at::Tensor& key, const at::Tensor& value, const at::Tensor& lse,
                             const at::Tensor& inner, const GradientTensors& grads,
                             const TileOptions& options);

}  // namespace symm_cp
