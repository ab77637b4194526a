#include "ops/kernels.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/python.h"
#include "channel/groups.h"
#include "memory/mapping.h"

namespace symm_cp {

namespace kernels {

namespace {

constexpr size_t kMaxCalls = 512;

// The most characters for sizes in a call's name; a checksum replaces a longer text.
constexpr size_t kLongSizes = 48;

// False while tests run the kernels in Python on CPU tensors.
std::atomic<bool> serving{true};

// How often this thread has attended to the keys of all ranks, or gathered them.
thread_local int64_t attention_runs = 0;

bool summable(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kComplexHalf:
    case at::kComplexFloat:
    case at::kComplexDouble: return true;
    default: return false;
  }
}

at::ScalarType real(at::ScalarType dtype) {
  return c10::isComplexType(dtype) ? c10::toRealValueType(dtype) : dtype;
}

// Returns the name of the exception that Python raises for an error.
const char* name_error(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return "MemoryError";
  if (dynamic_cast<const c10::ValueError*>(&error) != nullptr) return "ValueError";
  if (dynamic_cast<const c10::TypeError*>(&error) != nullptr) return "TypeError";
  if (dynamic_cast<const c10::IndexError*>(&error) != nullptr) return "IndexError";
  if (dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr)
    return "NotImplementedError";
  return "RuntimeError";
}

const char* text_of(const std::exception& error) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  return torchs != nullptr ? torchs->what_without_backtrace() : error.what();
}

// The last error of this thread that was reported to the peers.
thread_local std::string last_reported;
// Whether Ctrl-C interrupted the last native kernel of this thread, and this was reported to the
// peers.
thread_local bool reported_interruption = false;

void note_reported(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const std::exception& error) {
    last_reported = text_of(error);
    if (last_reported.empty()) last_reported = error.what();
  }
}

void report_to_peers(Group& group, int channel, const std::exception& error) {
  if (group.world_size() == 1) return;
  last_reported = text_of(error);
  refuse(group, channel,
         std::string(name_error(error)) + " on rank " + std::to_string(group.rank()) + ": " +
             text_of(error));
}

std::string joined(const std::vector<int64_t>& sizes, const char* between) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : between) + std::to_string(size);
  return text;
}

void check_sizes(const char* op, const std::vector<int64_t>& sizes, int ranks) {
  TORCH_CHECK_VALUE(sizes.size() == static_cast<size_t>(ranks), op, ": sizes=[",
                    joined(sizes, ", "), "] has ", sizes.size(),
                    " entries, must have one for each of the ", ranks, " ranks");
  for (const int64_t size : sizes)
    TORCH_CHECK_VALUE(size >= 0, op, ": sizes=[", joined(sizes, ", "), "] must not be negative");
}

std::shared_ptr<Group> look_up(const char* op, const std::string& name) {
  try {
    return group_named(name);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  } catch (const std::runtime_error& error) {
    TORCH_CHECK(false, op, ": ", error.what());
  }
}

}  // namespace

void CheckedCall::add_input(int64_t offset, int64_t bytes) {
  exchange.input.push_back({nullptr, bytes});
  input_offsets.push_back(offset);
}

void CheckedCall::add_output(int64_t offset, int64_t bytes, int64_t row, int64_t pitch) {
  exchange.output.push_back({nullptr, bytes, row, pitch});
  output_offsets.push_back(offset);
}

void CheckedCall::set_all_reduce(int64_t bytes, int ranks, bool in_parts) {
  if (!in_parts && !two_shot(ranks, bytes)) {
    exchange.kind = ExchangeKind::kAllReduce;
    add_input(0, bytes);
    add_output(0, bytes);
    return;
  }
  exchange.kind = ExchangeKind::kTwoShotAllReduce;
  const int64_t part = whole_parts((bytes + ranks - 1) / ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    const int64_t begin = std::min(rank * part, bytes), end = std::min(begin + part, bytes);
    add_input(begin, end - begin);
    add_output(begin, end - begin);
  }
}

void CheckedCall::bind(const void* input, void* output) {
  for (size_t i = 0; i < input_offsets.size(); ++i)
    exchange.input[i].data = static_cast<char*>(const_cast<void*>(input)) + input_offsets[i];
  for (size_t i = 0; i < output_offsets.size(); ++i)
    exchange.output[i].data = static_cast<char*>(output) + output_offsets[i];
}

CheckedCalls& CheckedCalls::of_this_thread() {
  thread_local CheckedCalls calls;
  return calls;
}

size_t CheckedCalls::Hash::operator()(const CallKey& key) const {
  uint64_t hash = key.size();
  for (const int64_t number : key)
    hash = (hash ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15 >> 7;
  return hash;
}

void CheckedCalls::keep(const CallKey& key, const std::shared_ptr<CheckedCall>& call) {
  if (calls_.size() >= kMaxCalls) calls_.clear();
  calls_[key] = call;
}

void check_memory(const char* op, const std::string& name, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.defined(), op, ": ", name, " is None, must be a tensor");
  if (tensor.numel() == 0) return;
  TORCH_CHECK_VALUE(tensor.has_storage(), op, ": ", name,
                    " has no storage: it may have left torch.func.vmap, or wrap another tensor");
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const int64_t needed = (last + 1) * static_cast<int64_t>(tensor.element_size());
  const auto size = static_cast<int64_t>(tensor.storage().nbytes());
  TORCH_CHECK_VALUE(size >= needed, op, ": ", name, " of shape ", tensor.sizes(), " needs ", needed,
                    " bytes of storage, which has ", size, ": it was freed or resized");
  TORCH_CHECK_VALUE(tensor.storage().data() != nullptr, op, ": ", name,
                    " has no memory: it may wrap another tensor");
}

void Arguments::check_memory(const char* op) const {
  for (size_t i = 0; i < count_; ++i) {
    const c10::IValue& value = at(i);
    if (value.isTensor()) {
      kernels::check_memory(op, schema_.arguments()[i].name(), value.toTensor());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      size_t index = 0;
      for (const c10::IValue& each : value.toListRef()) {
        const std::string name =
            schema_.arguments()[i].name() + "[" + std::to_string(index++) + "]";
        if (!each.isNone()) kernels::check_memory(op, name, each.toTensor());
      }
    }
  }
}

std::optional<std::vector<int64_t>> Arguments::numbers(size_t index) const {
  const c10::IValue& value = at(index);
  if (value.isNone()) return {};
  if (value.isIntList()) return value.toIntVector();
  std::vector<int64_t> numbers;
  for (const c10::SymInt& number : value.toSymIntVector())
    numbers.push_back(number.guard_int(__FILE__, __LINE__));
  return numbers;
}

Sizes Arguments::sizes(size_t index, const Group& group) const {
  if (count_ <= index || at(index).isNone() || at(index + 1).isNone()) return {};
  const int64_t rank = number(index + 1);
  TORCH_CHECK_VALUE(rank == group.rank(), "rank=", rank,
                    " must be this rank's number in its group, ", group.rank());
  return numbers(index);
}

void add_tensor(CallKey& key, const at::Tensor& tensor) {
  key.push_back(static_cast<int64_t>(tensor.scalar_type()));
  key.append(tensor.sizes().begin(), tensor.sizes().end());
}

std::string name_dtype(at::ScalarType dtype) {
  return "torch." + std::string(c10::getDtypeNames(dtype).first);
}

std::string name_call(const char* op, at::ScalarType dtype, at::IntArrayRef sizes,
                      const std::string& detail) {
  std::ostringstream name;
  name << op << ' ' << c10::getDtypeNames(dtype).first << sizes;
  if (!detail.empty()) name << ' ' << detail;
  return name.str().substr(0, kMaxCallName);
}

void check_dense(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), op, ": ", name, " must be contiguous, has shape ",
                    tensor.sizes(), " and strides ", tensor.strides());
}

void check_out(const char* op, const char* name, const at::Tensor& out, at::IntArrayRef sizes,
               at::ScalarType dtype) {
  TORCH_CHECK_VALUE(out.sizes() == sizes && out.scalar_type() == dtype, op, ": ", name, " is ",
                    name_dtype(out.scalar_type()), " ", out.sizes(), ", needs ", name_dtype(dtype),
                    " ", sizes);
  check_dense(op, name, out);
}

void check_has_dims(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.dim() > 0, op, ": ", name, " must have at least 1 dimension, has none");
}

void check_rank(const char* op, const char* name, int64_t rank, int ranks) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < ranks, op, ": ", name, "=", rank,
                    " is not a rank of a group of ", ranks);
}

void check_sum(const char* op, const char* name, const std::string& reduce_op) {
  TORCH_CHECK_VALUE(reduce_op == "sum", op, ": ", name, "='", reduce_op, "' must be 'sum'");
}

ReduceOp check_reduce_op(const char* op, const char* name, at::ScalarType dtype,
                         std::string_view reduce_op) {
  const bool mean = reduce_op == "avg";
  TORCH_CHECK_VALUE(mean || reduce_op == "sum", op, ": reduce_op='", reduce_op,
                    "' must be 'sum' or 'avg'");
  TORCH_CHECK_TYPE(summable(dtype), op, ": ", name, " is ", name_dtype(dtype),
                   ", which cannot be summed: needs an integer, a complex or a floating dtype of "
                   "at least 16 bits");
  TORCH_CHECK_TYPE(!mean || !c10::isIntegralType(dtype, /*includeBool=*/true), op,
                   ": reduce_op='avg' of ", name_dtype(dtype),
                   " is not defined: use a floating dtype");
  return mean ? ReduceOp::kAvg : ReduceOp::kSum;
}

int64_t total(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

std::string name_sizes(const std::vector<int64_t>& sizes) {
  if (std::adjacent_find(sizes.begin(), sizes.end(), std::not_equal_to<>()) == sizes.end())
    return "";
  std::string text = joined(sizes, "+");
  if (text.size() > kLongSizes)
    text = "#" + std::to_string(std::hash<std::string>{}(text) & 0xffffffff);
  return "sizes=" + text;
}

std::vector<int64_t> check_gather(const char* op, const char* argument, int64_t dim,
                                  const at::Tensor& shard, const Sizes& sizes, const Group& group) {
  const int64_t length = shard.size(dim);
  if (!sizes) return std::vector<int64_t>(group.world_size(), length);
  check_sizes(op, *sizes, group.world_size());
  const int64_t own = (*sizes)[group.rank()];
  TORCH_CHECK_VALUE(own == length, op, ": sizes=[", joined(*sizes, ", "), "] give rank ",
                    group.rank(), " a shard of length ", own, ", but dimension ", argument, "=",
                    dim, " of its shard has length ", length);
  return *sizes;
}

std::vector<int64_t> check_scatter(const char* op, const at::Tensor& whole, const Sizes& sizes,
                                   int ranks) {
  const int64_t length = whole.size(0);
  if (!sizes) {
    TORCH_CHECK_VALUE(length % ranks == 0, op, ": dimension dim=0 has length ", length,
                      ", which is not divisible by world size ", ranks,
                      ": give sizes, the length of each rank's part");
    return std::vector<int64_t>(ranks, length / ranks);
  }
  check_sizes(op, *sizes, ranks);
  TORCH_CHECK_VALUE(total(*sizes) == length, op, ": sizes=[", joined(*sizes, ", "), "] add up to ",
                    total(*sizes), ", but dimension dim=0 has length ", length);
  return *sizes;
}

void set_reduction(Exchange& exchange, at::ScalarType dtype, ReduceOp reduce_op) {
  exchange.dtype = static_cast<DType>(real(dtype));
  exchange.reduce_op = reduce_op;
}

std::shared_ptr<Mapping> mapping_of(const Group& group, const void* address) {
  const auto peers = group.known_peers();
  return peers != nullptr ? find_mapping(address, *peers) : find_mapping(address, group.name());
}

std::shared_ptr<Mapping> mapping_of(const Group& group, int64_t sequence) {
  const auto peers = group.known_peers();
  return peers != nullptr ? find_mapping(*peers, sequence) : nullptr;
}

bool is_symmetric(const Group& group, const at::Tensor& tensor) {
  if (tensor.numel() == 0) return false;  // an empty tensor has no address
  return mapping_of(group, tensor.const_data_ptr()) != nullptr;
}

void check_symmetric(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.numel() == 0 || symmetric_offset(tensor.const_data_ptr()).has_value(),
                    op, ": ", name,
                    " is not in symmetric memory, as this op requires on GPUs: allocate it with "
                    "torch.distributed._symmetric_memory.empty()");
}

void count_attention_run() { ++attention_runs; }

bool overlap(const at::Tensor& one, const at::Tensor& other) {
  const auto begin = [](const at::Tensor& t) {
    return static_cast<const char*>(t.const_data_ptr());
  };
  return begin(one) < begin(other) + other.nbytes() && begin(other) < begin(one) + one.nbytes();
}

std::string describe(const std::exception& error) {
  return std::string(name_error(error)) + ": " + text_of(error);
}

bool serves_cpu() { return serving.load(std::memory_order_relaxed); }

void reporting_exchange(c10::function_ref<void()> body) {
  reported_interruption = false;
  was_interrupted();  // clears a mark left by an earlier call
  try {
    body();
  } catch (const std::exception& error) {
    last_reported = text_of(error);
    reported_interruption = was_interrupted();
    TORCH_CHECK(false, last_reported);
  }
}

void reporting_errors(const char* op, Group& group, int channel, c10::function_ref<void()> body) {
  reported_interruption = false;
  last_reported.clear();
  was_interrupted();  // clears a mark left by an earlier call
  try {
    body();
  } catch (const SpansHosts&) {
    throw;
  } catch (const HostsUnknown& error) {
    TORCH_CHECK(false, op, ": ", error.what());
  } catch (const Failed& error) {
    note_reported(error.cause);
    reported_interruption = was_interrupted();  // in the last exchange
    std::rethrow_exception(error.cause);
  } catch (const c10::Error& error) {
    // An op inside may have reported it.
    const bool known =
        !last_reported.empty() && std::strstr(text_of(error), last_reported.c_str()) != nullptr;
    if (!known) report_to_peers(group, channel, error);
    throw;
  } catch (const std::bad_alloc& error) {
    report_to_peers(group, channel, error);
    throw;
  } catch (const std::exception& error) {  // from the exchange, which has reported it
    last_reported = error.what();
    reported_interruption = was_interrupted();
    TORCH_CHECK(false, error.what());
  }
}

bool guarded(const char* op, const Arguments& arguments, size_t group_name, int channel,
             c10::function_ref<void(const std::shared_ptr<Group>&)> body) {
  if (!serves_cpu()) return false;
  const std::shared_ptr<Group> group = look_up(op, arguments.text(group_name));
  const auto together = group->on_one_host();
  if (together == false) return false;
  try {
    reporting_errors(op, *group, channel, [&] {
      arguments.check_memory(op);
      if (together) return body(group);
      const BeforeNumber asked([&] { require_one_host(*group); });
      body(group);
    });
  } catch (const SpansHosts&) {
    return false;
  }
  return true;
}

void reporting_refusals(const char* op, const c10::IValue& group_name, int channel,
                        c10::DispatchKeySet keys, c10::function_ref<void()> dispatch) {
  last_reported.clear();
  const auto report = [&](const std::exception& error) {
    const bool traced = c10::impl::TorchDispatchModeTLS::any_modes_set();
    if (traced || !keys.has_backend(c10::BackendComponent::CPUBit) || !last_reported.empty())
      return;
    try {
      if (const auto unfinished = take_interrupted()) {
        report_to_peers(*unfinished, channel, error);
        reported_interruption = true;
        return;
      }
      const auto group = group_named(group_name.toStringRef());
      report_to_peers(*group, channel, error);
    } catch (const std::exception&) {  // no group: no peers to report to
    }
  };
  try {
    dispatch();
  } catch (c10::Error& error) {
    if (std::strstr(text_of(error), op) == nullptr) error.add_context(std::string("in ") + op);
    report(error);
    throw;
  } catch (const std::exception&) {  // a Python error, whose text Python holds
    const std::string text = keys.has(c10::DispatchKey::Python) ? unreported_error() : "";
    if (!text.empty()) report(std::runtime_error(text));
    throw;
  }
}

bool (*run_on_streams)(const c10::OperatorHandle& op, Stack* stack) = nullptr;

std::string name_in_python(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (name.rfind("symm_mem::", 0) == 0) return "symm_cp" + name.substr(name.find(':'));
  return "symm_cp_" + name;
}

void call_python(const c10::OperatorHandle& op, Stack* stack) {
  if (!serves_cpu() && run_on_streams != nullptr && run_on_streams(op, stack)) return;
  c10::Dispatcher::singleton()
      .findSchemaOrThrow(name_in_python(op).c_str(), "")
      .redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

}  // namespace kernels

}  // namespace symm_cp

extern "C" {

// With 0, the kernels in Python handle CPU tensors, for tests.
void symm_cp_serve_cpu(int on) { symm_cp::kernels::serving = on != 0; }

// Returns how often the calling thread has attended to the keys of all ranks, or gathered them.
int64_t symm_cp_attention_runs() { return symm_cp::kernels::attention_runs; }

// Whether the last refusal of a native kernel in this thread was reported to the peers, with `text`
// or a part of it.
int symm_cp_was_reported(const char* text) {
  const std::string& told = symm_cp::kernels::last_reported;
  return !told.empty() && std::strstr(text, told.c_str()) != nullptr ? 1 : 0;
}

// Whether the Ctrl-C that Python is raising interrupted a native kernel, and this was reported to
// the peers.
int symm_cp_interruption_was_reported() {
  return std::exchange(symm_cp::kernels::reported_interruption, false) ? 1 : 0;
}

}  // extern "C"
