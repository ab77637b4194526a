// Collectives without Python steps: at once, or on a copy engine as work that `wait_tensor` awaits;
// and the gradients of the latter, here because a gradient registered from Python costs each call 6
// microseconds, as much as a small collective.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "error.h"
#include "group.h"
#include "plan.h"

namespace symm_cp {

namespace {

using PlanHandle = std::shared_ptr<const Plan>;

// Holds what the transfer reads and writes until somebody waited for it. The output's storage, not
// the tensor: the work is registered under the tensor.
class Transfer : public c10d::Work {
 public:
  Transfer(std::shared_ptr<Group> group, int64_t number, at::Tensor input, c10::Storage output)
      : group_(std::move(group)),
        number_(number),
        input_(std::move(input)),
        output_(std::move(output)) {}

  bool isCompleted() override { return group_->lane().finished(number_); }

  bool wait(std::chrono::milliseconds /*timeout*/) override {
    try {
      group_->lane().wait(number_);
    } catch (const PeerError& error) {
      TORCH_CHECK(false, error.what());
    }
    input_.reset();
    return true;
  }

 private:
  std::shared_ptr<Group> group_;
  int64_t number_;
  at::Tensor input_;
  c10::Storage output_;
};

std::shared_ptr<Group>& group_at(int64_t handle) {
  return *reinterpret_cast<std::shared_ptr<Group>*>(handle);
}

// Handles of the plans of a collective, and what their slots take: for an input in symmetric memory
// of the group, which must be contiguous, and for any other.
struct Ways {
  int64_t plain, in_place, slot_plain, slot_in_place;
};

struct Inputs {
  at::Tensor input;
  bool symmetric;
  const PlanHandle& plan;
  int64_t slot_bytes;

  Inputs(const Group& group, const Ways& ways, const at::Tensor& given)
      : input(given.contiguous()),
        symmetric(ways.plain != ways.in_place && input.is_same(given) &&
                  is_symmetric(group, input)),
        plan(*reinterpret_cast<PlanHandle*>(symmetric ? ways.in_place : ways.plain)),
        slot_bytes(symmetric ? ways.slot_in_place : ways.slot_plain) {}

  std::vector<void*> operands(const at::Tensor& output) const {
    return {const_cast<void*>(input.const_data_ptr()), const_cast<void*>(output.const_data_ptr())};
  }

  static bool is_symmetric(const Group& group, const at::Tensor& tensor) {
    const auto peers = group.known_peers();
    return (peers != nullptr ? find_mapping(tensor.const_data_ptr(), *peers)
                             : find_mapping(tensor.const_data_ptr(), group.name())) != nullptr;
  }
};

void run_commands(Channel& channel, const std::vector<Command>& commands, const Plan& plan,
                  const std::vector<void*>& operands, Call& call) {
  channel.run(commands.data(), static_cast<int>(commands.size()), plan.references.data(),
              operands.data(), call);
}

// Carries a collective out in the calling thread.
void run_collective(int64_t handle, int64_t plain, int64_t in_place, int64_t slot_plain,
                    int64_t slot_in_place, const at::Tensor& given, const at::Tensor& output) {
  const std::shared_ptr<Group> group = group_at(handle);
  Workspace& workspace = group->workspace(kSync);
  const int64_t number = group->next(kSync);
  try {
    const Inputs inputs(*group, {plain, in_place, slot_plain, slot_in_place}, given);
    Call call = workspace.begin(number, inputs.slot_bytes, inputs.plan->what);
    run_commands(*workspace.channel(), inputs.plan->whole, *inputs.plan, inputs.operands(output),
                 call);
  } catch (const std::exception& error) {
    group->failed(kSync, number, error);
    TORCH_CHECK(false, error.what());
  }
}

// Leaves a collective to the copy engine and returns its output, which is complete once it was
// waited for. Never waits for a peer: what the first call, or one that needs larger memory, waits
// for is left to the engine, too.
// When the engine is idle the slot is free: then the caller publishes its input itself, and the
// peers can begin. Otherwise the input is copied aside and all is left to the engine. Either way a
// plain input may be overwritten once this has returned.
at::Tensor start_transfer(int64_t handle, int64_t plain, int64_t in_place, int64_t slot_plain,
                          int64_t slot_in_place, const at::Tensor& given, at::IntArrayRef shape,
                          bool background) {
  const std::shared_ptr<Group> group = group_at(handle);
  Workspace& workspace = group->workspace(kAsync);
  const int64_t number = group->next(kAsync);
  try {
    Inputs inputs(*group, {plain, in_place, slot_plain, slot_in_place}, given);
    at::Tensor output = at::empty(shape, given.options());
    const bool publish = group->lane().idle() && workspace.at_hand(inputs.slot_bytes);
    if (!publish && !inputs.symmetric && inputs.input.is_same(given)) inputs.input = given.clone();
    Lane::Program program{number, inputs.plan, inputs.operands(output), inputs.slot_bytes};
    if (publish) {
      program.begun = workspace.begin(number, inputs.slot_bytes, inputs.plan->what);
      run_commands(*workspace.channel(), inputs.plan->publish, *inputs.plan, program.operands,
                   *program.begun);
    }
    group->lane().submit(std::move(program), background || !publish);
    c10d::register_work(
        output, c10::make_intrusive<Transfer>(group, number, inputs.input, output.storage()));
    return output;
  } catch (const std::exception& error) {
    group->lane().refuse(number, cause_of(error, group->rank()), nullptr);
    TORCH_CHECK(false, error.what());
  }
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

at::Tensor all_gather(const at::Tensor& tensor, const std::string& group) {
  static const auto op =
      find_op<at::Tensor(const at::Tensor&, std::string)>("symm_mem::_low_contention_all_gather");
  return op.call(tensor, group);
}

at::Tensor reduce_scatter(const at::Tensor& tensor, const std::string& reduce_op,
                          const std::string& group) {
  static const auto op = find_op<at::Tensor(const at::Tensor&, std::string, std::string)>(
      "symm_mem::_low_contention_reduce_scatter");
  return op.call(tensor, reduce_op, group);
}

at::Tensor waited(const at::Tensor& tensor) {
  static const auto op = find_op<at::Tensor(const at::Tensor&)>("_c10d_functional::wait_tensor");
  return op.call(tensor);
}

struct AllGather : torch::autograd::Function<AllGather> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& tensor,
                            const std::string& group) {
    ctx->saved_data["group"] = group;
    at::AutoDispatchBelowADInplaceOrView below;
    return all_gather(tensor, group);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const std::string group = ctx->saved_data["group"].toStringRef();
    return {waited(reduce_scatter(grads[0], "sum", group)), at::Tensor()};
  }
};

struct ReduceScatter : torch::autograd::Function<ReduceScatter> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& tensor,
                            const std::string& reduce_op, const std::string& group) {
    ctx->saved_data["group"] = group;
    ctx->saved_data["mean"] = reduce_op == "avg";
    ctx->saved_data["rows"] = tensor.size(0);
    at::AutoDispatchBelowADInplaceOrView below;
    return reduce_scatter(tensor, reduce_op, group);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::Tensor grad = waited(all_gather(grads[0], ctx->saved_data["group"].toStringRef()));
    if (ctx->saved_data["mean"].toBool())
      grad = grad * (static_cast<double>(grads[0].size(0)) / ctx->saved_data["rows"].toInt());
    return {grad, at::Tensor(), at::Tensor()};
  }
};

bool needs_gradient(const at::Tensor& tensor) {
  return tensor.requires_grad() && at::GradMode::is_enabled();
}

at::Tensor all_gather_autograd(const at::Tensor& tensor, std::string group) {
  if (needs_gradient(tensor)) return AllGather::apply(tensor, group);
  at::AutoDispatchBelowADInplaceOrView below;
  return all_gather(tensor, group);
}

at::Tensor reduce_scatter_autograd(const at::Tensor& tensor, std::string reduce_op,
                                   std::string group) {
  if (needs_gradient(tensor)) return ReduceScatter::apply(tensor, reduce_op, group);
  at::AutoDispatchBelowADInplaceOrView below;
  return reduce_scatter(tensor, reduce_op, group);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(symm_cp, m) {
  m.def(
      "start_transfer(int group, int plain, int in_place, int slot_plain, int slot_in_place, "
      "Tensor input, int[] shape, bool background) -> Tensor",
      torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, start_transfer));
  m.def(
      "run_collective(int group, int plain, int in_place, int slot_plain, int slot_in_place, "
      "Tensor input, Tensor output) -> ()",
      torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, run_collective));
}

TORCH_LIBRARY_IMPL(symm_mem, Autograd, m) {
  m.impl("_low_contention_all_gather", all_gather_autograd);
  m.impl("_low_contention_reduce_scatter", reduce_scatter_autograd);
}

}  // namespace symm_cp
