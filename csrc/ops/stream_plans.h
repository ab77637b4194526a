// Calls on streams without Python. What a call does follows from its arguments' shapes, dtypes and
// layouts, and from settings: so a call is recorded when Python makes it, with the commands of its
// launches and the ops of its kernels, and later calls with the same key carry the record out.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "channel/wire.h"

namespace symm_cp {

class Group;
class Streams;

namespace stream_plans {

using torch::jit::Stack;

// Memory that a call uses: of an argument, of the result of an op, or of its slot.
constexpr int kSlot = -1;
constexpr int kNoValue = -2;

// Bytes behind the first element of a value.
struct Place {
  int value = kNoValue;
  int64_t offset = 0;
};

// A tensor over a value.
struct View {
  Place place;
  at::DimVector sizes, strides;
  at::ScalarType dtype = at::kByte;
};

// An argument of an op, or a result of the call: a constant, a tensor, or a list of tensors.
struct StepArgument {
  c10::IValue constant;
  std::vector<View> tensors;
  bool is_list = false;
};

struct OpStep {
  c10::OperatorHandle op;
  std::vector<StepArgument> arguments;
  std::vector<int> results;  // the values that its tensors become, or kNoValue
  std::vector<int> last;     // values that nothing uses after it
};

// What only Python can launch, such as a kernel of Triton.
struct PythonStep {
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> function;
  std::vector<View> arguments;
  std::vector<int> results, last;
};

// What a stream is given between commands: by a step of a schedule that of its lane, else the
// caller's.
struct KernelStep {
  std::vector<std::variant<OpStep, PythonStep>> steps;
  std::optional<int> lane;
};

// A schedule that is handed out, up to EndStep.
struct LaunchStep {
  Streams* streams;
  at::Tensor memory;  // of the workspace
  WorkspaceLayout layout;
  void* lanes[kLanes];  // the first one is the caller's stream, of each call its own
  std::vector<Place> operands;
  std::string call_name;
  bool joined;                  // the caller's stream waits for its end
  std::shared_ptr<void> owner;  // Python's workspace
  // Gives the workspace up, after an error; tensors that its streams may use.
  std::function<void(const std::vector<at::Tensor>&, const std::string& error)> fail;
};
struct CommandStep {
  std::vector<StreamCommand> commands;
};
struct EndStep {
  std::vector<int> last;
};
using Step = std::variant<LaunchStep, CommandStep, KernelStep, EndStep>;

struct Plan {
  std::vector<Step> steps;
  // A number stands for a tensor of the caller's, as the key has them.
  std::vector<std::variant<StepArgument, size_t>> results;
  size_t values = 0;
  c10::Device device = c10::kCPU;
  std::weak_ptr<Group> group;
  std::vector<std::function<bool()>> may_run;  // asked before each run
};

// A call that is being recorded. Its methods are called in the order of what they record, with
// Python's lock; virtual, since the library that needs Python's headers calls them. What cannot be
// recorded is refused, and the call stays in Python.
class Recording {
 public:
  virtual ~Recording() = default;
  virtual void launch(LaunchStep step, uint32_t epoch,
                      const std::vector<const void*>& operands) = 0;
  virtual void commands(const StreamCommand* first, int count) = 0;
  // Begins a kernel on a lane; returns its number, for the ops in it.
  virtual int kernel(int lane) = 0;
  virtual void end_launch() = 0;
  // An op that was carried out, in a kernel or (-1) outside of them.
  virtual void op(int kernel, const c10::OperatorHandle& op, const Stack& arguments,
                  const std::vector<at::Tensor>& results) = 0;
  virtual void python(int kernel, PythonStep step, const std::vector<at::Tensor>& arguments,
                      const std::vector<at::Tensor>& results) = 0;
  // When a plan may run: asked before each run. None: always.
  virtual void ask(std::function<bool()> may_run) = 0;
  virtual void refuse(const std::string& reason) = 0;
};

// Carries out a call of an op by its plan, or has Python make it and records it. Returns false, and
// does nothing, where neither is possible: then Python's kernel has to.
bool run(const c10::OperatorHandle& op, Stack* stack);
// The kernel of ops for devices with streams: a plan, or Python.
void kernel(const c10::OperatorHandle& op, Stack* stack);
// The same for ops of which torch has kernels, which serve groups that ours do not.
void kernel_or_torchs(const c10::OperatorHandle& op, Stack* stack);

}  // namespace stream_plans
}  // namespace symm_cp
