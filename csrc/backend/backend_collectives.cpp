// The exchanges of each collective. Arguments have the names of torch.distributed.
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <numeric>

#include "backend/backend.h"
#include "backend/backend_call.h"
#include "backend/backend_sparse.h"
#include "backend/backend_tensors.h"
#include "base/team.h"
#include "channel/group.h"
#include "exchange/copy.h"

namespace symm_cp {

namespace {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

bool same_sizes(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.sizes() == tensors.front().sizes();
  });
}

// Adds a list of one tensor for each rank to a name. Ranks with the same list agree on whether all
// shapes are equal.
CallName& describe(CallName& name, const Tensors& tensors) {
  if (same_sizes(tensors)) return name.describe(tensors.front());
  return name << " uneven " << tensors.front().scalar_type();
}

// Returns a list for each tensor, as each has its own exchange.
std::vector<Tensors> each_alone(const Tensors& tensors) {
  std::vector<Tensors> lists;
  lists.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) lists.push_back({tensor});
  return lists;
}

Exchange exchange_of(ExchangeKind kind, const CallName& name) {
  Exchange exchange{};
  exchange.kind = kind;
  exchange.call_name = name.str();
  return exchange;
}

// The tensors that torch's profiler shows for a call with a list for each device.
at::TensorList first_of(const std::vector<Tensors>& lists) {
  return lists.empty() ? at::TensorList() : at::TensorList(lists.front());
}

// The bytes of each rank's part along dimension 0: by `splits`, or equal if that is empty.
std::vector<int64_t> split_sizes(const char* op, const char* argument, const at::Tensor& tensor,
                                 const std::vector<int64_t>& splits, int world_size) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const int64_t row = rows == 0 ? 0 : static_cast<int64_t>(tensor.nbytes()) / rows;
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % world_size == 0, op, ": dimension 0 of ", argument, " (", rows,
                      ") is not divisible by world size ", world_size);
    return std::vector<int64_t>(static_cast<size_t>(world_size), rows / world_size * row);
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<size_t>(world_size), op, ": ", argument,
                    "_split_sizes has ", splits.size(), " items, it must have one for each of ",
                    world_size, " ranks");
  std::vector<int64_t> sizes;
  int64_t sum = 0;
  for (const int64_t split : splits) {
    TORCH_CHECK_VALUE(split >= 0, op, ": ", argument, "_split_sizes has a negative item, ", split);
    sizes.push_back(split * row);
    sum += split;
  }
  TORCH_CHECK_VALUE(sum == rows, op, ": ", argument, "_split_sizes sum to ", sum,
                    ", dimension 0 of ", argument, " has size ", rows);
  return sizes;
}

}  // namespace

void run_alone(const Exchange& exchange) {
  const Extent& input = exchange.input.front();
  const Extent& output = exchange.output.front();
  TORCH_CHECK_VALUE(output.bytes == 0 || input.bytes == output.bytes, exchange.call_name,
                    ": input has ", input.bytes, " bytes, output has ", output.bytes);
  const auto* from = static_cast<const char*>(input.data);
  auto* to = static_cast<char*>(output.data);
  if (output.bytes == 0 || to == from) return;
  if (from < to + output.bytes && to < from + output.bytes) {
    std::memmove(to, from, static_cast<size_t>(output.bytes));
    return;
  }
  const Team team(own_cores());
  copy_result(to, from, output.bytes);
}

std::string refusal_of(const std::exception& error, int rank) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  const std::string text = torchs != nullptr ? torchs->what_without_backtrace() : error.what();
  return text + " (on rank " + std::to_string(rank) + ")";
}

template <class Describe>
WorkPtr Backend::call(const Manner& manner, Describe describe) {
  sequence_number_.fetch_add(1, std::memory_order_relaxed);
  return translated([&]() -> WorkPtr {
    prepare(manner.op);
    Collective collective;
    collective.op = manner.op;
    try {
      describe(collective);
    } catch (c10::Error& error) {  // torch's errors do not name the op
      const std::string text = error.what_without_backtrace();
      if (text.find(manner.op) == std::string::npos)
        error.add_context(std::string("in ") + manner.op);
      refuse_call(manner, refusal_of(error, rank_));
      throw;
    } catch (const std::exception& error) {
      refuse_call(manner, refusal_of(error, rank_));
      throw;
    }
    return carry_out(manner, std::move(collective));
  });
}

void Backend::check_count(const char* op, const char* argument, size_t count) const {
  TORCH_CHECK_VALUE(count == static_cast<size_t>(size_), op, ": ", argument, " has ", count,
                    " tensors, it must have one for each of ", size_, " ranks");
}

void Backend::check_root(const char* op, int64_t root) const {
  TORCH_CHECK_VALUE(root >= 0 && root < size_, op, ": root rank ", root,
                    " is out of range for world size ", size_);
}

// --- one tensor for all --------------------------------------------------------------------------

WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  return call(manner("broadcast", OpType::BROADCAST, opts), [&](Collective& collective) {
    collective.begin_event(tensors);
    check_root("broadcast", opts.rootRank);
    const at::Tensor& tensor = single("broadcast", "tensor", tensors);
    CallName name("broadcast");
    name << " from rank " << opts.rootRank;
    Exchange exchange = exchange_of(ExchangeKind::kAllGather, name.describe(tensor));
    exchange.input.resize(1);
    exchange.output.resize(static_cast<size_t>(size_));
    if (rank_ == opts.rootRank)
      exchange.input[0] = bytes_read(collective, tensor);
    else
      exchange.output[opts.rootRank] = bytes_written(collective, tensor);
    collective.outputs = tensors;
    collective.exchanges.push_back(std::move(exchange));
  });
}

void Backend::add_all_reduce(Collective& collective, const char* op, CallName name,
                             const at::Tensor& tensor, const c10d::ReduceOp& reduce_op,
                             std::optional<int64_t> root, bool aside) const {
  const DType dtype = dtype_of(op, tensor, reduce_op);
  const bool takes = !root || *root == rank_;
  const bool copies = multiplies(reduce_op);
  const Extent all = takes ? bytes_written(collective, tensor, !copies, aside)
                           : bytes_read(collective, summand(op, tensor, reduce_op));
  const Extent read =
      takes && copies ? bytes_read(collective, summand(op, tensor, reduce_op)) : all;
  // With a root, the other ranks take nothing: there is nothing to gather.
  const bool in_parts = !root && two_shot(size_, all.bytes);
  Exchange exchange = exchange_of(
      in_parts ? ExchangeKind::kTwoShotAllReduce : ExchangeKind::kAllReduce, name.describe(tensor));
  exchange.dtype = dtype;
  exchange.reduce_op = reduce_op_of(reduce_op);
  if (in_parts) {
    exchange.input = aligned_parts_of(read, size_);
    exchange.output = aligned_parts_of(all, size_);
  } else {
    exchange.input.push_back(read);
    exchange.output.push_back(takes ? all : Extent{});
  }
  collective.exchanges.push_back(std::move(exchange));
}

WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && is_sparse(tensors.front())) return sparse_allreduce(tensors, opts);
  return call(manner("all_reduce", OpType::ALLREDUCE, opts), [&](Collective& collective) {
    collective.begin_event(tensors);
    const at::Tensor& tensor = single("all_reduce", "tensor", tensors);
    CallName name("all_reduce ");
    name << name_of(opts.reduceOp);
    add_all_reduce(collective, "all_reduce", name, tensor, opts.reduceOp, std::nullopt);
    collective.outputs = tensors;
  });
}

// A sparse all-reduce consists of gathers.
WorkPtr Backend::sparse_allreduce(const Tensors& tensors, const c10d::AllreduceOptions& opts) {
  constexpr const char* kOp = "all_reduce";
  return call(manner(kOp, OpType::_ALLREDUCE_SPARSE, opts, 2), [&](Collective& collective) {
    collective.begin_event(tensors);
    add_sparse_sum(collective, kOp, tensors.front(), opts.reduceOp, size_);
  });
}

WorkPtr Backend::allreduce_coalesced(Tensors& tensors,
                                     const c10d::AllreduceCoalescedOptions& opts) {
  const Manner each = manner("all_reduce", OpType::ALLREDUCE_COALESCED, opts, tensors.size());
  return call(each, [&](Collective& collective) {
    collective.begin_event(tensors);
    const char* operation = name_of(opts.reduceOp);
    for (const at::Tensor& tensor : tensors) check_dense("all_reduce", "tensors", tensor);
    const bool aside = must_write_aside({{}, each_alone(tensors)});
    int64_t number = 0;
    for (const at::Tensor& tensor : tensors) {
      CallName name("all_reduce ");
      name << operation << " " << ++number << " of " << static_cast<int64_t>(tensors.size());
      add_all_reduce(collective, "all_reduce", name, tensor, opts.reduceOp, std::nullopt, aside);
    }
    collective.outputs = tensors;
  });
}

WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return call(manner("reduce", OpType::REDUCE, opts), [&](Collective& collective) {
    collective.begin_event(tensors);
    check_root("reduce", opts.rootRank);
    const at::Tensor& tensor = single("reduce", "tensor", tensors);
    CallName name("reduce ");
    name << name_of(opts.reduceOp) << " to rank " << opts.rootRank;
    add_all_reduce(collective, "reduce", name, tensor, opts.reduceOp, opts.rootRank);
    collective.outputs = tensors;
  });
}

// --- gather --------------------------------------------------------------------------------------

void Backend::add_all_gather(Collective& collective, const char* op, const at::Tensor& output,
                             const at::Tensor& input, bool aside) const {
  check_dense(op, "output_tensor", output);
  check_dense(op, "input_tensor", input);
  check_same_dtype(op, output, input);
  TORCH_CHECK_VALUE(output.numel() == input.numel() * size_, op, ": output_tensor has ",
                    output.numel(), " elements, it must have ", size_, " times those of ",
                    "input_tensor, ", input.numel());
  Exchange exchange = exchange_of(ExchangeKind::kAllGather, CallName(op).describe(input));
  exchange.input.push_back(bytes_read(collective, input));
  exchange.output = equal_parts_of(bytes_written(collective, output, false, aside), size_);
  separate(collective, exchange, rank_);
  collective.outputs.push_back(output);
  collective.exchanges.push_back(std::move(exchange));
}

void Backend::add_all_gather(Collective& collective, const char* op, const Tensors& outputs,
                             const at::Tensor& input, bool aside) const {
  check_count(op, "tensor_list", outputs.size());
  check_dense(op, "tensor", input);
  for (const at::Tensor& output : outputs) {
    check_dense(op, "tensor_list", output);
    check_same_dtype(op, output, input);
  }
  TORCH_CHECK_VALUE(outputs[rank_].numel() == input.numel(), op, ": tensor has sizes ",
                    input.sizes(), ", tensor_list[", rank_, "] must have as many elements, not ",
                    outputs[rank_].sizes());
  CallName name(op);
  Exchange exchange = exchange_of(ExchangeKind::kAllGather, describe(name, outputs));
  exchange.input.push_back(bytes_read(collective, input));
  for (const at::Tensor& output : outputs)
    exchange.output.push_back(bytes_written(collective, output, false, aside));
  separate(collective, exchange, rank_);
  collective.outputs.insert(collective.outputs.end(), outputs.begin(), outputs.end());
  collective.exchanges.push_back(std::move(exchange));
}

WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                           const c10d::AllgatherOptions& opts) {
  return call(manner("all_gather", OpType::ALLGATHER, opts), [&](Collective& collective) {
    collective.begin_event(inputs);
    const at::Tensor& input = single("all_gather", "tensor", inputs);
    TORCH_CHECK_VALUE(outputs.size() == 1, "all_gather: there must be one tensor_list, not ",
                      outputs.size());
    add_all_gather(collective, "all_gather", outputs[0], input, must_write_aside({{}, outputs}));
  });
}

WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::AllgatherOptions& opts) {
  constexpr const char* kOp = "all_gather_into_tensor";
  return call(manner(kOp, OpType::_ALLGATHER_BASE, opts), [&](Collective& collective) {
    collective.begin_event(input);
    add_all_gather(collective, kOp, output, input);
  });
}

WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& output_lists, Tensors& inputs,
                                     const c10d::AllgatherOptions& opts) {
  constexpr const char* kOp = "all_gather_coalesced";
  const Manner each = manner(kOp, OpType::ALLGATHER_COALESCED, opts, inputs.size());
  return call(each, [&](Collective& collective) {
    collective.begin_event(inputs);
    check_count(kOp, "output_tensor_lists", output_lists.size());
    for (const Tensors& list : output_lists)
      TORCH_CHECK_VALUE(list.size() == inputs.size(), kOp, ": a list of output_tensor_lists has ",
                        list.size(), " tensors, it must have as many as input_tensor_list, ",
                        inputs.size());
    std::vector<Tensors> by_input(inputs.size());
    for (const Tensors& list : output_lists)
      for (size_t i = 0; i < inputs.size(); ++i) by_input[i].push_back(list[i]);
    const bool aside = must_write_aside({each_alone(inputs), by_input});
    for (size_t i = 0; i < inputs.size(); ++i)
      add_all_gather(collective, kOp, by_input[i], inputs[i], aside);
  });
}

WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& opts) {
  constexpr const char* kOp = "all_gather_into_tensor";
  const Manner each = manner(kOp, OpType::ALLGATHER_COALESCED, opts, inputs.size());
  return call(each, [&](Collective& collective) {
    collective.begin_event(inputs);
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), kOp, ": got ", outputs.size(),
                      " outputs and ", inputs.size(), " inputs; counts must match");
    const bool aside = must_write_aside({each_alone(inputs), each_alone(outputs)});
    for (size_t i = 0; i < inputs.size(); ++i)
      add_all_gather(collective, kOp, outputs[i], inputs[i], aside);
  });
}

WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::GatherOptions& opts) {
  return call(manner("gather", OpType::GATHER, opts), [&](Collective& collective) {
    collective.begin_event(inputs);
    check_root("gather", opts.rootRank);
    const at::Tensor& input = single("gather", "tensor", inputs);
    CallName name("gather");
    name << " to rank " << opts.rootRank;
    Exchange exchange = exchange_of(ExchangeKind::kAllGather, name.describe(input));
    exchange.input.push_back(bytes_read(collective, input));
    exchange.output.resize(static_cast<size_t>(size_));
    if (rank_ == opts.rootRank) {
      TORCH_CHECK_VALUE(outputs.size() == 1, "gather: there must be one gather_list on rank ",
                        rank_, ", not ", outputs.size());
      check_count("gather", "gather_list", outputs[0].size());
      const bool aside = must_write_aside({{}, outputs});
      for (int peer = 0; peer < size_; ++peer) {
        const at::Tensor& output = outputs[0][peer];
        check_dense("gather", "gather_list", output);
        check_same_dtype("gather", output, input);
        TORCH_CHECK_VALUE(output.numel() == input.numel(), "gather: tensor has sizes ",
                          input.sizes(), ", all of gather_list must have as many elements, not ",
                          output.sizes());
        exchange.output[peer] = bytes_written(collective, output, false, aside);
      }
      collective.outputs = outputs[0];
    } else {
      TORCH_CHECK_VALUE(outputs.empty(), "gather: gather_list must be given on rank ",
                        opts.rootRank, " only");
    }
    separate(collective, exchange, rank_);
    collective.exchanges.push_back(std::move(exchange));
  });
}

// --- scatter -------------------------------------------------------------------------------------

WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ScatterOptions& opts) {
  return call(manner("scatter", OpType::SCATTER, opts), [&](Collective& collective) {
    collective.begin_event(first_of(inputs));
    check_root("scatter", opts.rootRank);
    const at::Tensor& output = single("scatter", "tensor", outputs);
    CallName name("scatter");
    name << " from rank " << opts.rootRank;
    Exchange exchange = exchange_of(ExchangeKind::kAllToAll, name.describe(output));
    exchange.input.resize(static_cast<size_t>(size_));
    exchange.output.resize(static_cast<size_t>(size_));
    exchange.output[opts.rootRank] = bytes_written(collective, output);
    if (rank_ == opts.rootRank) {
      TORCH_CHECK_VALUE(inputs.size() == 1, "scatter: there must be one scatter_list on rank ",
                        rank_, ", not ", inputs.size());
      check_count("scatter", "scatter_list", inputs[0].size());
      for (int peer = 0; peer < size_; ++peer) {
        const at::Tensor& input = inputs[0][peer];
        check_dense("scatter", "scatter_list", input);
        check_same_dtype("scatter", output, input);
        TORCH_CHECK_VALUE(output.numel() == input.numel(), "scatter: tensor has sizes ",
                          output.sizes(), ", all of scatter_list must have as many elements, not ",
                          input.sizes());
        exchange.input[peer] = bytes_read(collective, input);
      }
    } else {
      TORCH_CHECK_VALUE(inputs.empty(), "scatter: scatter_list must be given on rank ",
                        opts.rootRank, " only");
    }
    separate(collective, exchange, rank_);
    collective.outputs = outputs;
    collective.exchanges.push_back(std::move(exchange));
  });
}

void Backend::add_reduce_scatter(Collective& collective, const char* op, const at::Tensor& output,
                                 const at::Tensor& input, const c10d::ReduceOp& reduce_op,
                                 bool aside) const {
  check_dense(op, "output", output);
  check_dense(op, "input", input);
  check_same_dtype(op, output, input);
  TORCH_CHECK_VALUE(input.numel() == output.numel() * size_, op, ": input has ", input.numel(),
                    " elements, it must have ", size_, " times those of output, ", output.numel());
  CallName name(op);
  name << " " << name_of(reduce_op);
  Exchange exchange = exchange_of(ExchangeKind::kReduceScatter, name.describe(output));
  exchange.dtype = dtype_of(op, input, reduce_op);
  exchange.reduce_op = reduce_op_of(reduce_op);
  const at::Tensor read = summand(op, input, reduce_op);
  exchange.input = equal_parts_of(bytes_read(collective, read), size_);
  exchange.output.push_back(bytes_written(collective, output, false, aside));
  separate(collective, exchange, rank_);
  collective.outputs.push_back(output);
  collective.exchanges.push_back(std::move(exchange));
}

WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                const c10d::ReduceScatterOptions& opts) {
  constexpr const char* kOp = "reduce_scatter";
  return call(manner(kOp, OpType::REDUCE_SCATTER, opts), [&](Collective& collective) {
    collective.begin_event(first_of(inputs));
    const at::Tensor& output = single(kOp, "output", outputs);
    TORCH_CHECK_VALUE(inputs.size() == 1, kOp, ": there must be one input_list, not ",
                      inputs.size());
    check_count(kOp, "input_list", inputs[0].size());
    for (const at::Tensor& input : inputs[0]) {
      check_dense(kOp, "input_list", input);
      check_same_dtype(kOp, output, input);
    }
    TORCH_CHECK_VALUE(inputs[0][rank_].numel() == output.numel(), kOp, ": output has sizes ",
                      output.sizes(), ", input_list[", rank_, "] must have as many elements, not ",
                      inputs[0][rank_].sizes());
    CallName name(kOp);
    name << " " << name_of(opts.reduceOp);
    Exchange exchange = exchange_of(ExchangeKind::kReduceScatter, describe(name, inputs[0]));
    exchange.dtype = dtype_of(kOp, output, opts.reduceOp);
    exchange.reduce_op = reduce_op_of(opts.reduceOp);
    for (const at::Tensor& input : inputs[0])
      exchange.input.push_back(bytes_read(collective, summand(kOp, input, opts.reduceOp)));
    exchange.output.push_back(bytes_written(collective, output));
    separate(collective, exchange, rank_);
    collective.outputs = outputs;
    collective.exchanges.push_back(std::move(exchange));
  });
}

WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::ReduceScatterOptions& opts) {
  constexpr const char* kOp = "reduce_scatter_tensor";
  return call(manner(kOp, OpType::_REDUCE_SCATTER_BASE, opts), [&](Collective& collective) {
    collective.begin_event(input);
    add_reduce_scatter(collective, kOp, output, input, opts.reduceOp);
  });
}

WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::ReduceScatterOptions& opts) {
  constexpr const char* kOp = "reduce_scatter_tensor";
  const Manner each = manner(kOp, kCoalescedScatter, opts, inputs.size());
  return call(each, [&](Collective& collective) {
    collective.begin_event(inputs);
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), kOp, ": got ", outputs.size(),
                      " outputs and ", inputs.size(), " inputs; counts must match");
    const bool aside = must_write_aside({each_alone(inputs), each_alone(outputs)});
    for (size_t i = 0; i < inputs.size(); ++i)
      add_reduce_scatter(collective, kOp, outputs[i], inputs[i], opts.reduceOp, aside);
  });
}

// --- all to all ----------------------------------------------------------------------------------

// The exchange itself compares the sizes, which only the two ranks of a pair know.
WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                               std::vector<int64_t>& output_splits,
                               std::vector<int64_t>& input_splits,
                               const c10d::AllToAllOptions& opts) {
  constexpr const char* kOp = "all_to_all_single";
  return call(manner(kOp, OpType::ALLTOALL_BASE, opts), [&](Collective& collective) {
    collective.begin_event(input);
    check_dense(kOp, "output", output);
    check_dense(kOp, "input", input);
    check_same_dtype(kOp, output, input);
    Exchange exchange =
        exchange_of(ExchangeKind::kAllToAll, CallName(kOp) << " " << input.scalar_type());
    const auto given = split_sizes(kOp, "input", input, input_splits, size_);
    const auto taken = split_sizes(kOp, "output", output, output_splits, size_);
    TORCH_CHECK_VALUE(given[rank_] == taken[rank_], kOp, ": this rank gives itself ", given[rank_],
                      " bytes of input and takes ", taken[rank_], " of output");
    exchange.input = parts_of(bytes_read(collective, input), given);
    exchange.output = parts_of(bytes_written(collective, output), taken);
    separate(collective, exchange, rank_);
    collective.outputs.push_back(output);
    collective.exchanges.push_back(std::move(exchange));
  });
}

WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  constexpr const char* kOp = "all_to_all";
  return call(manner(kOp, OpType::ALLTOALL, opts), [&](Collective& collective) {
    collective.begin_event(inputs);
    check_count(kOp, "output_tensor_list", outputs.size());
    check_count(kOp, "input_tensor_list", inputs.size());
    for (int peer = 0; peer < size_; ++peer) {
      check_dense(kOp, "output_tensor_list", outputs[peer]);
      check_dense(kOp, "input_tensor_list", inputs[peer]);
      check_same_dtype(kOp, outputs[peer], inputs[0]);
      check_same_dtype(kOp, inputs[peer], inputs[0]);
    }
    TORCH_CHECK_VALUE(outputs[rank_].numel() == inputs[rank_].numel(), kOp, ": output_tensor_list[",
                      rank_, "] has sizes ", outputs[rank_].sizes(), ", input_tensor_list[", rank_,
                      "] ", inputs[rank_].sizes());
    Exchange exchange =
        exchange_of(ExchangeKind::kAllToAll, CallName(kOp) << " " << inputs[0].scalar_type());
    for (const at::Tensor& input : inputs) exchange.input.push_back(bytes_read(collective, input));
    const bool aside = must_write_aside({{}, {outputs}});
    for (const at::Tensor& output : outputs)
      exchange.output.push_back(bytes_written(collective, output, false, aside));
    separate(collective, exchange, rank_);
    collective.outputs = outputs;
    collective.exchanges.push_back(std::move(exchange));
  });
}

// --- barriers ------------------------------------------------------------------------------------

WorkPtr Backend::barrier(const c10d::BarrierOptions& opts) {
  return meet(manner("barrier", OpType::BARRIER, opts));
}

WorkPtr Backend::meet(const Manner& manner) {
  return call(manner, [&](Collective& collective) {
    collective.begin_event({});
    Exchange exchange = exchange_of(ExchangeKind::kAllGather, CallName(manner.op));
    exchange.input.resize(1);
    exchange.output.resize(static_cast<size_t>(size_));
    collective.exchanges.push_back(std::move(exchange));
  });
}

// Errors have gloo's wording, which programs and users search for. They name the first late rank,
// or with `wait_all_ranks` every late rank.
void Backend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  constexpr const char* kOp = "monitored_barrier";
  const std::string self = "Rank " + std::to_string(rank_);
  const Manner manner{kOp, OpType::BARRIER, false, of_call(opts.timeout)};
  const std::string limit = std::to_string(opts.timeout.count()) + " ms";
  if (opts.timeout.count() == 0 && size_ > 1) {  // elsewhere 0 means the group's time-out
    const std::string text = self + " timed out in monitoredBarrier after " + limit;
    translated([&] { refuse_call(manner, text); });
    C10_THROW_ERROR(DistBackendError, text);
  }
  try {
    meet(manner);
  } catch (const c10::DistBackendError& error) {
    const int64_t own = group(kOp).made(kAsync);
    std::vector<int> late;
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank_ && peers_->board(peer).entered(kAsync) < own) late.push_back(peer);
    if (late.empty()) throw;
    std::string named = "Rank " + std::to_string(late.front());
    if (wait_all_ranks && late.size() > 1) named.replace(0, 4, "Ranks");
    for (size_t i = 1; wait_all_ranks && i < late.size(); ++i)
      named += ", " + std::to_string(late[i]);
    std::string text = named + " failed to pass monitoredBarrier in " + limit;
    if (rank_ != 0)
      text = self + " successfully reached monitoredBarrier, but received errors while waiting " +
             "for send/recv from rank 0: " + text;
    C10_THROW_ERROR(DistBackendError, text + ": " + error.what_without_backtrace());
  }
}

}  // namespace symm_cp
