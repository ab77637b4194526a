// Collectives without Python steps: at once, or on a copy engine as work that `wait_tensor` awaits;
// and the gradients of the latter, here because a gradient registered from Python costs each call 6
// microseconds, as much as a small collective.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "error.h"
#include "plan.h"
#include "workspace.h"

namespace symm_cp {

namespace {

using PlanHandle = std::shared_ptr<const Plan>;

// Holds what the transfer reads and writes until somebody waited for it. The output's storage, not
// the tensor: the work is registered under the tensor.
class Transfer : public c10d::Work {
 public:
  Transfer(std::shared_ptr<Lane> lane, int64_t ticket, at::Tensor input, c10::Storage output)
      : lane_(std::move(lane)),
        ticket_(ticket),
        input_(std::move(input)),
        output_(std::move(output)) {}

  bool isCompleted() override { return lane_->finished(ticket_); }

  bool wait(std::chrono::milliseconds /*timeout*/) override {
    try {
      lane_->wait(ticket_);
    } catch (const PeerError& error) {
      TORCH_CHECK(false, error.what());
    }
    input_.reset();
    return true;
  }

 private:
  std::shared_ptr<Lane> lane_;
  int64_t ticket_;
  at::Tensor input_;
  c10::Storage output_;
};

// What a call works on: `plain` and `in_place` are handles of plans; the second, if it is another,
// is used when the input is contiguous in symmetric memory of the group.
struct Call {
  at::Tensor input;
  bool symmetric;
  const PlanHandle& plan;

  Call(const Channel& channel, int64_t plain, int64_t in_place, const at::Tensor& given)
      : input(given.contiguous()),
        symmetric(plain != in_place && input.is_same(given) &&
                  find_mapping(input.const_data_ptr(), *channel.mapping().peers()) != nullptr),
        plan(*reinterpret_cast<PlanHandle*>(symmetric ? in_place : plain)) {}

  std::vector<void*> operands(const at::Tensor& output) const {
    return {const_cast<void*>(input.const_data_ptr()), const_cast<void*>(output.const_data_ptr())};
  }
};

void run_commands(Channel& channel, const std::vector<Command>& commands, const Plan& plan,
                  const std::vector<void*>& operands, int64_t epoch) {
  channel.run(commands.data(), static_cast<int>(commands.size()), plan.references.data(),
              operands.data(), static_cast<uint32_t>(epoch), plan.what.c_str());
}

// Carries a collective out in the calling thread.
void run_collective(int64_t workspace, int64_t plain, int64_t in_place, const at::Tensor& given,
                    const at::Tensor& output, int64_t epoch) {
  auto& channel = *reinterpret_cast<Workspace*>(workspace)->channel;
  try {
    const Call call(channel, plain, in_place, given);
    run_commands(channel, call.plan->whole, *call.plan, call.operands(output), epoch);
  } catch (const PeerError& error) {
    channel.abort(error.what());
    TORCH_CHECK(false, error.what());
  }
}

// Leaves a collective to the copy engine and returns its output, which is complete once it was
// waited for; nothing when the engine has failed, and nothing was done.
// When the engine is idle the slot is free: then the caller publishes its input itself, and the
// peers can begin. Otherwise the input is copied aside and all is left to the engine. Either way a
// plain input may be overwritten once this has returned.
std::optional<at::Tensor> start_transfer(int64_t workspace, int64_t plain, int64_t in_place,
                                         const at::Tensor& given, at::IntArrayRef shape,
                                         int64_t epoch, bool background) {
  auto& [channel, lane] = *reinterpret_cast<Workspace*>(workspace);
  if (lane->failed()) return std::nullopt;
  at::Tensor output = at::empty(shape, given.options());
  try {
    Call call(*channel, plain, in_place, given);
    const bool idle = lane->idle();
    if (!idle && !call.symmetric && call.input.is_same(given)) call.input = given.clone();
    const auto operands = call.operands(output);
    if (idle) run_commands(*channel, call.plan->publish, *call.plan, operands, epoch);
    const int64_t ticket = lane->submit({call.plan, !idle, operands, static_cast<uint32_t>(epoch)},
                                        background || !idle);
    c10d::register_work(output,
                        c10::make_intrusive<Transfer>(lane, ticket, call.input, output.storage()));
  } catch (const PeerError& error) {
    channel->abort(error.what());
    TORCH_CHECK(false, error.what());
  }
  return output;
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
      "start_transfer(int workspace, int plain, int in_place, Tensor input, int[] shape, "
      "int epoch, bool background) -> Tensor?",
      torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, start_transfer));
  m.def(
      "run_collective(int workspace, int plain, int in_place, Tensor input, Tensor output, "
      "int epoch) -> ()",
      torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, run_collective));
}

TORCH_LIBRARY_IMPL(symm_mem, Autograd, m) {
  m.impl("_low_contention_all_gather", all_gather_autograd);
  m.impl("_low_contention_reduce_scatter", reduce_scatter_autograd);
}

}  // namespace symm_cp
