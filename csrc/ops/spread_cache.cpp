// `spread_cache_attention`: attention of new tokens to keys that are spread over the ranks. Each
// rank attends to its own keys, one exchange gathers the results, and every rank merges them in
// rank order. The kernel in Python raises for wrong arguments; see
// symm_cp/ops/attention/spread_cache.py.
//
// Shapes: query (B, H, S, E), key (B, G, K, E), value (B, G, K, V), with this rank's K.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "attention/merge.h"
#include "attention/tile.h"
#include "ops/kernels.h"

namespace symm_cp::spread_cache {

namespace {

using namespace kernels;
using torch::jit::Stack;

constexpr const char* kOp = "spread_cache_attention";

// The positions of the op's arguments.
enum : size_t {
  kQuery,
  kKey,
  kValue,
  kGroupName,
  kMask,
  kPositions,
  kFirstQuery,
  kWindow,
  kScale,
  kSoftcap,
  kSinks
};

// The most bytes of a rank's results in one exchange. Bounds the memory for all ranks' results, and
// lets a fast rank begin its next queries while its peers are still behind.
constexpr int64_t kChunkBytes = int64_t{2} << 20;
// Limits of torch's kernel: with more than kTorchsRows rows per key head this library's own kernel
// is faster, and with fewer than kTorchsKeys keys torch's kernel treats a row of NaN scores as a
// row that sees no key.
constexpr int64_t kTorchsRows = 64;
constexpr int64_t kTorchsKeys = 16;

struct Inputs {
  at::Tensor query, key, value;
  at::Tensor mask, positions, sinks;  // undefined for None
  std::optional<int64_t> first_query, window;
  std::optional<double> scale, softcap;

  int64_t samples() const { return query.size(0); }
  int64_t heads() const { return query.size(1); }
  int64_t rows() const { return query.size(2); }
  int64_t keys() const { return key.size(2); }
  int64_t features() const { return value.size(3); }
  at::ScalarType wide() const {
    return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  }
  at::TensorOptions wide_options() const { return query.options().dtype(wide()); }
  TileOptions tile_options() const {
    TileOptions options;
    options.scale = scale.value_or(1 / std::sqrt(static_cast<double>(query.size(3))));
    options.softcap = softcap;
    return options;
  }
};

Inputs inputs_of(const Arguments& arguments) {
  return {arguments.tensor(kQuery),
          arguments.tensor(kKey),
          arguments.tensor(kValue),
          arguments.optional_tensor(kMask),
          arguments.optional_tensor(kPositions),
          arguments.optional_tensor(kSinks),
          arguments.optional_number(kFirstQuery),
          arguments.optional_number(kWindow),
          arguments.at(kScale).toOptional<double>(),
          arguments.at(kSoftcap).toOptional<double>()};
}

bool is_plain(const at::Tensor& tensor, int64_t dims) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.dim() == dims;
}

bool is_floating(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
         dtype == at::kDouble;
}

// Returns contiguous positions; raises ValueError unless they ascend.
at::Tensor check_positions(const at::Tensor& positions) {
  const at::Tensor dense = positions.contiguous();
  const int64_t* const begin = dense.const_data_ptr<int64_t>();
  const int64_t* const end = begin + dense.numel();
  TORCH_CHECK_VALUE(std::adjacent_find(begin, end, std::greater_equal<>()) == end, kOp,
                    ": key_positions must ascend");
  return dense;
}

bool options_fit(const Inputs& in) {
  if (in.mask.defined()) {
    if (!is_plain(in.mask, 4)) return false;
    if (in.mask.scalar_type() != at::kBool && !is_floating(in.mask.scalar_type())) return false;
    const int64_t whole[] = {in.samples(), in.heads(), in.rows(), in.keys()};
    for (int64_t d = 0; d < 4; ++d)
      if (in.mask.size(d) != 1 && in.mask.size(d) != whole[d]) return false;
  }
  if (in.positions.defined() != in.first_query.has_value()) return false;
  if (in.window && (*in.window < 0 || !in.positions.defined())) return false;
  if (in.positions.defined() &&
      !(is_plain(in.positions, 1) && in.positions.scalar_type() == at::kLong &&
        in.positions.size(0) == in.keys()))
    return false;
  if (in.softcap && !(*in.softcap > 0 && std::isfinite(*in.softcap))) return false;
  return !in.sinks.defined() || (is_plain(in.sinks, 1) && is_floating(in.sinks.scalar_type()) &&
                                 in.sinks.size(0) == in.heads());
}

// True for all valid arguments: all ranks must make the same decision.
bool is_served(const Inputs& in) {
  const at::ScalarType dtype = in.query.scalar_type();
  if (!is_floating(dtype)) return false;
  for (const at::Tensor* tensor : {&in.query, &in.key, &in.value})
    if (!is_plain(*tensor, 4) || tensor->scalar_type() != dtype) return false;
  if (in.query.size(3) == 0 || in.features() == 0) return false;
  if (in.key.size(0) != in.samples() || in.key.size(3) != in.query.size(3)) return false;
  if (in.key.sizes().slice(0, 3) != in.value.sizes().slice(0, 3)) return false;
  const int64_t groups = in.key.size(1);
  if (groups == 0 ? in.heads() != 0 : in.heads() % groups != 0) return false;
  return options_fit(in);
}

// Makes the features of a position contiguous, and positions disjoint.
at::Tensor with_dense_features(const at::Tensor& tensor) {
  const int64_t features = tensor.size(3);
  bool dense = features == 1 || tensor.stride(3) == 1;
  for (int64_t d = 0; d < 3; ++d)
    dense &= tensor.stride(d) >= features || tensor.stride(d) == 0 || tensor.size(d) == 1;
  return dense ? tensor : tensor.contiguous();
}

// --- this rank's keys ----------------------------------------------------------------------------

// Attention of some queries: out (B, H, rows, V) and lse (B, H, rows), contiguous, in float32 or
// float64. Starts as the attention to no key.
struct Partial {
  at::Tensor out, lse;
};

// Keys `begin` to `end`, and the distances from the diagonal at which queries see them: see
// TileOptions.
struct Segment {
  int64_t begin, end;
  std::optional<int64_t> low, high;
};

// Returns the keys that `rows` queries from `row` on see: one segment of keys that all of them see,
// and on both sides of it runs of consecutive positions.
std::vector<Segment> segments_of(const Inputs& in, int64_t row, int64_t rows) {
  if (!in.positions.defined()) return {{0, in.keys(), {}, {}}};
  const int64_t* const at = in.positions.const_data_ptr<int64_t>();
  const int64_t* const end = at + in.keys();
  const int64_t first = *in.first_query + row, last = first + rows - 1;
  const auto before = [&](int64_t position) { return std::lower_bound(at, end, position) - at; };
  // The keys that some query sees, and the keys that all queries see.
  const int64_t some_begin = in.window ? before(first - *in.window) : 0;
  const int64_t some_end = before(last + 1);
  const int64_t all_begin = in.window ? before(last - *in.window) : 0;
  const int64_t all_end = before(first + 1);
  std::vector<Segment> segments;
  const auto add_runs = [&](int64_t begin, int64_t stop) {
    while (begin < stop) {
      int64_t next = begin + 1;
      while (next < stop && at[next] == at[next - 1] + 1) ++next;
      const int64_t offset = first - at[begin];  // column of the key at the first query's position
      segments.push_back({begin, next, std::nullopt, offset});
      if (in.window) segments.back().low = offset - *in.window;
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

// Returns an additive mask.
at::Tensor additive(const at::Tensor& mask, const Inputs& in) {
  if (mask.scalar_type() != at::kBool) return mask.to(in.wide());
  return at::zeros(mask.sizes(), in.wide_options()).masked_fill_(mask.logical_not(), -INFINITY);
}

// Whether heads that share keys can be computed as rows of one head, so that keys are read only
// once.
bool shares_mask(const at::Tensor& mask, int64_t rows) {
  return !mask.defined() || (mask.size(1) == 1 && (rows == 1 || mask.size(2) == 1));
}

// Attends with torch's kernel, with the heads that share keys as rows of one head.
void attend_few_rows(const Inputs& in, const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const at::Tensor& mask, const Partial& to) {
  const int64_t groups = key.size(1), rows = in.heads() / groups * query.size(2);
  const at::Tensor folded = query.contiguous().view({in.samples(), groups, rows, query.size(3)});
  const auto given = mask.defined() ? std::optional(mask) : std::nullopt;
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      folded, key, value, /*dropout_p=*/0.0, /*is_causal=*/false, given, in.scale);
  at::Tensor part = out.to(in.wide()), part_lse = lse.to(in.wide());
  if (mask.defined()) {  // the kernel returns no log-sum-exp for rows that see no key
    const at::Tensor blind = mask.eq(-INFINITY).all(-1);
    part = part.masked_fill(blind.unsqueeze(-1), 0.0);
    part_lse = part_lse.masked_fill(blind, -INFINITY);
  }
  to.out.view({in.samples(), groups, rows, in.features()}).copy_(part);
  to.lse.view({in.samples(), groups, rows}).copy_(part_lse);
}

// Attends with the queries from `row` on to this rank's keys.
void attend(const Inputs& in, int64_t row, int64_t rows, const Partial& to) {
  if (to.out.numel() == 0) return;
  const at::Tensor query = with_dense_features(in.query.narrow(2, row, rows));
  const auto segments = segments_of(in, row, rows);
  for (const Segment& segment : segments) {
    const int64_t keys = segment.end - segment.begin;
    if (keys == 0) continue;
    const at::Tensor key = with_dense_features(in.key.narrow(2, segment.begin, keys));
    const at::Tensor value = with_dense_features(in.value.narrow(2, segment.begin, keys));
    at::Tensor mask = in.mask;
    if (mask.defined()) {
      if (mask.size(2) > 1) mask = mask.narrow(2, row, rows);
      if (mask.size(3) > 1) mask = mask.narrow(3, segment.begin, keys);
      mask = additive(mask, in).expand({mask.size(0), mask.size(1), mask.size(2), keys});
    }
    const bool few = rows * (in.heads() / key.size(1)) <= kTorchsRows && keys >= kTorchsKeys;
    const bool banded = segment.low || segment.high;
    if (few && !banded && !in.softcap && segments.size() == 1 && shares_mask(mask, rows) &&
        key.size(3) == value.size(3)) {
      attend_few_rows(in, query, key, value, mask, to);
      continue;
    }
    TileOptions options = in.tile_options();
    if (mask.defined()) options.mask = mask;
    options.low = segment.low;
    options.high = segment.high;
    attention_tile(query, key, value, to.out, to.lse, options);
  }
}

// --- all ranks -----------------------------------------------------------------------------------

// The layout of the ranks' results: for each rank its outputs, then its log-sum-exps.
struct Parts {
  const Inputs& in;
  int64_t rows;

  int64_t count() const { return in.samples() * in.heads() * rows; }
  int64_t numel() const { return count() * (in.features() + 1); }
  Partial of(const at::Tensor& all, int64_t rank) const {
    const at::Tensor own = all.narrow(0, rank * numel(), numel());
    const int64_t values = count() * in.features();
    return {own.narrow(0, 0, values).view({in.samples(), in.heads(), rows, in.features()}),
            own.narrow(0, values, count()).view({in.samples(), in.heads(), rows})};
  }
};

void prepare(CheckedCall& call, const Parts& parts, int ranks) {
  const Inputs& in = parts.in;
  std::ostringstream detail;
  detail << "heads=" << in.key.size(1) << " features=" << in.features();
  const auto show = [&](const char* name, const auto& option) {
    if (option) detail << ' ' << name << '=' << *option;
  };
  show("first_query", in.first_query);
  show("window_left", in.window);
  show("scale", in.scale);
  show("softcap", in.softcap);
  if (in.sinks.defined()) detail << " sinks";
  call.exchange.kind = ExchangeKind::kAllGather;
  call.exchange.call_name = name_call(kOp, in.query.scalar_type(), in.query.sizes(), detail.str());
  const int64_t bytes = parts.numel() * static_cast<int64_t>(c10::elementSize(in.wide()));
  call.add_input(0, bytes);
  for (int rank = 0; rank < ranks; ++rank) call.add_output(rank * bytes, bytes);
}

// The call is not cached: `first_query`, which the ranks compare, changes from token to token.
void gather(Group& group, const Parts& parts, const at::Tensor& own, const at::Tensor& all) {
  const auto call = std::make_shared<CheckedCall>();
  prepare(*call, parts, group.world_size());
  call->bind(own.const_data_ptr(), all.mutable_data_ptr());
  run(group, call->exchange);
}

Rows rows_of(const at::Tensor& tensor) {
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1),
          tensor.stride(2)};
}

void merge(const Partial& to, const at::Tensor& out, const at::Tensor& lse, const Parts& parts) {
  const auto dtype = static_cast<DType>(to.out.scalar_type());
  const MergeSizes sizes{parts.in.heads(), parts.rows, parts.in.features()};
  merge_rows(rows_of(to.out), dtype, rows_of(to.lse), rows_of(out), dtype, rows_of(lse), sizes, 0,
             parts.count());
}

// Attends with the queries from `row` on; `to` is their part of the result.
void attend_over_ranks(Group& group, const Inputs& in, int64_t row, int64_t rows,
                       const Partial& to) {
  const Parts parts{in, rows};
  const int64_t ranks = group.world_size();
  const at::Tensor own = new_output(at::empty({0}, in.wide_options()), {parts.numel()});
  const Partial partial = parts.of(own, 0);
  partial.out.zero_();
  partial.lse.fill_(-INFINITY);
  // Peers wait for the result, so an error here is reported to them.
  recorded(group, Kind::kProduce, kOp, [&] { attend(in, row, rows, partial); });
  at::Tensor all = own;
  if (ranks > 1) {
    all = new_output(own, {ranks * parts.numel()});
    gather(group, parts, own, all);
  }
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const Partial part = parts.of(all, rank);
    merge(to, part.out, part.lse, parts);
  }
  if (in.sinks.defined()) {  // a sink is a part whose values are 0
    const at::Tensor lse = in.sinks.to(in.wide()).view({1, -1, 1}).expand(to.lse.sizes());
    merge(to, at::zeros_like(to.out), lse, parts);
  }
}

Partial attend_all(Group& group, const Inputs& in) {
  const at::AutoDispatchBelowADInplaceOrView below;
  count_attention_run();
  const at::Tensor like = at::empty({0}, in.wide_options());
  const int64_t row_bytes = in.samples() * in.heads() * (in.features() + 1) *
                            static_cast<int64_t>(c10::elementSize(in.wide()));
  const int64_t most = std::max<int64_t>(1, kChunkBytes / std::max<int64_t>(1, row_bytes));
  const Partial whole{
      new_output(like, {in.samples(), in.heads(), in.rows(), in.features()}).zero_(),
      new_output(like, in.query.sizes().slice(0, 3)).fill_(-INFINITY)};
  int64_t row = 0;
  do {
    const int64_t rows = std::min(most, in.rows() - row);
    attend_over_ranks(group, in, row, rows,
                      {whole.out.narrow(2, row, rows), whole.lse.narrow(2, row, rows)});
    row += rows;
  } while (row < in.rows());
  return {whole.out.to(in.query.scalar_type()), whole.lse};
}

void kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  Partial result;
  Inputs in = inputs_of(arguments);
  if (!is_served(in)) return call_python(op, stack);
  const auto body = [&](const std::shared_ptr<Group>& group) {
    if (in.positions.defined()) in.positions = check_positions(in.positions);
    result = attend_all(*group, in);
  };
  if (!guarded(kOp, arguments, kGroupName, kSync, body)) return call_python(op, stack);
  arguments.end(std::move(result.out), std::move(result.lse));
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  m.impl(kOp, torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

}  // namespace symm_cp::spread_cache
