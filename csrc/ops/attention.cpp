// `fused_all_gather_attention` of few tokens: one exchange gathers keys and values, then kernels
// attend to all of them. Python, which pipelines larger shards, takes longer than these copies.
// Planned by symm_cp/ops/attention/few_tokens.py once for each kind of arguments.
//
// Shapes: query (B, H, S_q, E), key and value (B, G, S_k, E), this rank's shards.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <torch/library.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "attention/tile.h"
#include "ops/kernels.h"

namespace symm_cp::few_tokens {

namespace {

using namespace kernels;
using torch::jit::Stack;

constexpr const char* kAttention = "fused_all_gather_attention";

// The arguments of the op; its options are between.
enum : size_t { kQuery, kKey, kValue, kGroupName, kIsCausal, kScale };

bool is_plain(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.scalar_type() == dtype &&
         tensor.dim() == 4;
}

bool may_be_served(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const at::ScalarType dtype = key.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf && dtype != at::kDouble)
    return false;
  if (!is_plain(query, dtype) || !is_plain(key, dtype) || !is_plain(value, dtype)) return false;
  if (key.sizes() != value.sizes()) return false;
  return serves_few_tokens() && std::getenv("SYMM_CP_ATTENTION") == nullptr;
}

// Returns false where an option is a tensor: a plan cannot know its values.
bool append_option(CallKey& key, const Arguments& arguments, size_t index) {
  const c10::IValue& option = arguments.at(index);
  key.push_back(option.isNone());
  if (option.isNone()) return true;
  if (option.isBool()) {
    key.push_back(option.toBool());
  } else if (option.isInt()) {
    key.push_back(option.toInt());
  } else if (option.isDouble()) {
    const double number = option.toDouble();
    int64_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    key.push_back(bits);
  } else if (option.isString()) {
    const std::string& text = option.toStringRef();
    key.push_back(static_cast<int64_t>(text.size()));
    key.append(text.begin(), text.end());
  } else if (option.isIntList() || option.isSymIntList()) {
    const auto numbers = *arguments.numbers(index);
    key.push_back(static_cast<int64_t>(numbers.size()));
    key.append(numbers.begin(), numbers.end());
  } else {
    return false;
  }
  return true;
}

// What Python plans.
struct Plan {
  enum Form : int64_t { kInPython, kAll, kMasked, kTiles };

  struct Tile {
    int64_t q_begin, q_end, k_begin, k_end;
    std::optional<int64_t> low, high;
  };

  Form form = kInPython;
  std::vector<int64_t> lengths;  // the keys of each rank
  std::vector<Tile> tiles;       // in rows of all keys, one rank's behind the other's
  bool wide = false;             // tiles are merged in float32
  at::Tensor mask;               // (S_q, keys), added to scores; of kMasked
  at::Tensor blind;              // (S_q) of bool: rows that see no key; undefined if there are none
};

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::min();
constexpr size_t kTileNumbers = 6;

std::optional<int64_t> limit_of(int64_t number) {
  return number == kNoLimit ? std::nullopt : std::optional(number);
}

// A shard is a run of bytes for each head of each sample, of keys and of values.
void prepare_gather(CheckedCall& call, const at::Tensor& key, const std::vector<int64_t>& lengths,
                    int rank) {
  const int64_t heads = 2 * key.size(0) * key.size(1);
  const int64_t inner = key.size(3) * static_cast<int64_t>(key.element_size());
  const int64_t pitch = total(lengths) * inner;
  call.exchange.kind = ExchangeKind::kAllGather;
  call.add_input(0, heads * lengths[rank] * inner);
  int64_t begin = 0;
  for (const int64_t length : lengths) {
    const int64_t row = length * inner;
    call.add_output(begin, heads * row, row, pitch);
    begin += row;
  }
}

void plan(CheckedCall& call, Stack arguments, int rank) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("symm_cp::fused_all_gather_attention", "plan");
  const at::Tensor key = arguments[kKey].toTensor();
  try {
    op.callBoxed(arguments);
  } catch (const std::exception&) {  // an error of Python, of which the peers were told there
    throw Failed(std::current_exception());
  }
  const auto results = torch::jit::last(arguments, 7);
  const auto made = std::make_shared<Plan>();
  call.plan = made;
  made->form = static_cast<Plan::Form>(results[0].toInt());
  if (made->form == Plan::kInPython) return;
  made->lengths = results[1].toIntVector();
  const auto numbers = results[2].toIntVector();
  for (size_t at = 0; at < numbers.size(); at += kTileNumbers)
    made->tiles.push_back({numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3],
                           limit_of(numbers[at + 4]), limit_of(numbers[at + 5])});
  made->wide = results[3].toBool();
  if (made->form == Plan::kMasked) made->mask = results[4].toTensor();
  if (results[5].toTensor().numel() > 0) made->blind = results[5].toTensor();
  call.exchange.call_name = results[6].toStringRef();
  prepare_gather(call, key, made->lengths, rank);
}

// With the features of a position side by side: see `dense_features` of ops/attention/tiles.py.
at::Tensor with_dense_features(const at::Tensor& tensor) {
  const int64_t features = tensor.size(3);
  bool dense = features == 1 || tensor.stride(3) == 1;
  for (int64_t dim = 0; dim < 3; ++dim)
    dense &= tensor.stride(dim) >= features || tensor.stride(dim) == 0 || tensor.size(dim) == 1;
  return dense ? tensor : tensor.contiguous();
}

struct KeysAndValues {
  at::Tensor keys, values;
};

KeysAndValues gather(Group& group, CheckedCall& call, const Plan& plan, const at::Tensor& key,
                     const at::Tensor& value) {
  if (group.world_size() == 1) return {with_dense_features(key), with_dense_features(value)};
  at::DimVector shape{2};
  shape.append(key.sizes().begin(), key.sizes().end());
  const at::Tensor shard = new_output(key, shape);
  shard.select(0, 0).copy_(key);
  shard.select(0, 1).copy_(value);
  shape[3] = total(plan.lengths);
  const at::Tensor whole = new_output(key, shape);
  call.bind(shard.const_data_ptr(), whole.mutable_data_ptr());
  run(group, call.exchange);
  return {whole.select(0, 0), whole.select(0, 1)};
}

struct Results {
  at::Tensor out, lse;
};

at::ScalarType wide(const at::Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Results nothing(const at::Tensor& query) {
  const auto options = query.options().dtype(wide(query));
  return {at::empty_like(query), at::full(query.sizes().slice(0, 3), -INFINITY, options)};
}

// By torch's kernel, in one go.
Results attend_at_once(const at::Tensor& query, const KeysAndValues& all, const Plan& plan,
                       std::optional<double> scale) {
  const std::optional<at::Tensor> mask =
      plan.form == Plan::kMasked ? std::optional(plan.mask) : std::nullopt;
  auto [part, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, all.keys, all.values, /*dropout_p=*/0.0, /*is_causal=*/false, mask, scale);
  at::Tensor out = at::empty_like(query);
  if (out.strides() == part.strides())
    out = part;
  else
    out.copy_(part);
  lse = lse.contiguous();
  if (plan.blind.defined()) lse.masked_fill_(plan.blind, -INFINITY);
  return {out, lse};
}

Results attend_by_tiles(const at::Tensor& query, const KeysAndValues& all, const Plan& plan,
                        std::optional<double> scale) {
  const auto dtype = query.scalar_type(), numbers = wide(query);
  const at::Tensor out = at::empty_like(query, query.options().dtype(plan.wide ? numbers : dtype));
  const at::Tensor lse =
      at::full(query.sizes().slice(0, 3), -INFINITY, query.options().dtype(numbers));
  TileOptions options;
  options.scale = scale.value_or(1 / std::sqrt(static_cast<double>(query.size(3))));
  for (const Plan::Tile& tile : plan.tiles) {
    const int64_t rows = tile.q_end - tile.q_begin, keys = tile.k_end - tile.k_begin;
    options.low = tile.low;
    options.high = tile.high;
    attention_tile(query.narrow(2, tile.q_begin, rows), all.keys.narrow(2, tile.k_begin, keys),
                   all.values.narrow(2, tile.k_begin, keys), out.narrow(2, tile.q_begin, rows),
                   lse.narrow(2, tile.q_begin, rows), options);
  }
  if (plan.blind.defined()) out.masked_fill_(plan.blind.unsqueeze(-1), 0.0);
  return {plan.wide ? at::empty_like(query).copy_(out) : out, lse};
}

// Undefined where the kernel in Python is needed.
Results attend(Group& group, const Arguments& arguments) {
  const at::Tensor &key = arguments.tensor(kKey), &value = arguments.tensor(kValue);
  const at::Tensor query = arguments.tensor(kQuery);
  if (!may_be_served(query, key, value)) return {};
  CallKey call_key{reinterpret_cast<intptr_t>(kAttention), group.world_size(), group.rank()};
  for (const at::Tensor* tensor : {&query, &key, &value}) add_tensor(call_key, *tensor);
  for (size_t i = kIsCausal; i < arguments.count(); ++i)
    if (!append_option(call_key, arguments, i)) return {};
  const auto call = CheckedCalls::of_this_thread().take(
      call_key, [&](CheckedCall& call) { plan(call, arguments.all(), group.rank()); });
  const auto& planned = *static_cast<const Plan*>(call->plan.get());
  if (planned.form == Plan::kInPython) return {};
  count_attention_run();
  const at::AutoDispatchBelowADInplaceOrView below;
  const KeysAndValues all = gather(group, *call, planned, key, value);
  Results results;
  after_exchange(group, kAttention, [&] {
    const at::Tensor dense = with_dense_features(query);
    const auto scale = arguments.at(kScale).toOptional<double>();
    if (query.numel() == 0)
      results = nothing(dense);
    else if (planned.form == Plan::kTiles)
      results = attend_by_tiles(dense, all, planned, scale);
    else
      results = attend_at_once(dense, all, planned, scale);
  });
  return results;
}

void attention_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  Results results;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    results = attend(*group, arguments);
  };
  if (!guarded(kAttention, arguments, kGroupName, kSync, body) || !results.out.defined())
    return call_python(op, stack);
  arguments.end(std::move(results.out), std::move(results.lse));
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  m.impl(kAttention, torch::CppFunction::makeFromBoxedFunction<&attention_kernel>());
}

}  // namespace symm_cp::few_tokens
