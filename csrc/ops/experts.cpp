// The kernels of symm_cp/ops/experts/op.py: send tokens to their experts, which are divided among
// the ranks, and the results back.
//
// First all ranks exchange the number of tokens that each has for each expert. From these numbers
// every rank computes which rows it sends, and the places of the rows that it receives. Rows then
// go through the slots, directly from their place in one rank's tensor to their place in another's.
// The experts' results are added up from the slots, without a copy.
#include <ATen/Functions.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/kernels.h"
#include "ops/routing.h"

namespace symm_cp::experts {

namespace {

using namespace kernels;
using torch::jit::Stack;

constexpr const char* kRoute = "_route_to_experts";

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

// Keeps the first `capacity` tokens of each expert, in rank order.
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

constexpr int64_t kAnyRows = -1;  // as in symm_cp/ops/experts/op.py

void check_dispatch(const at::Tensor& tokens, int64_t rows, int64_t top_k, const Routing& routing) {
  constexpr const char* op = kDispatchRows;
  TORCH_CHECK_VALUE(top_k > 0 && tokens.size(0) * top_k == routing.pairs(), op, ": tokens ",
                    tokens.sizes(), " with top_k=", top_k, " do not belong to a routing of ",
                    routing.pairs(), " pairs of a token and an expert");
  TORCH_CHECK_VALUE(rows == routing.rows() || rows == kAnyRows, op, ": rows=", rows, " must be ",
                    routing.rows(), ", the rows of this rank's experts");
}

at::Tensor dispatch_rows(Group& group, const at::Tensor& tokens, const at::Tensor& table,
                         int64_t rows, int64_t top_k, int64_t experts) {
  constexpr const char* op = kDispatchRows;
  check_has_dims(op, "tokens", tokens);
  const Routing routing(op, table, experts, group);
  check_dispatch(tokens, rows, top_k, routing);
  const TokenRows input(tokens);
  at::DimVector shape(tokens.sizes());
  shape[0] = routing.rows();
  at::Tensor out = new_output(tokens, shape);
  const TokenRows output(out);
  const auto numbers = routing.tokens(top_k);
  Exchange exchange{};
  exchange.kind = ExchangeKind::kAllToAll;
  exchange.call_name = name_of_rows(op, tokens, experts);
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

void check_combine(const at::Tensor& rows, const at::Tensor& weights, const Routing& routing,
                   int64_t top_k) {
  constexpr const char* op = kCombineRows;
  const auto dtype = rows.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
      op, ": rows is ", name_dtype(dtype),
      ", must be torch.float64, torch.float32, torch.bfloat16 or torch.float16");
  TORCH_CHECK_VALUE(top_k > 0 && routing.pairs() % top_k == 0, op, ": top_k=", top_k,
                    " must divide the ", routing.pairs(), " pairs of the routing");
  TORCH_CHECK_VALUE(rows.size(0) == routing.rows(), op, ": rows ", rows.sizes(), " must have ",
                    routing.rows(), ", as dispatch returned");
  if (!weights.defined()) return;
  TORCH_CHECK_TYPE(weights.is_floating_point(), op, ": weights is ",
                   name_dtype(weights.scalar_type()), ", must be a floating dtype");
  TORCH_CHECK_VALUE(weights.sizes() == at::IntArrayRef({routing.pairs() / top_k, top_k}), op,
                    ": weights ", weights.sizes(), " must be ",
                    at::IntArrayRef({routing.pairs() / top_k, top_k}),
                    ", one for each token and expert");
}

// For more rows than fit into slots: collects all results, then adds them up.
void combine_in_pieces(Group& group, const at::Tensor& rows, const Routing& routing,
                       const at::Tensor& factors, int64_t top_k, at::Tensor& out) {
  const TokenRows input(rows);
  at::DimVector shape(rows.sizes());
  shape[0] = routing.sent();
  at::Tensor returned = new_output(rows, shape);  // without the results of this rank's own experts
  auto* back = static_cast<char*>(returned.mutable_data_ptr());
  Exchange exchange{};
  exchange.kind = ExchangeKind::kAllToAll;
  exchange.call_name = name_of_rows(kCombineRows, rows, routing.experts());
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
  after_exchange(group, kCombineRows, [&] { add_up_rows(routing, row_at, factors, top_k, out); });
}

at::Tensor combine_rows(Group& group, const at::Tensor& rows, const at::Tensor& weights,
                        const at::Tensor& table, int64_t top_k, int64_t experts) {
  constexpr const char* op = kCombineRows;
  check_has_dims(op, "rows", rows);
  const Routing routing(op, table, experts, group);
  check_combine(rows, weights, routing, top_k);
  const at::Tensor factors = factors_for(weights, rows.scalar_type());
  at::DimVector shape(rows.sizes());
  shape[0] = routing.pairs() / top_k;
  at::Tensor out = new_output(rows, shape);
  Combination call(routing, rows, factors, top_k, out);
  if (routing.most_rows() * call.row_bytes() > kMostSlotBytes)
    combine_in_pieces(group, rows, routing, factors, top_k, out);
  else
    call.run(group, name_of_rows(op, rows, experts));
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

}  // namespace symm_cp::experts
