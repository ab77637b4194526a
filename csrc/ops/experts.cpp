// Tokens to their experts, which the ranks divide among them, and results back: the kernels of
// symm_cp/ops/experts/op.py.
//
// First all ranks learn how many tokens each has for each expert, from which every one knows what
// it sends and where what it gets belongs. Then rows go straight from their place in one rank's
// tensor to that in another's, over the slots of the ranks.
#include <ATen/Functions.h>
#include <torch/library.h>
#include "base/parallel.h"

#include <algorithm>

#include "exchange/float16.h"
#include "ops/kernels.h"

namespace symm_cp {

namespace {

using namespace kernels;
using torch::jit::Stack;

constexpr const char* kRoute = "_route_to_experts";
constexpr const char* kDispatchRows = "dispatch_to_experts";
constexpr const char* kCombineRows = "combine_from_experts";
constexpr int64_t kDropped = -1;

int64_t experts_of_rank(const char* op, int64_t experts, int64_t ranks) {
  TORCH_CHECK_VALUE(experts > 0 && experts % ranks == 0, op, ": num_experts=", experts,
                    " must be a positive multiple of world size ", ranks);
  return experts / ranks;
}

// The table of a routing: how many tokens each rank sends to each expert, then for each pair of a
// token of this rank and one of its experts, when it is sent.
class Routing {
 public:
  Routing(const char* op, const at::Tensor& table, int64_t experts, const Group& group)
      : ranks_(group.world_size()),
        rank_(group.rank()),
        experts_(experts),
        local_(experts_of_rank(op, experts, ranks_)) {
    TORCH_CHECK_TYPE(table.scalar_type() == at::kLong && table.is_contiguous(), op,
                     ": table must be a contiguous torch.int64 tensor, is ",
                     name_dtype(table.scalar_type()));
    TORCH_CHECK_VALUE(table.dim() == 1 && table.numel() >= ranks_ * experts_, op, ": table ",
                      table.sizes(), " is not of a routing of ", ranks_, " ranks to ", experts_,
                      " experts");
    counts_ = table.const_data_ptr<int64_t>();
    places_ = counts_ + ranks_ * experts_;
    pairs_ = table.numel() - ranks_ * experts_;
    const bool counted =
        std::all_of(counts_, places_, [](int64_t n) { return n >= 0 && n <= INT32_MAX; });
    for (int64_t e = 0; counted && e < experts_; ++e) sent_ += count(rank_, e);
    pair_at_.assign(static_cast<size_t>(counted && sent_ <= pairs_ ? sent_ : 0), kDropped);
    int64_t found = 0;
    for (int64_t pair = 0; pair < pairs_; ++pair) {
      const int64_t at = places_[pair];
      if (at < 0 || at >= static_cast<int64_t>(pair_at_.size()) || pair_at_[at] >= 0) continue;
      pair_at_[at] = pair;
      ++found;
    }
    TORCH_CHECK_VALUE(counted && found == sent_, op, ": table is not one of a routing of rank ",
                      rank_);
    begins_.resize(static_cast<size_t>(ranks_ + 1));
    for (int64_t e = 0; e < experts_; ++e) begins_[e / local_ + 1] += count(rank_, e);
    for (int64_t r = 0; r < ranks_; ++r) begins_[r + 1] += begins_[r];
    place_arriving();
  }

  int64_t pairs() const { return pairs_; }
  int64_t place(int64_t pair) const { return places_[pair]; }
  // What this rank sends to `peer` begins here, of all that it sends.
  int64_t begin(int64_t peer) const { return begins_[peer]; }
  int64_t given(int64_t peer) const { return begins_[peer + 1] - begins_[peer]; }
  int64_t taken(int64_t peer) const { return static_cast<int64_t>(arriving_[peer].size()); }
  int64_t sent() const { return sent_; }
  // How many rows this rank's experts get, and which of them are those of a rank's tokens.
  int64_t rows() const { return rows_; }
  const int64_t* arriving(int64_t peer) const { return arriving_[peer].data(); }
  // The tokens of all that is sent.
  std::vector<int64_t> tokens(int64_t top_k) const {
    std::vector<int64_t> all(pair_at_);
    for (int64_t& pair : all) pair /= top_k;
    return all;
  }

 private:
  int64_t count(int64_t rank, int64_t expert) const { return counts_[rank * experts_ + expert]; }
  void place_arriving() {
    arriving_.resize(static_cast<size_t>(ranks_));
    for (int64_t e = rank_ * local_; e < (rank_ + 1) * local_; ++e)
      for (int64_t r = 0; r < ranks_; ++r)
        for (int64_t i = 0; i < count(r, e); ++i) arriving_[r].push_back(rows_++);
  }

  int64_t ranks_, rank_, experts_, local_;
  const int64_t* counts_ = nullptr;
  const int64_t* places_ = nullptr;
  int64_t pairs_ = 0, sent_ = 0, rows_ = 0;
  std::vector<int64_t> pair_at_, begins_;
  std::vector<std::vector<int64_t>> arriving_;
};

// TokenRows with their elements side by side, and how far apart they begin.
struct TokenRows {
  at::Tensor tensor;
  char* data;
  int64_t bytes, pitch;

  explicit TokenRows(const at::Tensor& given)
      : tensor(given.numel() > 0 && given[0].is_contiguous() ? given : given.contiguous()),
        data(static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()))),
        bytes(static_cast<int64_t>(tensor.element_size())),
        pitch(tensor.stride(0) * bytes) {
    for (const int64_t size : tensor.sizes().slice(1)) bytes *= size;
  }
  Extent extent(int64_t count, const int64_t* numbers) const {
    return {data, count * bytes, bytes, pitch, numbers};
  }
};

// What all ranks' calls have in common.
std::string name_of_rows(const char* op, const at::Tensor& rows, int64_t experts,
                         const std::string& detail = "") {
  return name_call(op, rows.scalar_type(), rows.sizes().slice(1),
                   std::to_string(experts) + " experts" + detail);
}

// --- the routing -------------------------------------------------------------------------------

at::Tensor check_experts(const at::Tensor& experts, int64_t num_experts) {
  TORCH_CHECK_TYPE(experts.scalar_type() == at::kLong || experts.scalar_type() == at::kInt, kRoute,
                   ": experts is ", name_dtype(experts.scalar_type()),
                   ", must be torch.int64 or torch.int32");
  check_dense(kRoute, "experts", experts.contiguous());
  TORCH_CHECK_VALUE(experts.dim() == 2, kRoute, ": experts ", experts.sizes(),
                    " must have 2 dimensions: (tokens, experts of each)");
  const at::Tensor chosen = experts.to(at::kLong).contiguous();
  const auto* ids = chosen.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < chosen.numel(); ++i)
    TORCH_CHECK_VALUE(kDropped <= ids[i] && ids[i] < num_experts, kRoute, ": expert ", ids[i],
                      " of token ", i / experts.size(1), " must be from 0 to ", num_experts - 1,
                      ", or -1 for none");
  return chosen;
}

void gather_counts(Group& group, int64_t* counts, int64_t experts, const std::string& name) {
  Exchange exchange{};
  exchange.kind = ExchangeKind::kAllGather;
  exchange.call_name = name;
  const auto bytes = experts * static_cast<int64_t>(sizeof(int64_t));
  for (int rank = 0; rank < group.world_size(); ++rank)
    exchange.output.push_back({counts + rank * experts, bytes});
  exchange.input.push_back(exchange.output[group.rank()]);
  run(group, std::move(exchange));
}

// The first tokens of an expert stay, in the order of ranks.
void limit(int64_t* counts, int64_t ranks, int64_t experts, int64_t capacity) {
  for (int64_t e = 0; e < experts; ++e)
    for (int64_t r = 0, left = capacity; r < ranks; ++r) {
      int64_t& count = counts[r * experts + e];
      count = std::min(count, left);
      left -= count;
    }
}

std::tuple<at::Tensor, at::Tensor> route(Group& group, const at::Tensor& experts,
                                         int64_t num_experts, std::optional<int64_t> capacity) {
  const int64_t ranks = group.world_size(), local = experts_of_rank(kRoute, num_experts, ranks);
  TORCH_CHECK_VALUE(!capacity || *capacity >= 0, kRoute, ": capacity=", capacity.value_or(0),
                    " must not be negative");
  const at::Tensor chosen = check_experts(experts, num_experts);
  const int64_t pairs = chosen.numel();
  const auto* ids = chosen.const_data_ptr<int64_t>();
  at::Tensor table = at::zeros({ranks * num_experts + pairs}, at::kLong);
  auto* counts = table.mutable_data_ptr<int64_t>();
  int64_t* own = counts + group.rank() * num_experts;
  for (int64_t pair = 0; pair < pairs; ++pair)
    if (ids[pair] >= 0) ++own[ids[pair]];
  const std::string limited = capacity ? " capacity " + std::to_string(*capacity) : "";
  gather_counts(group, counts, num_experts,
                name_call(kRoute, at::kLong, {num_experts, experts.size(1)}, "experts" + limited));
  if (capacity) limit(counts, ranks, num_experts, *capacity);
  std::vector<int64_t> next(static_cast<size_t>(num_experts)), left(own, own + num_experts);
  for (int64_t e = 1; e < num_experts; ++e) next[e] = next[e - 1] + own[e - 1];
  int64_t* places = counts + ranks * num_experts;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t expert = ids[pair];
    places[pair] = expert >= 0 && left[expert]-- > 0 ? next[expert]++ : kDropped;
  }
  at::Tensor ends = at::empty({local}, at::kInt);
  auto* end = ends.mutable_data_ptr<int32_t>();
  int64_t rows = 0;
  for (int64_t e = 0; e < local; ++e) {
    for (int64_t r = 0; r < ranks; ++r) rows += counts[r * num_experts + group.rank() * local + e];
    end[e] = static_cast<int32_t>(rows);
  }
  return {std::move(table), std::move(ends)};
}

void route_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  std::tuple<at::Tensor, at::Tensor> routed;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    routed = route(*group, arguments.tensor(0), arguments.number(1), arguments.optional_number(2));
  };
  if (!guarded(kRoute, arguments, 3, kSync, body)) return call_python(op, stack);
  arguments.end(std::get<0>(std::move(routed)), std::get<1>(std::move(routed)));
}

// --- rows to the experts -----------------------------------------------------------------------

at::Tensor dispatch_rows(Group& group, const at::Tensor& tokens, const at::Tensor& table,
                         int64_t rows, int64_t top_k, int64_t experts) {
  check_has_dims(kDispatchRows, "tokens", tokens);
  const Routing routing(kDispatchRows, table, experts, group);
  TORCH_CHECK_VALUE(top_k > 0 && tokens.size(0) * top_k == routing.pairs(), kDispatchRows,
                    ": tokens ", tokens.sizes(), " with top_k=", top_k,
                    " do not belong to a routing of ", routing.pairs(),
                    " pairs of a token and an expert");
  TORCH_CHECK_VALUE(rows == routing.rows(), kDispatchRows, ": rows=", rows, " must be ",
                    routing.rows(), ", the rows of this rank's experts");
  const TokenRows input(tokens);
  at::DimVector shape(tokens.sizes());
  shape[0] = rows;
  at::Tensor out = new_output(tokens, shape);
  const TokenRows output(out);
  const auto numbers = routing.tokens(top_k);
  Exchange exchange{};
  exchange.kind = ExchangeKind::kAllToAll;
  exchange.call_name = name_of_rows(kDispatchRows, tokens, experts);
  for (int64_t peer = 0; peer < group.world_size(); ++peer) {
    exchange.input.push_back(
        input.extent(routing.given(peer), numbers.data() + routing.begin(peer)));
    exchange.output.push_back(output.extent(routing.taken(peer), routing.arriving(peer)));
  }
  run(group, std::move(exchange));
  return out;
}

void dispatch_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  at::Tensor out;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    out = dispatch_rows(*group, arguments.tensor(0), arguments.tensor(1), arguments.number(2),
                        arguments.number(3), arguments.number(4));
  };
  if (!guarded(kDispatchRows, arguments, 5, kSync, body)) return call_python(op, stack);
  arguments.end(std::move(out));
}

// --- rows back to their tokens -----------------------------------------------------------------

// out[t] = weights[t, 0] * (row of pair t, 0) + weights[t, 1] * ..., in this order.
template <class T>
void add_rows(const Routing& routing, const std::vector<const char*>& row_at,
              const at::Tensor& weights, int64_t top_k, at::Tensor& out) {
  using Sum = typename Conversion<T>::Sum;
  constexpr int64_t kBlock = 512;
  const int64_t count = out.size(0), width = count == 0 ? 0 : out.numel() / count;
  auto* to = static_cast<T*>(out.mutable_data_ptr());
  const Sum* weight = weights.defined() ? weights.const_data_ptr<Sum>() : nullptr;
  const int64_t grain = std::max<int64_t>(1, (int64_t{32} << 10) / std::max<int64_t>(1, width));
  parallel_for(0, count, grain, [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token)
      for (int64_t begin = 0; begin < width; begin += kBlock) {
        const int64_t length = std::min(kBlock, width - begin);
        Sum sum[kBlock] = {};
        for (int64_t pair = token * top_k; pair < (token + 1) * top_k; ++pair) {
          if (routing.place(pair) < 0) continue;
          const T* row = reinterpret_cast<const T*>(row_at[routing.place(pair)]) + begin;
          const Sum factor = weight == nullptr ? Sum{1} : weight[pair];
          for (int64_t i = 0; i < length; ++i) sum[i] += factor * Conversion<T>::load(row[i]);
        }
        T* result = to + token * width + begin;
        for (int64_t i = 0; i < length; ++i) result[i] = Conversion<T>::store(sum[i]);
      }
  });
}

void add_rows_of(const Routing& routing, const std::vector<const char*>& row_at,
                 const at::Tensor& weights, int64_t top_k, at::Tensor& out) {
  switch (out.scalar_type()) {
    case at::kFloat: return add_rows<float>(routing, row_at, weights, top_k, out);
    case at::kDouble: return add_rows<double>(routing, row_at, weights, top_k, out);
    case at::kBFloat16: return add_rows<BFloat16>(routing, row_at, weights, top_k, out);
    default: return add_rows<_Float16>(routing, row_at, weights, top_k, out);
  }
}

void check_combine(const at::Tensor& rows, const at::Tensor& weights, const Routing& routing,
                   int64_t top_k) {
  const auto dtype = rows.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
      kCombineRows, ": rows is ", name_dtype(dtype),
      ", must be torch.float64, torch.float32, torch.bfloat16 or torch.float16");
  TORCH_CHECK_VALUE(top_k > 0 && routing.pairs() % top_k == 0, kCombineRows, ": top_k=", top_k,
                    " must divide the ", routing.pairs(), " pairs of the routing");
  TORCH_CHECK_VALUE(rows.size(0) == routing.rows(), kCombineRows, ": rows ", rows.sizes(),
                    " must have ", routing.rows(), ", as dispatch returned");
  if (!weights.defined()) return;
  TORCH_CHECK_TYPE(weights.is_floating_point(), kCombineRows, ": weights is ",
                   name_dtype(weights.scalar_type()), ", must be a floating dtype");
  TORCH_CHECK_VALUE(weights.sizes() == at::IntArrayRef({routing.pairs() / top_k, top_k}),
                    kCombineRows, ": weights ", weights.sizes(), " must be ",
                    at::IntArrayRef({routing.pairs() / top_k, top_k}),
                    ", one for each token and expert");
}

at::Tensor combine_rows(Group& group, const at::Tensor& rows, const at::Tensor& weights,
                        const at::Tensor& table, int64_t top_k, int64_t experts) {
  check_has_dims(kCombineRows, "rows", rows);
  const Routing routing(kCombineRows, table, experts, group);
  check_combine(rows, weights, routing, top_k);
  const bool wide = rows.scalar_type() == at::kDouble;
  const at::Tensor factors =
      weights.defined() ? weights.to(wide ? at::kDouble : at::kFloat).contiguous() : weights;
  const TokenRows input(rows);
  at::DimVector shape(rows.sizes());
  shape[0] = routing.sent();
  at::Tensor returned = new_output(rows, shape);  // but those of this rank's experts
  auto* back = static_cast<char*>(returned.mutable_data_ptr());
  Exchange exchange{};
  exchange.kind = ExchangeKind::kAllToAll;
  exchange.call_name = name_of_rows(kCombineRows, rows, experts);
  std::vector<const char*> row_at(static_cast<size_t>(routing.sent()));
  for (int64_t peer = 0; peer < group.world_size(); ++peer) {
    const bool own = peer == group.rank();
    const int64_t begin = routing.begin(peer), given = routing.given(peer);
    for (int64_t i = 0; i < given; ++i)
      row_at[begin + i] = own ? input.data + routing.arriving(peer)[i] * input.pitch
                              : back + (begin + i) * input.bytes;
    exchange.input.push_back(own ? Extent{}
                                 : input.extent(routing.taken(peer), routing.arriving(peer)));
    exchange.output.push_back(own ? Extent{}
                                  : Extent{back + begin * input.bytes, given * input.bytes});
  }
  run(group, std::move(exchange));
  shape[0] = routing.pairs() / top_k;
  at::Tensor out = new_output(rows, shape);
  after_exchange(group, kCombineRows, [&] { add_rows_of(routing, row_at, factors, top_k, out); });
  return out;
}

void combine_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  at::Tensor out;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    out = combine_rows(*group, arguments.tensor(0), arguments.optional_tensor(1),
                       arguments.tensor(2), arguments.number(3), arguments.number(4));
  };
  if (!guarded(kCombineRows, arguments, 5, kSync, body)) return call_python(op, stack);
  arguments.end(std::move(out));
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  m.impl(kRoute, torch::CppFunction::makeFromBoxedFunction<&route_kernel>());
  m.impl(kDispatchRows, torch::CppFunction::makeFromBoxedFunction<&dispatch_kernel>());
  m.impl(kCombineRows, torch::CppFunction::makeFromBoxedFunction<&combine_kernel>());
}

}  // namespace symm_cp
