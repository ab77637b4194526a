// Calls of ops without Python. Settings and the arguments' shapes, dtypes and layouts determine the
// work of a call. So a call that Python makes is recorded: its exchanges, or the commands of its
// launches on streams, and the ops of its kernels. Later calls with the same key replay the
// recording.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "channel/wire.h"
#include "exchange/exchange.h"

namespace symm_cp {

class Group;
class Streams;

namespace plans {

using torch::jit::Stack;

// A value is memory that a call uses: the memory of an argument or of an op's result, or the call's
// slot.
constexpr int kSlot = -1;
constexpr int kNoValue = -2;

// An address: `offset` bytes behind a value's first element.
struct ValuePlace {
  int value = kNoValue;
  int64_t offset = 0;
};

// A tensor over a value. Sizes that follow a free argument are not part of a plan: then it is the
// caller's tensor with a place in the key (`free`), or the result of a step as it is (`whole`).
struct View {
  ValuePlace place;
  at::DimVector sizes, strides;
  at::ScalarType dtype = at::kByte;
  std::optional<size_t> free = {};
  bool whole = false;
  bool varies() const { return free.has_value() || whole; }
};

// An argument of an op, or a result of the call: a constant, a tensor, a list of tensors, or the
// caller's free number with this place in the key.
struct StepArgument {
  c10::IValue constant;
  std::vector<View> tensors;
  bool is_list = false;
  std::optional<size_t> free_number = {};
};

struct OpStep {
  c10::OperatorHandle op;
  std::vector<StepArgument> arguments;
  std::vector<int> results;  // the values that hold its results, or kNoValue
  std::vector<int> last;     // values not used after this step
  bool is_mm = false;        // aten::mm.out, the commonest: called without boxes
};

// A new contiguous tensor on CPU, with memory from the pool of results.
struct NewStep {
  at::DimVector sizes;
  at::ScalarType dtype;
  std::vector<int> results, last;
};

// A kernel that only Python can launch, such as a Triton kernel.
struct PythonStep {
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> function;
  std::vector<View> arguments;
  std::vector<int> results, last;
};

// Work launched between commands: on its lane's stream if a step of a schedule launches it, else on
// the caller's stream.
struct KernelStep {
  std::vector<std::variant<OpStep, NewStep, PythonStep>> steps;
  std::optional<int> lane;
};

using Addresses = c10::SmallVector<void*, 4>;

// An exchange without the addresses of its tensors.
class PreparedExchange {
 public:
  Exchange exchange;
  // Where the extents of the exchange begin in the given and in the taken tensor. Without them the
  // exchange has boxes.
  std::vector<int64_t> given_at, taken_at;

  // Carries it out on tensors at these addresses, under another name if one is given.
  void run(Group& group, const Addresses& given, const Addresses& taken,
           const std::string* name = nullptr);

 private:
  std::atomic<bool> busy_{false};  // another thread runs it
};

// An exchange in the calling thread.
struct ExchangeStep {
  std::shared_ptr<PreparedExchange> prepared;
  std::vector<View> given, taken;
  std::vector<int> last;
  // The name of the call, as the ranks compare it, with a free number in between.
  std::optional<size_t> free_number;
  std::string before, after;
};

// Launches a schedule; its steps follow, up to EndStep.
struct LaunchStep {
  Streams* streams;
  at::Tensor memory;  // of the workspace
  WorkspaceLayout layout;
  void* lanes[kLanes];  // the first is the caller's stream, which each call sets
  std::vector<ValuePlace> operands;
  std::string call_name;
  std::shared_ptr<void> owner;  // Python's workspace
  // Abandons the workspace after an error; its streams may still use `tensors`.
  std::function<void(const std::vector<at::Tensor>&, const std::string& error)> fail;
};
struct CommandStep {
  std::vector<Command> commands;
};
struct EndStep {
  std::vector<int> last;
};
using Step = std::variant<ExchangeStep, LaunchStep, CommandStep, KernelStep, EndStep>;

struct Plan {
  std::vector<Step> steps;
  // A number is the place in the key of one of the caller's tensors.
  std::vector<std::variant<StepArgument, size_t>> results;
  size_t values = 0;
  std::vector<std::pair<int, at::Tensor>> constants;  // values that are the same in all calls
  c10::Device device = c10::kCPU;
  size_t exchanges = 0;
  int64_t calls = 0;    // of the group: its exchanges, and those of ops among its steps
  bool counts = false;  // as a run of attention
  std::vector<std::function<bool()>> may_run;  // called before each run
};

// A call that is being recorded. Callers hold Python's lock and call the methods in the order of
// the recorded work. The methods are virtual because the library that needs Python's headers calls
// them. A call with anything that cannot be recorded is refused and stays in Python.
class Recording {
 public:
  virtual ~Recording() = default;
  virtual void launch(LaunchStep step, uint32_t epoch,
                      const std::vector<const void*>& operands) = 0;
  virtual void commands(const Command* first, int count) = 0;
  // Begins a kernel on a lane; returns its number, for the ops in it.
  virtual int kernel(int lane) = 0;
  virtual void end_launch() = 0;
  // Called before an op runs.
  virtual void before_op() = 0;
  // Records an op that ran in a kernel, or outside of kernels (-1).
  virtual void op(int kernel, const c10::OperatorHandle& op, const Stack& arguments,
                  const std::vector<at::Tensor>& results) = 0;
  virtual void python(int kernel, PythonStep step, const std::vector<at::Tensor>& arguments,
                      const std::vector<at::Tensor>& results) = 0;
  // Notes that a tensor of the kernel's own has the same values in all calls with this key.
  virtual void constant(const at::Tensor& tensor) = 0;
  // Makes runs of the plan count as runs of attention.
  virtual void counts() = 0;
  // Adds a condition of the plan, called before each run. A plan without conditions may always run.
  virtual void ask(std::function<bool()> may_run) = 0;
  virtual void refuse(const std::string& reason) = 0;
};

// The kernel of ops for devices with streams: runs a plan, or Python.
void kernel(const c10::OperatorHandle& op, Stack* stack);
// Like `kernel`, for ops for which torch has kernels: groups that this library does not support are
// left to them.
void kernel_or_torchs(const c10::OperatorHandle& op, Stack* stack);

}  // namespace plans
}  // namespace symm_cp
