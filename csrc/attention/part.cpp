// `attend_to_part`: attention of new tokens to one rank's part of the keys; see
// symm_cp/ops/attention/spread_cache.py. The op reads the number of keys and their positions when
// it runs, so that one plan serves a growing cache.
//
// Shapes: query (B, H, Q, E), key (B, G, K, E), value (B, G, K, V), out (B, H, S, V), lse
// (B, H, S): of queries `row` to `row` + S.
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <vector>

#include "attention/tile.h"

namespace symm_cp::key_parts {

namespace {

using OptionalTensor = const std::optional<at::Tensor>&;

// With fewer keys, torch's kernel treats a row of NaN scores as a row that sees no key.
constexpr int64_t kTorchsKeys = 16;

// Whether torch's kernel is faster than this library's own for so many rows per key head. (It takes
// two to four times as long for one row of a 16-bit dtype, and twice as long from 8 rows on.)
bool torch_is_faster(at::ScalarType dtype, int64_t rows) {
  if (!attention_has_blocks(dtype)) return rows <= 64;
  return rows < 8 && (rows > 1 || dtype == at::kFloat);
}

// Keys `begin` to `end`, and the distances from the diagonal at which queries see them: see
// TileOptions.
struct Segment {
  int64_t begin, end;
  std::optional<int64_t> low, high;
};

// Makes the features of a position contiguous, and positions disjoint.
at::Tensor with_dense_features(const at::Tensor& tensor) {
  const int64_t features = tensor.size(3);
  bool dense = features == 1 || tensor.stride(3) == 1;
  for (int64_t d = 0; d < 3; ++d)
    dense &= tensor.stride(d) >= features || tensor.stride(d) == 0 || tensor.size(d) == 1;
  return dense ? tensor : tensor.contiguous();
}

// Returns the keys at `positions` that `rows` queries from position `first` on see: one segment of
// keys that all of them see, and on both sides of it runs of consecutive positions.
std::vector<Segment> segments_of(const at::Tensor& positions, int64_t first, int64_t rows,
                                 std::optional<int64_t> window) {
  const int64_t* const at = positions.const_data_ptr<int64_t>();
  const int64_t* const end = at + positions.numel();
  TORCH_CHECK_VALUE(std::adjacent_find(at, end, std::greater_equal<>()) == end,
                    "spread_cache_attention: key_positions must ascend");
  const int64_t last = first + rows - 1;
  const auto before = [&](int64_t position) { return std::lower_bound(at, end, position) - at; };
  // The keys that some query sees, and the keys that all queries see.
  const int64_t some_begin = window ? before(first - *window) : 0;
  const int64_t some_end = before(last + 1);
  const int64_t all_begin = window ? before(last - *window) : 0;
  const int64_t all_end = before(first + 1);
  std::vector<Segment> segments;
  const auto add_runs = [&](int64_t begin, int64_t stop) {
    while (begin < stop) {
      int64_t next = begin + 1;
      while (next < stop && at[next] == at[next - 1] + 1) ++next;
      const int64_t offset = first - at[begin];  // column of the key at the first query's position
      segments.push_back({begin, next, std::nullopt, offset});
      if (window) segments.back().low = offset - *window;
      begin = next;
    }
  };
  if (all_begin < all_end) {
    segments.push_back({all_begin, all_end, {}, {}});
    add_runs(some_begin, all_begin);
    add_runs(all_end, some_end);
  } else {
    add_runs(some_begin, some_end);
  }
  return segments;
}

// Returns an additive mask in the dtype of `like`.
at::Tensor additive(const at::Tensor& mask, const at::Tensor& like) {
  if (mask.scalar_type() != at::kBool) return mask.to(like.scalar_type());
  return at::zeros(mask.sizes(), like.options()).masked_fill_(mask.logical_not(), -INFINITY);
}

// Whether heads that share keys can be computed as rows of one head, so that keys are read only
// once.
bool shares_mask(const at::Tensor& mask, int64_t rows) {
  return !mask.defined() || (mask.size(1) == 1 && (rows == 1 || mask.size(2) == 1));
}

// Attends with torch's kernel, with the heads that share keys as rows of one head.
void attend_few_rows(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const at::Tensor& mask, double scale, const at::Tensor& out,
                     const at::Tensor& lse) {
  const int64_t samples = query.size(0), groups = key.size(1);
  const int64_t rows = query.size(1) / groups * query.size(2);
  const at::Tensor folded = query.contiguous().view({samples, groups, rows, query.size(3)});
  const auto given = mask.defined() ? std::optional(mask) : std::nullopt;
  auto [part, part_lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      folded, key, value, /*dropout_p=*/0.0, /*is_causal=*/false, given, scale);
  if (mask.defined()) {  // the kernel returns no log-sum-exp for rows that see no key
    const at::Tensor hidden = mask.eq(-INFINITY).all(-1);
    part = part.masked_fill(hidden.unsqueeze(-1), 0.0);
    part_lse = part_lse.masked_fill(hidden, -INFINITY);
  }
  out.view({samples, groups, rows, value.size(3)}).copy_(part);
  lse.view({samples, groups, rows}).copy_(part_lse);
}

void attend_to_part(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                    OptionalTensor mask, OptionalTensor positions,
                    std::optional<int64_t> first_query, std::optional<int64_t> window_left,
                    double scale, std::optional<double> softcap, int64_t row, const at::Tensor& out,
                    const at::Tensor& lse) {
  out.zero_();
  lse.fill_(-INFINITY);
  const int64_t rows = out.size(2), heads = queries.size(1);
  std::vector<Segment> segments{{0, keys.size(2), {}, {}}};
  if (positions) {
    TORCH_CHECK_VALUE(positions->sizes() == keys.sizes().slice(2, 1) && first_query,
                      "attend_to_part: needs a position for each key, and first_query");
    segments = segments_of(positions->contiguous(), *first_query + row, rows, window_left);
  }
  if (out.numel() == 0) return;
  const at::Tensor query = with_dense_features(queries.narrow(2, row, rows));
  for (const Segment& segment : segments) {
    const int64_t count = segment.end - segment.begin;
    if (count == 0) continue;
    const at::Tensor key = with_dense_features(keys.narrow(2, segment.begin, count));
    const at::Tensor value = with_dense_features(values.narrow(2, segment.begin, count));
    at::Tensor part;
    if (mask) {
      part = *mask;
      if (part.size(2) > 1) part = part.narrow(2, row, rows);
      if (part.size(3) > 1) part = part.narrow(3, segment.begin, count);
      part = additive(part, lse).expand({part.size(0), part.size(1), part.size(2), count});
    }
    const bool few =
        count >= kTorchsKeys && torch_is_faster(query.scalar_type(), rows * (heads / key.size(1)));
    const bool banded = segment.low || segment.high;
    if (few && !banded && !softcap && segments.size() == 1 && shares_mask(part, rows) &&
        key.size(3) == value.size(3)) {
      attend_few_rows(query, key, value, part, scale, out, lse);
      continue;
    }
    TileOptions options;
    if (part.defined()) options.mask = part;
    options.low = segment.low;
    options.high = segment.high;
    options.scale = scale;
    options.softcap = softcap;
    attention_tile(query, key, value, out, lse, options);
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(symm_cp, m) {
  m.def(
      "attend_to_part(Tensor query, Tensor key, Tensor value, Tensor? mask, "
      "Tensor? key_positions, int? first_query, int? window_left, float scale, float? softcap, "
      "int row, Tensor(a!) out, Tensor(b!) lse) -> ()",
      torch::dispatch(c10::DispatchKey::CPU, &attend_to_part));
}

}  // namespace symm_cp::key_parts
