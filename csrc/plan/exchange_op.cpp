#include "plan/exchange_op.h"

#include <torch/library.h>

#include <cstring>
#include <utility>

#include "channel/group.h"
#include "channel/groups.h"
#include "exchange/boxes.h"
#include "ops/kernels.h"

namespace symm_cp::plans {

namespace {

constexpr const char* kExchange = "symm_cp::exchange";
constexpr const char* kExchangeBoxes = "symm_cp::exchange_boxes";

std::vector<Box> boxes_in(const at::Tensor& bytes) {
  std::vector<Box> boxes(bytes.nbytes() / sizeof(Box));
  if (!boxes.empty()) std::memcpy(boxes.data(), bytes.const_data_ptr(), bytes.nbytes());
  return boxes;
}

// Arguments: given, taken, kind, parts of both, reduce op, call name, group name. The parts are the
// offset and the bytes of each input, and these, the row and the pitch of each output; none for an
// all-reduce. Two given tensors, of equal sizes, are the two halves of the only input.
void prepare_parts(const Stack& arguments, PreparedExchange& prepared) {
  const at::Tensor given = arguments[0].toTensorVector().at(0);
  Exchange& exchange = prepared.exchange;
  exchange.kind = static_cast<ExchangeKind>(arguments[2].toInt());
  exchange.call_name = arguments[6].toStringRef();
  const std::string& reduce_op = arguments[5].toStringRef();
  if (!reduce_op.empty())
    kernels::set_reduction(exchange, given.scalar_type(),
                           reduce_op == "avg" ? ReduceOp::kAvg : ReduceOp::kSum);
  const auto inputs = arguments[3].toIntVector(), outputs = arguments[4].toIntVector();
  for (size_t at = 0; at + 1 < inputs.size(); at += 2) {
    prepared.given_at.push_back(inputs[at]);
    exchange.input.push_back({nullptr, inputs[at + 1]});
  }
  for (size_t at = 0; at + 3 < outputs.size(); at += 4) {
    prepared.taken_at.push_back(outputs[at]);
    exchange.output.push_back({nullptr, outputs[at + 1], outputs[at + 2], outputs[at + 3]});
  }
}

// Arguments: given and taken tensors, boxes of both, whether they join, call name, group name.
void prepare_boxes(const Stack& arguments, int ranks, PreparedExchange& prepared) {
  auto boxes = std::make_shared<const Boxes>(boxes_in(arguments[2].toTensor()),
                                             boxes_in(arguments[3].toTensor()), ranks);
  prepared.exchange =
      exchange_of(arguments[5].toStringRef(), std::move(boxes), arguments[4].toBool());
}

Addresses addresses_of(const c10::IValue& value) {
  if (value.isTensor()) return {const_cast<void*>(value.toTensor().const_data_ptr())};
  Addresses addresses;
  for (const at::Tensor& tensor : value.toTensorVector())
    addresses.push_back(const_cast<void*>(tensor.const_data_ptr()));
  return addresses;
}

void run_exchange(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const Stack arguments = torch::jit::last(*stack, count).vec();
  kernels::reporting_exchange([&] {
    const auto group = group_named(arguments.back().toStringRef());
    prepare(op, arguments)->run(*group, addresses_of(arguments[0]), addresses_of(arguments[1]));
  });
  torch::jit::drop(*stack, count);
}

}  // namespace

void PreparedExchange::run(Group& group, const Addresses& given, const Addresses& taken,
                           const std::string* name) {
  if (busy_.exchange(true, std::memory_order_acquire)) {
    PreparedExchange own;
    own.exchange = exchange;
    own.given_at = given_at, own.taken_at = taken_at;
    return own.run(group, given, taken, name);
  }
  struct Free {
    std::atomic<bool>& busy;
    ~Free() { busy.store(false, std::memory_order_release); }
  } const free{busy_};
  if (name != nullptr) exchange.call_name = *name;
  if (exchange.boxes != nullptr) {
    exchange.operands.clear();
    for (void* const address : given) exchange.operands.push_back(static_cast<char*>(address));
    for (void* const address : taken) exchange.operands.push_back(static_cast<char*>(address));
  }
  for (size_t i = 0; i < given_at.size(); ++i)
    exchange.input[i].data = static_cast<char*>(given[0]) + given_at[i];
  if (given.size() == 2 && !exchange.input.empty()) {
    Extent& input = exchange.input[0];
    input.row = input.bytes / 2;
    input.pitch = static_cast<char*>(given[1]) - static_cast<char*>(given[0]);
  }
  for (size_t i = 0; i < taken_at.size(); ++i)
    exchange.output[i].data = static_cast<char*>(taken[0]) + taken_at[i];
  symm_cp::run(group, exchange);
}

bool is_exchange(const c10::OperatorHandle& op) {
  return op.schema().name() == kExchange || op.schema().name() == kExchangeBoxes;
}

std::shared_ptr<PreparedExchange> prepare(const c10::OperatorHandle& op, const Stack& arguments) {
  auto prepared = std::make_shared<PreparedExchange>();
  const auto group = group_named(arguments.back().toStringRef());
  if (op.schema().name() == kExchangeBoxes) {
    prepare_boxes(arguments, group->world_size(), *prepared);
    return prepared;
  }
  prepare_parts(arguments, *prepared);
  if (prepared->exchange.kind == ExchangeKind::kAllReduce && prepared->given_at.empty()) {
    kernels::CheckedCall call;
    call.set_all_reduce(static_cast<int64_t>(arguments[0].toTensorVector().at(0).nbytes()),
                        group->world_size());
    call.exchange.call_name = std::move(prepared->exchange.call_name);
    call.exchange.dtype = prepared->exchange.dtype;
    call.exchange.reduce_op = prepared->exchange.reduce_op;
    prepared->exchange = std::move(call.exchange);
    prepared->given_at = std::move(call.input_offsets);
    prepared->taken_at = std::move(call.output_offsets);
  }
  return prepared;
}

TORCH_LIBRARY_FRAGMENT(symm_cp, m) {
  m.def(
      "exchange(Tensor[] given, Tensor(a!) taken, int kind, int[] given_parts, int[] taken_parts, "
      "str reduce_op, str call_name, str group_name) -> ()");
  m.def(
      "exchange_boxes(Tensor[] given, Tensor(a!)[] taken, Tensor given_boxes, Tensor taken_boxes, "
      "bool joins, str call_name, str group_name) -> ()");
}

TORCH_LIBRARY_IMPL(symm_cp, CPU, m) {
  m.impl("exchange", torch::CppFunction::makeFromBoxedFunction<&run_exchange>());
  m.impl("exchange_boxes", torch::CppFunction::makeFromBoxedFunction<&run_exchange>());
}

}  // namespace symm_cp::plans
