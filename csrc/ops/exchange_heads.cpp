// Runs `exchange_heads`; symm_cp/ops/heads/exchange_heads.py plans each kind of call once. In
// Python the calls took longer than the copies of a small exchange.
#include <torch/library.h>

#include <cstring>

#include "base/error.h"
#include "exchange/boxes.h"
#include "ops/kernels.h"

namespace symm_cp {

namespace {

using namespace kernels;
using torch::jit::Stack;

constexpr const char* kExchangeHeads = "exchange_heads";

// The arguments of the op.
enum : size_t { kTensors, kToHeads, kGroupName, kHeadRanges, kChunkOrder, kChunkLengths, kRank };

// Makes the features of a head contiguous in (B, H, S, E): copies tensors with other strides.
std::vector<at::Tensor> with_dense_features(std::vector<at::Tensor> tensors) {
  for (at::Tensor& tensor : tensors)
    if (tensor.dim() == 4 && tensor.stride(3) != 1 && tensor.size(3) != 1)
      tensor = new_output(tensor, tensor.sizes()).copy_(tensor);
  return tensors;
}

CallKey key_of(const Arguments& arguments, const std::vector<at::Tensor>& tensors,
               const Group& group) {
  CallKey key{reinterpret_cast<intptr_t>(kExchangeHeads), group.world_size(), group.rank(),
              arguments.flag(kToHeads), static_cast<int64_t>(tensors.size())};
  for (const at::Tensor& tensor : tensors) {
    key.push_back(tensor.dim());
    key.push_back(static_cast<int64_t>(tensor.device().type()));
    add_tensor(key, tensor);
    key.append(tensor.strides().begin(), tensor.strides().end());
  }
  for (const size_t index : {kHeadRanges, kChunkOrder, kChunkLengths}) {
    const auto numbers = arguments.numbers(index);
    key.push_back(numbers ? static_cast<int64_t>(numbers->size()) : -1);
    if (numbers) key.append(numbers->begin(), numbers->end());
  }
  key.push_back(arguments.optional_number(kRank).value_or(-1));
  return key;
}

std::vector<Box> boxes_in(const at::Tensor& bytes) {
  std::vector<Box> boxes(bytes.nbytes() / sizeof(Box));
  if (!boxes.empty()) std::memcpy(boxes.data(), bytes.const_data_ptr(), bytes.nbytes());
  return boxes;
}

// Makes no boxes if heads must be added up: Python handles such calls.
void plan(CheckedCall& call, Stack arguments, int ranks) {
  const bool to_heads = arguments[kToHeads].toBool();
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("symm_cp::exchange_heads", "plan");
  try {
    op.callBoxed(arguments);
  } catch (const std::exception&) {  // an error in Python, already reported to the peers
    throw Failed(std::current_exception());
  }
  const auto results = torch::jit::last(arguments, 4);
  call.output_shape = results[2].toIntVector();
  if (call.output_shape.empty()) return;
  auto boxes = std::make_shared<const Boxes>(boxes_in(results[0].toTensor()),
                                             boxes_in(results[1].toTensor()), ranks);
  call.exchange = exchange_of(results[3].toStringRef(), std::move(boxes), !to_heads);
}

// Returns memory for the outputs, with the heads of a position contiguous unless `to_heads`.
std::vector<at::Tensor> new_outputs(const at::Tensor& like, const std::vector<int64_t>& shapes,
                                    bool to_heads) {
  std::vector<at::Tensor> outputs;
  for (size_t at = 0; at < shapes.size(); at += 4) {
    const auto [batch, heads, rows, features] =
        std::array{shapes[at], shapes[at + 1], shapes[at + 2], shapes[at + 3]};
    outputs.push_back(to_heads ? new_output(like, {batch, heads, rows, features})
                               : new_output(like, {batch, rows, heads, features}).transpose(1, 2));
  }
  return outputs;
}

// Returns no tensors if the kernel in Python is needed.
std::vector<at::Tensor> exchange_heads(Group& group, const Arguments& arguments) {
  const auto tensors = with_dense_features(arguments.tensors(kTensors));
  const bool to_heads = arguments.flag(kToHeads);
  const auto call = CheckedCalls::of_this_thread().take(
      key_of(arguments, tensors, group), [&](CheckedCall& call) {
        Stack given = arguments.all();
        given[kTensors] = c10::List<at::Tensor>(tensors);
        plan(call, std::move(given), group.world_size());
      });
  if (call->exchange.boxes == nullptr) return {};
  auto outputs = new_outputs(tensors[0], call->output_shape, to_heads);
  auto& operands = call->exchange.operands;
  operands.clear();
  for (const at::Tensor& tensor : tensors)
    operands.push_back(static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())));
  for (const at::Tensor& output : outputs)
    operands.push_back(static_cast<char*>(output.mutable_data_ptr()));
  run(group, call->exchange);
  return outputs;
}

void exchange_heads_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  std::vector<at::Tensor> outputs;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    outputs = exchange_heads(*group, arguments);
  };
  const bool served = guarded(kExchangeHeads, arguments, kGroupName, kSync, body);
  if (!served || outputs.empty()) return call_python(op, stack);
  arguments.end(std::move(outputs));
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  m.impl(kExchangeHeads, torch::CppFunction::makeFromBoxedFunction<&exchange_heads_kernel>());
}

}  // namespace symm_cp
