// Shared by the native kernels of ops: the group of a call, checks of arguments that ranks must
// agree on, and a cache of the calls that were checked.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "channel/group.h"
#include "exchange/exchange.h"
#include "exchange/trace.h"
#include "memory/mapping.h"
#include "memory/pool.h"

namespace symm_cp::kernels {

using torch::jit::Stack;

// The lengths of all ranks' parts of a dimension, if the caller gives them.
using Sizes = std::optional<std::vector<int64_t>>;

// Distinguishes the calls of this process: op, world size, dtype, sizes and so on.
using CallKey = c10::SmallVector<int64_t, 16>;

// A call whose arguments were checked. Calls with the same key differ only in addresses.
struct CheckedCall {
  Exchange exchange;
  // The offsets in the tensors at which the extents of the exchange begin.
  std::vector<int64_t> input_offsets;
  std::vector<int64_t> output_offsets;
  std::vector<int64_t> output_shape;  // for several outputs, their shapes one after the other
  bool in_place_possible = true;      // an input in symmetric memory is read where it lies
  bool background = false;            // large enough to wake the copy engine for it

  // `row` and `pitch`: see Extent.
  void add_input(int64_t offset, int64_t bytes);
  void add_output(int64_t offset, int64_t bytes, int64_t row = 0, int64_t pitch = 0);
  // Plans an all-reduce. Each rank reduces one part if that is faster or `in_parts` is set; the
  // last parts may be shorter.
  void set_all_reduce(int64_t bytes, int ranks, bool in_parts = false);
  void bind(const void* input, void* output);
};

// The calls that this thread has checked. A bounded cache.
class CheckedCalls {
 public:
  static CheckedCalls& of_this_thread();

  // Returns the call with that key, after `check(call)` has filled it if there was none. While a
  // caller holds it, another call with the key, such as a signal handler's, gets a new one.
  template <class Check>
  std::shared_ptr<CheckedCall> take(const CallKey& key, Check check) {
    const auto known = calls_.find(key);
    if (known != calls_.end() && known->second.use_count() == 1) return known->second;
    auto call = std::make_shared<CheckedCall>();
    check(*call);
    keep(key, call);
    return call;
  }

 private:
  struct Hash {
    size_t operator()(const CallKey& key) const;
  };
  void keep(const CallKey& key, const std::shared_ptr<CheckedCall>& call);

  std::unordered_map<CallKey, std::shared_ptr<CheckedCall>, Hash> calls_;
};

// The arguments of an op on the stack, which its kernel replaces by the result.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, Stack* stack)
      : schema_(op.schema()), stack_(stack), count_(op.schema().arguments().size()) {}

  size_t count() const { return count_; }
  const c10::IValue& at(size_t index) const { return torch::jit::peek(*stack_, index, count_); }
  const at::Tensor& tensor(size_t index) const { return at(index).toTensor(); }
  // Returns an undefined tensor for None.
  at::Tensor optional_tensor(size_t index) const {
    return at(index).isNone() ? at::Tensor() : at(index).toTensor();
  }
  const std::string& text(size_t index) const { return at(index).toStringRef(); }
  bool flag(size_t index) const { return at(index).toBool(); }
  int64_t number(size_t index) const { return at(index).toInt(); }
  std::vector<at::Tensor> tensors(size_t index) const { return at(index).toTensorVector(); }
  std::optional<int64_t> optional_number(size_t index) const {
    return at(index).toOptional<int64_t>();
  }
  // Returns nullopt for None.
  std::optional<std::vector<int64_t>> numbers(size_t index) const;
  // Reads the arguments for uneven parts, from `index` on: all lengths, then the rank. Raises
  // ValueError if that rank is not this process's.
  Sizes sizes(size_t index, const Group& group) const;
  Stack all() const { return torch::jit::last(*stack_, count_).vec(); }
  // Checks all tensors.
  void check_memory(const char* op) const;
  template <class... Results>
  void end(Results... results) {
    torch::jit::drop(*stack_, count_);
    torch::jit::push(*stack_, std::move(results)...);
  }

 private:
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  size_t count_;
};

// A part's bytes, rounded up so that the next part is aligned.
constexpr int64_t whole_parts(int64_t bytes) {
  return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}

// Returns an empty tensor for a result.
inline at::Tensor new_output(const at::Tensor& like, at::IntArrayRef sizes) {
  return pooled_empty(sizes, like.options());
}

// Appends a tensor's dtype and sizes to a key.
void add_tensor(CallKey& key, const at::Tensor& tensor);

// Returns the text that names a call in errors, and that ranks compare: "op float32[2, 4] detail".
std::string name_call(const char* op, at::ScalarType dtype, at::IntArrayRef sizes,
                      const std::string& detail);
// "torch.float32"
std::string name_dtype(at::ScalarType dtype);

// Raises TypeError if the tensor is None, ValueError if its storage is too small, as after
// `untyped_storage().resize_(0)`.
void check_memory(const char* op, const std::string& name, const at::Tensor& tensor);

// These raise ValueError or TypeError.
void check_dense(const char* op, const char* name, const at::Tensor& tensor);
void check_out(const char* op, const char* name, const at::Tensor& out, at::IntArrayRef sizes,
               at::ScalarType dtype);
void check_has_dims(const char* op, const char* name, const at::Tensor& tensor);
void check_rank(const char* op, const char* name, int64_t rank, int ranks);
// For torch's ops that only sum.
void check_sum(const char* op, const char* name, const std::string& reduce_op);
ReduceOp check_reduce_op(const char* op, const char* name, at::ScalarType dtype,
                         std::string_view reduce_op);

// Returns the length of every rank's shard of a gathered dimension; `argument` names the dimension.
std::vector<int64_t> check_gather(const char* op, const char* argument, int64_t dim,
                                  const at::Tensor& shard, const Sizes& sizes, const Group& group);
// Returns the length of every rank's part of a scattered dimension 0.
std::vector<int64_t> check_scatter(const char* op, const at::Tensor& whole, const Sizes& sizes,
                                   int ranks);
int64_t total(const std::vector<int64_t>& sizes);
// Returns "sizes=3+2", or a checksum if that is long; "" for equal parts.
std::string name_sizes(const std::vector<int64_t>& sizes);

// Sets how an exchange reduces elements; complex elements are pairs of real ones.
void set_reduction(Exchange& exchange, at::ScalarType dtype, ReduceOp reduce_op);

// Returns the group's mapping of the tensor at an address, or the mapping made by rendezvous number
// `sequence`; null if there is none.
std::shared_ptr<Mapping> mapping_of(const Group& group, const void* address);
std::shared_ptr<Mapping> mapping_of(const Group& group, int64_t sequence);
// Whether a tensor lies in symmetric memory that was rendezvoused with the group.
bool is_symmetric(const Group& group, const at::Tensor& tensor);
// Raises ValueError for a tensor outside symmetric memory, which torch's ops reject on GPUs. Does
// not check whether it was rendezvoused.
void check_symmetric(const char* op, const char* name, const at::Tensor& tensor);
// Counts a run in which this thread attends to the keys of all ranks, or gathers them: see
// symm_cp/ops/common.py.
void count_attention_run();
// Whether two contiguous tensors share bytes.
bool overlap(const at::Tensor& one, const at::Tensor& other);

// An op failed after it had begun; the peers need no further report.
struct Failed : std::exception {
  explicit Failed(std::exception_ptr error) : cause(std::move(error)) {}
  std::exception_ptr cause;
};

// Runs a kernel after the exchange, and records it like a step: all ranks have completed the
// exchange, so an error is not reported to the peers.
template <class Kernel>
void after_exchange(Group& group, const char* op, const Kernel& kernel) {
  Recorder& recorder = Recorder::instance();
  const int64_t start = recorder.on() ? Recorder::now() : 0;
  try {
    kernel();
  } catch (const std::exception&) {
    throw Failed(std::current_exception());
  }
  if (start == 0) return;
  Command shown{};
  shown.kind = Kind::kConsume;
  const auto epoch = static_cast<uint32_t>(group.workspace(kSync).epoch());
  recorder.add(shown, start, Recorder::now(), epoch, op);
}

// Returns the error's name in Python and its text: "ValueError: ...".
std::string describe(const std::exception& error);

// Runs `body(group)`, an op's kernel, unless a tensor has no memory. Argument number `group_name`
// is the group's name. Reports refused arguments to the peers, which may be making the same call on
// `channel`. Returns false if the kernel in Python is needed: for groups that span hosts, and for
// tests that run CPU tensors on a simulated device.
bool guarded(const char* op, const Arguments& arguments, size_t group_name, int channel,
             c10::function_ref<void(const std::shared_ptr<Group>&)> body);
// Runs `body`, an exchange of a kernel in Python: the peers know of its errors.
void reporting_exchange(c10::function_ref<void()> body);
// Runs `body`, a call of an op without Python, and reports errors before its exchanges to the
// peers.
void reporting_errors(const char* op, Group& group, int channel, c10::function_ref<void()> body);
// Whether native kernels and plans serve CPU tensors; false in tests that run them on a simulated
// device.
bool serves_cpu();
// Runs `dispatch`, which redispatches a call of `op` to the kernels of other dispatch keys. Reports
// to the peers a refusal that happens before a kernel can report it: in torch (for named tensors,
// for example), in the rules of a tensor subclass, or in the autograd kernel. Reports nothing for
// devices other than CPUs, nor under a dispatch mode, which may be tracing.
void reporting_refusals(const char* op, const c10::IValue& group_name, int channel,
                        c10::DispatchKeySet keys, c10::function_ref<void()> dispatch);
// Returns an op's name in errors: a user's op has its namespace.
inline const char* name_of(const c10::OperatorHandle& op) {
  constexpr std::string_view ours = "symm_mem::";
  const std::string& name = op.schema().name();
  return name.c_str() + (name.compare(0, ours.size(), ours) == 0 ? ours.size() : 0);
}
// Returns the name of the op that holds the kernels in Python: `symm_cp::f` for `symm_mem::f`,
// `symm_cp_mine::f` for a user's `mine::f`.
std::string name_in_python(const c10::OperatorHandle& op);
// Runs a call of CPU tensors that tests put on simulated streams, if there is a plan. Set by
// csrc/plan.
extern bool (*run_on_streams)(const c10::OperatorHandle& op, Stack* stack);
// Calls the kernel in Python.
void call_python(const c10::OperatorHandle& op, Stack* stack);

}  // namespace symm_cp::kernels
