// The op that draws dropout masks by position: explained in symm_cp/ops/position_noise.py.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>
#include "base/parallel.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "attention/philox.h"

namespace symm_cp {

namespace {

// Writes the decisions for `count` elements of one row, one byte each.
void draw_row(const Dropout& dropout, uint32_t sample, uint32_t part, uint32_t position,
              int64_t count, bool* to) {
  std::array<uint16_t, kPhiloxKeys / 16> bits;
  for (int64_t begin = 0; begin < count; begin += kPhiloxKeys) {
    dropout.keep(sample, part, position, begin / kPhiloxKeys, bits.data());
    const int64_t end = std::min(count - begin, kPhiloxKeys);
    for (int64_t i = 0; i < end; ++i) to[begin + i] = (bits[i / 16] >> (i % 16) & 1) != 0;
  }
}

// Takes positions (P, rows), where P divides `samples`. Returns (samples, rows, features) of bool,
// true if the element of a sample, position and feature is kept.
at::Tensor dropout_mask(const at::Tensor& positions, int64_t samples, int64_t features, double p,
                        int64_t seed, int64_t part) {
  TORCH_CHECK_VALUE(
      positions.scalar_type() == at::kLong && positions.dim() == 2 && positions.is_contiguous() &&
          (samples == 0 || (positions.size(0) > 0 && samples % positions.size(0) == 0)),
      "dropout_mask: positions must be contiguous int64 of (a divisor of ", samples,
      ", rows), not ", positions.sizes(), " of ", positions.scalar_type());
  const int64_t rows = positions.size(1);
  const at::Tensor mask = at::empty({samples, rows, features}, at::kBool);
  if (mask.numel() == 0) return mask;
  const int64_t repeats = samples / positions.size(0);
  const int64_t* at_position = positions.const_data_ptr<int64_t>();
  bool* to = mask.mutable_data_ptr<bool>();
  const Dropout dropout{static_cast<uint64_t>(seed),
                        static_cast<uint32_t>(std::nearbyint(p * 65536))};
  const int64_t grain = std::max<int64_t>(1, 32768 / features);
  parallel_for(0, samples * rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t sample = i / rows;
      const int64_t position = at_position[sample / repeats * rows + i % rows];
      draw_row(dropout, static_cast<uint32_t>(sample), static_cast<uint32_t>(part),
               static_cast<uint32_t>(position), features, to + i * features);
    }
  });
  return mask;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(symm_cp, m) {
  m.def(
      "dropout_mask(Tensor positions, int samples, int features, float p, int seed, int part) "
      "-> Tensor",
      torch::dispatch(c10::DispatchKey::CPU, dropout_mask));
}

}  // namespace symm_cp
