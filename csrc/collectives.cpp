// Collectives without Python steps: at once, or on a copy engine as work that `wait_tensor` awaits.
// Their gradients are in gradients.cpp.
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

}  // namespace symm_cp
