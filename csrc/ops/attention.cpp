// `fused_all_gather_attention` of few tokens, and its gradients: one exchange gathers keys and
// values, kernels attend to all of them, and in the backward pass another exchange adds up the
// gradients. Python pipelines larger shards; for so few tokens, Python itself would take longer
// than the copies. symm_cp/ops/attention/few_tokens.py plans each kind of call once.
//
// Shapes: query (B, H, S_q, E), key and value (B, G, S_k, E), this rank's shards.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
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

constexpr const char* kBackward = "fused_all_gather_attention_backward";

// The positions of an op's arguments. Its options come after the group's name.
struct Places {
  size_t query, group_name, is_causal;

  size_t key() const { return query + 1; }
  size_t value() const { return query + 2; }
  size_t scale() const { return is_causal + 1; }
};

constexpr Places kForwardPlaces{0, 3, 4};
constexpr Places kBackwardPlaces{1, 6, 8};
enum : size_t { kGradOut = 0, kOut = 4, kLse = 5, kGradLse = 7 };  // of the backward pass

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

// Returns false if the option is a tensor: a plan cannot depend on its values.
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

// Python's plan of a call.
struct Plan {
  enum Form : int64_t { kInPython, kAll, kMasked, kTiles };

  struct Tile {
    int64_t q_begin, q_end, k_begin, k_end;
    std::optional<int64_t> low, high;
  };

  Form form = kInPython;
  std::vector<int64_t> lengths;  // number of keys of each rank
  std::vector<Tile> tiles;       // in positions among all keys, in rank order
  bool wide = false;             // tiles are merged in float32
  at::Tensor mask;               // (S_q, keys), added to scores; for kMasked
  at::Tensor blind;              // (S_q) of bool: rows that see no key; undefined if there are none
};

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::min();
constexpr size_t kTileNumbers = 6;

std::optional<int64_t> limit_of(int64_t number) {
  return number == kNoLimit ? std::nullopt : std::optional(number);
}

// Makes a plan of a call with the op's `plan` function in Python.
std::shared_ptr<const Plan> plan_of(const char* name, Stack arguments, std::string& call_name) {
  const std::string of_op = std::string("symm_cp::") + name;
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(of_op.c_str(), "plan");
  try {
    op.callBoxed(arguments);
  } catch (const std::exception&) {  // an error in Python, already reported to the peers
    throw Failed(std::current_exception());
  }
  const auto results = torch::jit::last(arguments, 7);
  const auto made = std::make_shared<Plan>();
  made->form = static_cast<Plan::Form>(results[0].toInt());
  if (made->form == Plan::kInPython) return made;
  made->lengths = results[1].toIntVector();
  const auto numbers = results[2].toIntVector();
  for (size_t at = 0; at < numbers.size(); at += kTileNumbers)
    made->tiles.push_back({numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3],
                           limit_of(numbers[at + 4]), limit_of(numbers[at + 5])});
  made->wide = results[3].toBool();
  if (made->form == Plan::kMasked) made->mask = results[4].toTensor();
  if (results[5].toTensor().numel() > 0) made->blind = results[5].toTensor();
  call_name = results[6].toStringRef();
  return made;
}

// Makes the features of a position contiguous: see `dense_features` of ops/attention/tiles.py.
at::Tensor with_dense_features(const at::Tensor& tensor) {
  const int64_t features = tensor.size(3);
  bool dense = features == 1 || tensor.stride(3) == 1;
  for (int64_t dim = 0; dim < 3; ++dim)
    dense &= tensor.stride(dim) >= features || tensor.stride(dim) == 0 || tensor.size(dim) == 1;
  return dense ? tensor : tensor.contiguous();
}

at::ScalarType wide(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

struct KeysAndValues {
  at::Tensor keys, values;
};

// A call whose plan is known.
struct Call {
  const char* op;
  Group& group;
  at::Tensor query, key, value;
  std::optional<double> scale;
  CallKey call_key;
  std::shared_ptr<CheckedCall> gather;

  const Plan& plan() const { return *static_cast<const Plan*>(gather->plan.get()); }
  // The shape of keys and values of `positions` positions.
  at::DimVector shape(int64_t positions) const {
    return {2, key.size(0), key.size(1), positions, key.size(3)};
  }
  // The options of sums over ranks.
  at::TensorOptions wide_options() const { return key.options().dtype(wide(key)); }
  TileOptions options() const {
    TileOptions options;
    options.scale = scale.value_or(1 / std::sqrt(static_cast<double>(query.size(3))));
    return options;
  }
};

// A shard is one run of bytes per head of each sample, for keys and for values.
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

// Returns nullopt if the kernel in Python is needed.
std::optional<Call> planned(const char* op, Group& group, const Arguments& arguments,
                            const Places& at) {
  Call call{op,
            group,
            arguments.tensor(at.query),
            arguments.tensor(at.key()),
            arguments.tensor(at.value()),
            {},
            {},
            {}};
  if (!may_be_served(call.query, call.key, call.value)) return {};
  call.call_key = {reinterpret_cast<intptr_t>(op), group.world_size(), group.rank()};
  for (const at::Tensor* tensor : {&call.query, &call.key, &call.value})
    add_tensor(call.call_key, *tensor);
  for (size_t i = at.is_causal; i < arguments.count(); ++i)
    if (!append_option(call.call_key, arguments, i)) return {};
  call.scale = arguments.at(at.scale()).toOptional<double>();
  call.gather = CheckedCalls::of_this_thread().take(call.call_key, [&](CheckedCall& checked) {
    const auto plan = plan_of(op, arguments.all(), checked.exchange.call_name);
    checked.plan = plan;
    if (plan->form != Plan::kInPython)
      prepare_gather(checked, call.key, plan->lengths, group.rank());
  });
  if (call.plan().form == Plan::kInPython) return {};
  return call;
}

// Makes the exchange read keys and values in place, as two rows.
void bind_in_place(Extent& input, const at::Tensor& keys, const at::Tensor& values) {
  auto* const begin = static_cast<char*>(const_cast<void*>(keys.const_data_ptr()));
  input.data = begin;
  input.row = static_cast<int64_t>(keys.nbytes());
  input.pitch = static_cast<const char*>(values.const_data_ptr()) - begin;
}

KeysAndValues gather(const Call& call) {
  if (call.group.world_size() == 1)
    return {with_dense_features(call.key), with_dense_features(call.value)};
  const at::Tensor keys = call.key.contiguous(), values = call.value.contiguous();
  const at::Tensor whole = new_output(call.key, call.shape(total(call.plan().lengths)));
  call.gather->bind(nullptr, whole.mutable_data_ptr());
  if (keys.numel() > 0) bind_in_place(call.gather->exchange.input[0], keys, values);
  run(call.group, call.gather->exchange);
  return {whole.select(0, 0), whole.select(0, 1)};
}

// The mask for torch's kernel.
std::optional<at::Tensor> mask_of(const Plan& plan) {
  return plan.form == Plan::kMasked ? std::optional(plan.mask) : std::nullopt;
}

// Calls `body(rows, keys, options)` for each tile; `rows` and `keys` narrow tensors to it.
template <class Body>
void for_tiles(const Call& call, const Body& body) {
  TileOptions options = call.options();
  for (const Plan::Tile& tile : call.plan().tiles) {
    const auto rows = [&](const at::Tensor& tensor) {
      return tensor.narrow(2, tile.q_begin, tile.q_end - tile.q_begin);
    };
    const auto keys = [&](const at::Tensor& tensor) {
      return tensor.narrow(2, tile.k_begin, tile.k_end - tile.k_begin);
    };
    options.low = tile.low;
    options.high = tile.high;
    body(rows, keys, options);
  }
}

// --- forward -------------------------------------------------------------------------------------

struct Results {
  at::Tensor out, lse;
};

Results nothing(const at::Tensor& query) {
  const auto options = query.options().dtype(wide(query));
  return {at::empty_like(query), at::full(query.sizes().slice(0, 3), -INFINITY, options)};
}

// Attends to all keys at once, with torch's kernel.
Results attend_at_once(const Call& call, const at::Tensor& query, const KeysAndValues& all) {
  auto [part, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, all.keys, all.values, /*dropout_p=*/0.0, /*is_causal=*/false, mask_of(call.plan()),
      call.scale);
  at::Tensor out = at::empty_like(query);
  if (out.strides() == part.strides())
    out = part;
  else
    out.copy_(part);
  lse = lse.contiguous();
  if (call.plan().blind.defined()) lse.masked_fill_(call.plan().blind, -INFINITY);
  return {out, lse};
}

Results attend_by_tiles(const Call& call, const at::Tensor& query, const KeysAndValues& all) {
  const Plan& plan = call.plan();
  const auto dtype = plan.wide ? wide(query) : query.scalar_type();
  const at::Tensor out = at::empty_like(query, query.options().dtype(dtype));
  const at::Tensor lse =
      at::full(query.sizes().slice(0, 3), -INFINITY, query.options().dtype(wide(query)));
  for_tiles(call, [&](const auto& rows, const auto& keys, const TileOptions& options) {
    attention_tile(rows(query), keys(all.keys), keys(all.values), rows(out), rows(lse), options);
  });
  if (plan.blind.defined()) out.masked_fill_(plan.blind.unsqueeze(-1), 0.0);
  return {plan.wide ? at::empty_like(query).copy_(out) : out, lse};
}

// Returns undefined tensors if the kernel in Python is needed.
Results attend(Group& group, const Arguments& arguments) {
  const auto call = planned(kAttention, group, arguments, kForwardPlaces);
  if (!call) return {};
  count_attention_run();
  const at::AutoDispatchBelowADInplaceOrView below;
  const KeysAndValues all = gather(*call);
  Results results;
  after_exchange(group, kAttention, [&] {
    const at::Tensor query = with_dense_features(call->query);
    if (query.numel() == 0)
      results = nothing(query);
    else if (call->plan().form == Plan::kTiles)
      results = attend_by_tiles(*call, query, all);
    else
      results = attend_at_once(*call, query, all);
  });
  return results;
}

void attention_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  Results results;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    results = attend(*group, arguments);
  };
  if (!guarded(kAttention, arguments, kForwardPlaces.group_name, kSync, body) ||
      !results.out.defined())
    return call_python(op, stack);
  arguments.end(std::move(results.out), std::move(results.lse));
}

// --- backward ------------------------------------------------------------------------------------

struct Gradients {
  at::Tensor query, key, value;
};

// The backward pass's arguments besides queries, keys and values.
struct Saved {
  at::Tensor grad_out, out, lse;
  std::optional<at::Tensor> grad_lse;
};

// Returns memory for (B, H, S, E) in which the heads of a position are contiguous.
at::Tensor rows_first(const at::Tensor& like, at::ScalarType dtype) {
  const auto sizes = like.sizes();
  return pooled_empty({sizes[0], sizes[2], sizes[1], sizes[3]}, like.options().dtype(dtype))
      .transpose(1, 2);
}

// Gives a gradient the strides of `heads_in_rows` of ops/attention/pipeline.py.
at::Tensor as_result(const at::Tensor& grad, at::ScalarType dtype) {
  const bool whole = grad.storage().nbytes() == grad.nbytes();
  if (grad.scalar_type() == dtype && whole && grad.transpose(1, 2).is_contiguous()) return grad;
  return rows_first(grad, dtype).copy_(grad);
}

// Raises TypeError or ValueError unless a tensor has the query's dtype and shape.
void check_saved(const char* name, const at::Tensor& tensor, const at::Tensor& query) {
  TORCH_CHECK_TYPE(is_plain(tensor, query.scalar_type()), kBackward, ": ", name, " is ",
                   name_dtype(tensor.scalar_type()), " on ", tensor.device(), ", must be a dense ",
                   name_dtype(query.scalar_type()), " tensor of 4 dimensions on cpu");
  TORCH_CHECK_VALUE(tensor.sizes() == query.sizes(), kBackward, ": ", name, " has shape ",
                    tensor.sizes(), ", must be the shape of query, ", query.sizes());
}

// Computes the gradients of this rank's queries, and these queries' share of the gradients of all
// keys and values, (B, G, keys, E).
Gradients gradients_of_all(const Call& call, const Saved& saved, const KeysAndValues& all) {
  const Plan& plan = call.plan();
  const at::Tensor query = with_dense_features(call.query);
  const at::Tensor grad_out = with_dense_features(saved.grad_out);
  const auto zeros = [&] {
    return pooled_empty(call.shape(total(plan.lengths)), call.wide_options()).zero_();
  };
  if (query.numel() == 0) {
    const at::Tensor none = zeros();
    return {at::empty_like(query), none.select(0, 0), none.select(0, 1)};
  }
  // Gives lse the strides that torch's kernel returns. An lse of inf gives zero weights to rows
  // that see no key.
  at::Tensor lse = saved.lse.to(wide(query)).transpose(1, 2).contiguous().transpose(1, 2);
  if (plan.blind.defined()) lse = lse.masked_fill(plan.blind, INFINITY);
  if (plan.form != Plan::kTiles && !saved.grad_lse) {
    const auto [of_query, of_key, of_value] =
        at::_scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, all.keys, all.values, saved.out, lse, /*dropout_p=*/0.0,
            /*is_causal=*/false, mask_of(plan), call.scale);
    return {of_query, of_key, of_value};
  }
  const at::Tensor of_keys = zeros();
  const at::Tensor of_query = rows_first(query, wide(query)).zero_();
  const at::Tensor inner = attention_inner(grad_out, saved.out, saved.grad_lse);
  for_tiles(call, [&](const auto& rows, const auto& keys, const TileOptions& options) {
    attention_tile_backward(
        rows(grad_out), rows(query), keys(all.keys), keys(all.values), rows(lse), rows(inner),
        {rows(of_query), keys(of_keys.select(0, 0)), keys(of_keys.select(0, 1))}, options);
  });
  return {of_query, of_keys.select(0, 0), of_keys.select(0, 1)};
}

// Plans consecutive parts, one for each rank.
void prepare_scatter(CheckedCall& scatter, const Call& call) {
  const auto dtype = wide(call.key);
  const auto& lengths = call.plan().lengths;
  scatter.exchange.kind = ExchangeKind::kReduceScatter;
  scatter.exchange.call_name = call.gather->exchange.call_name;
  set_reduction(scatter.exchange, dtype, ReduceOp::kSum);
  const int64_t each =
      c10::multiply_integers(call.shape(1)) * static_cast<int64_t>(c10::elementSize(dtype));
  int64_t begin = 0;
  for (const int64_t length : lengths) {
    scatter.add_input(begin, length * each);
    begin += length * each;
  }
  scatter.add_output(0, lengths[call.group.rank()] * each);
}

// Adds up the gradients of this rank's keys and values from all ranks' queries.
KeysAndValues reduce_scatter(const Call& call, const KeysAndValues& of_all) {
  if (call.group.world_size() == 1) return of_all;
  CallKey key = call.call_key;
  key.push_back(1);  // distinguishes this exchange from the gather
  const auto scatter = CheckedCalls::of_this_thread().take(
      key, [&](CheckedCall& scatter) { prepare_scatter(scatter, call); });
  const int64_t each = c10::multiply_integers(call.shape(1));  // elements of a position
  const at::Tensor parts = pooled_empty({each * total(call.plan().lengths)}, call.wide_options());
  int64_t position = 0;
  for (const int64_t length : call.plan().lengths) {
    const auto shape = call.shape(length);
    const at::Tensor part = parts.narrow(0, each * position, each * length).view(shape);
    part.select(0, 0).copy_(of_all.keys.narrow(2, position, length));
    part.select(0, 1).copy_(of_all.values.narrow(2, position, length));
    position += length;
  }
  const at::Tensor own = pooled_empty(call.shape(call.key.size(2)), call.wide_options());
  scatter->bind(parts.const_data_ptr(), own.mutable_data_ptr());
  run(call.group, scatter->exchange);
  return {own.select(0, 0), own.select(0, 1)};
}

// Returns undefined tensors if the kernel in Python is needed.
Gradients attend_backward(Group& group, const Arguments& arguments) {
  const auto call = planned(kBackward, group, arguments, kBackwardPlaces);
  if (!call) return {};
  const at::AutoDispatchBelowADInplaceOrView below;
  check_saved("grad_out", arguments.tensor(kGradOut), call->query);
  check_saved("out", arguments.tensor(kOut), call->query);
  const Saved saved{arguments.tensor(kGradOut), arguments.tensor(kOut), arguments.tensor(kLse),
                    arguments.at(kGradLse).toOptional<at::Tensor>()};
  const KeysAndValues all = gather(*call);
  Gradients of_all;
  // Peers wait for the gradients, so an error here is reported to them.
  recorded(group, Kind::kConsume, kBackward, [&] { of_all = gradients_of_all(*call, saved, all); });
  const KeysAndValues own = reduce_scatter(*call, {of_all.key, of_all.value});
  Gradients grads;
  after_exchange(group, kBackward, [&] {
    const auto dtype = call->query.scalar_type();
    grads = {as_result(of_all.query, dtype), as_result(own.keys, dtype),
             as_result(own.values, dtype)};
  });
  return grads;
}

void backward_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  Gradients grads;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    grads = attend_backward(*group, arguments);
  };
  if (!guarded(kBackward, arguments, kBackwardPlaces.group_name, kSync, body) ||
      !grads.query.defined())
    return call_python(op, stack);
  // The native kernel takes neither sinks nor bias: their gradients are empty.
  const at::Tensor none = grads.query.new_empty({0}), none_either = grads.query.new_empty({0});
  arguments.end(std::move(grads.query), std::move(grads.key), std::move(grads.value), none,
                none_either);
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  m.impl(kAttention, torch::CppFunction::makeFromBoxedFunction<&attention_kernel>());
  m.impl(kBackward, torch::CppFunction::makeFromBoxedFunction<&backward_kernel>());
}

}  // namespace symm_cp::few_tokens
