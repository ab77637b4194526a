// `all_gather_kv`: all-gathers keys and values along any dimension.
#include <torch/library.h>

#include "ops/kernels.h"

namespace symm_cp {

namespace {

using namespace kernels;
using torch::jit::Stack;

constexpr const char* kGatherKv = "all_gather_kv";

// Returns the gathered dimension, counted from the front.
int64_t check_kv(const at::Tensor& key, const at::Tensor& value, int64_t seq_dim) {
  TORCH_CHECK_VALUE(-key.dim() <= seq_dim && seq_dim < key.dim(), kGatherKv, ": seq_dim=", seq_dim,
                    " is out of range for a ", key.dim(), "-D tensor");
  const int64_t dim = seq_dim < 0 ? seq_dim + key.dim() : seq_dim;
  TORCH_CHECK_TYPE(value.scalar_type() == key.scalar_type() && value.device() == key.device(),
                   kGatherKv, ": value is ", name_dtype(value.scalar_type()), " on ",
                   value.device(), ", key ", name_dtype(key.scalar_type()), " on ", key.device());
  TORCH_CHECK_VALUE(value.dim() == key.dim() && value.size(dim) == key.size(dim), kGatherKv,
                    ": value ", value.sizes(), " and key ", key.sizes(),
                    " need the same number of dimensions and the same length of dimension ",
                    seq_dim);
  return dim;
}

at::DimVector with_length(const at::Tensor& tensor, int64_t dim, int64_t length) {
  at::DimVector sizes(tensor.sizes());
  sizes[dim] = length;
  return sizes;
}

// Ranks compare both tensors in each of the two exchanges.
std::string name_gather(const at::Tensor& key, const at::Tensor& value, int64_t dim,
                        const std::vector<int64_t>& sizes) {
  const std::string uneven = name_sizes(sizes);
  const auto whole = [&](const at::Tensor& tensor) {
    return uneven.empty() ? at::DimVector(tensor.sizes()) : with_length(tensor, dim, total(sizes));
  };
  std::ostringstream detail;
  detail << c10::getDtypeNames(value.scalar_type()).first << at::IntArrayRef(whole(value))
         << " seq_dim=" << dim << (uneven.empty() ? "" : " ") << uneven;
  return name_call(kGatherKv, key.scalar_type(), whole(key), detail.str());
}

// A shard is one run of bytes per index of the dimensions before the gathered one.
void prepare_gather_kv(CheckedCall& call, const at::Tensor& shard, int64_t dim,
                       const std::vector<int64_t>& sizes, int rank) {
  int64_t rows = 1, inner = static_cast<int64_t>(shard.element_size());
  for (int64_t d = 0; d < dim; ++d) rows *= shard.size(d);
  for (int64_t d = dim + 1; d < shard.dim(); ++d) inner *= shard.size(d);
  const int64_t pitch = total(sizes) * inner;
  call.exchange.kind = ExchangeKind::kAllGather;
  call.add_input(0, rows * sizes[rank] * inner);
  int64_t begin = 0;
  for (const int64_t size : sizes) {
    const int64_t row = size * inner;
    call.add_output(begin, rows * row, rows > 1 ? row : 0, pitch);
    begin += row;
  }
  const at::DimVector shape = with_length(shard, dim, total(sizes));
  call.output_shape.assign(shape.begin(), shape.end());
}

at::Tensor gather_one(Group& group, const at::Tensor& key, const at::Tensor& value, int64_t dim,
                      const Sizes& given, bool of_value) {
  CallKey call_key{reinterpret_cast<intptr_t>(kGatherKv),
                   group.world_size(),
                   group.rank(),
                   of_value,
                   given.has_value(),
                   dim,
                   key.dim()};
  add_tensor(call_key, key);
  add_tensor(call_key, value);
  if (given) call_key.append(given->begin(), given->end());
  const at::Tensor& shard = of_value ? value : key;
  const auto call = CheckedCalls::of_this_thread().take(call_key, [&](CheckedCall& call) {
    const auto sizes = check_gather(kGatherKv, "seq_dim", dim, key, given, group);
    prepare_gather_kv(call, shard, dim, sizes, group.rank());
    call.exchange.call_name = name_gather(key, value, dim, sizes);
  });
  const at::Tensor input = shard.contiguous();
  at::Tensor output = new_output(shard, call->output_shape);
  call->bind(input.const_data_ptr(), output.mutable_data_ptr());
  run(group, call->exchange);
  return output;
}

// Arguments: key, value, seq_dim, group name, sizes, rank.
void gather_kv(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  at::Tensor keys, values;
  count_attention_run();  // before the checks, so refused calls count, too
  const auto body = [&](const std::shared_ptr<Group>& group) {
    const at::Tensor &key = arguments.tensor(0), &value = arguments.tensor(1);
    const Sizes sizes = arguments.sizes(4, *group);
    const int64_t dim = check_kv(key, value, arguments.number(2));
    keys = gather_one(*group, key, value, dim, sizes, false);
    values = gather_one(*group, key, value, dim, sizes, true);
  };
  if (!guarded(kGatherKv, arguments, 3, kSync, body)) return call_python(op, stack);
  arguments.end(std::move(keys), std::move(values));
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  m.impl("all_gather_kv", torch::CppFunction::makeFromBoxedFunction<&gather_kv>());
}

}  // namespace symm_cp
