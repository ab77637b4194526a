// Collectives without Python steps: at once, or on a copy engine as work that `wait_tensor` awaits.
// Their gradients are in gradients.cpp.
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "error.h"
#include "group.h"
#include "plan.h"
#include "pool.h"

namespace symm_cp {

namespace {

using PlanHandle = std::shared_ptr<const Plan>;

// Holds what the transfer reads and writes until it has been waited for. The output's storage, not
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
struct PlanHandles {
  int64_t plain, in_place, slot_plain, slot_in_place;
};

struct Inputs {
  at::Tensor input;
  bool symmetric;
  const PlanHandle& plan;
  int64_t slot_bytes;

  Inputs(const Group& group, const PlanHandles& handles, const at::Tensor& given)
      : input(given.contiguous()),
        symmetric(handles.plain != handles.in_place && input.is_same(given) &&
                  is_symmetric(group, input)),
        plan(*reinterpret_cast<PlanHandle*>(symmetric ? handles.in_place : handles.plain)),
        slot_bytes(symmetric ? handles.slot_in_place : handles.slot_plain) {}

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
    Call call = workspace.begin(number, inputs.slot_bytes, inputs.plan->call_name);
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
    at::Tensor output = pooled_empty(shape, given.options());
    const bool publish = group->lane().idle() && workspace.begins_at_once(inputs.slot_bytes);
    if (!publish && !inputs.symmetric && inputs.input.is_same(given)) inputs.input = given.clone();
    Lane::Program program{number, inputs.plan, inputs.operands(output), inputs.slot_bytes};
    if (publish) {
      program.begun = workspace.begin(number, inputs.slot_bytes, inputs.plan->call_name);
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

}  // namespace symm_cp
