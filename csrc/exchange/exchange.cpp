#include "exchange/exchange.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "channel/group.h"
#include "exchange/boxes.h"
#include "exchange/exchange_run.h"

namespace symm_cp {

namespace {

bool reads_input(const Place& place) {
  return place.buffer == Buffer::kInput || place.buffer == Buffer::kSymmetric;
}

bool starts_at_once(Group& group, int64_t slot_bytes) {
  // When the engine is idle the slot is free.
  return group.lane().idle() && group.workspace(kAsync).begins_at_once(slot_bytes);
}

// A call of the lane, not begun.
Lane::Program program_of(int64_t number, ExchangeRun exchange) {
  Lane::Program program{number, exchange.call_name(), exchange.slot_bytes()};
  program.exchange = std::make_unique<ExchangeRun>(std::move(exchange));
  return program;
}

}  // namespace

Loop::Loop(std::vector<Command> own_steps, std::vector<Place> own_sources)
    : steps(std::move(own_steps)), sources(std::move(own_sources)) {
  const auto first_wait = std::find_if(
      steps.begin(), steps.end(), [](const Command& step) { return step.kind == Kind::kWait; });
  for (auto step = steps.begin(); step != first_wait; ++step)
    if (step->kind == Kind::kSignal) published = static_cast<size_t>(step - steps.begin()) + 1;
  // A single rank has no peers: all of its data leaves the input at once.
  if (first_wait == steps.end()) published = steps.size();
  const auto note = [this](const Place& place) {
    if (place.buffer != Buffer::kSlot) return;
    slotted = true;
    parted |= place.chunk >= 0;
  };
  for (const Command& step : steps) {
    note(step.to);
    note(step.source);
  }
  std::for_each(sources.begin(), sources.end(), note);
}

bool Loop::reads_input_later() const {
  return std::any_of(steps.begin() + static_cast<ptrdiff_t>(published), steps.end(),
                     [this](const Command& step) {
                       if (step.kind == Kind::kCopy) return reads_input(step.source);
                       if (step.kind != Kind::kReduce) return false;
                       const Place* first = sources.data() + step.first_source;
                       return std::any_of(first, first + step.sources, reads_input);
                     });
}

bool Loop::helps_later() const {
  return std::any_of(steps.begin() + static_cast<ptrdiff_t>(published), steps.end(),
                     [](const Command& step) { return step.kind == Kind::kSignal; });
}

Exchange exchange_of(std::string call_name, std::shared_ptr<const Boxes> boxes, bool joining) {
  Exchange exchange;
  exchange.kind = joining ? ExchangeKind::kJoiningAllToAll : ExchangeKind::kAllToAll;
  exchange.call_name = std::move(call_name);
  for (const int64_t bytes : boxes->given_bytes()) exchange.input.push_back({nullptr, bytes});
  for (const int64_t bytes : boxes->taken_bytes()) exchange.output.push_back({nullptr, bytes});
  exchange.boxes = std::move(boxes);
  return exchange;
}

void run(Group& group, Exchange& exchange) {
  group.check_owned(exchange.call_name);
  const CallLock lock(group, kSync);
  const int64_t number = group.next(kSync);
  try {
    ExchangeRun(group, kSync, HeldExchange(exchange)).run(group.workspace(kSync), number);
  } catch (const std::exception& error) {
    group.failed(kSync, number, error);
    throw;
  }
}

bool starts_at_once(Group& group, const Exchange& exchange) {
  return starts_at_once(group, slot_bytes_of(exchange, loop_of(group, kAsync, exchange)));
}

Started start(Group& group, Exchange exchange, bool background, Done done) {
  group.check_owned(exchange.call_name);
  const CallLock lock(group, kAsync);
  Workspace& workspace = group.workspace(kAsync);
  const int64_t number = group.next(kAsync);
  try {
    const Loop& loop = loop_of(group, kAsync, exchange);
    Lane::Program program =
        program_of(number, ExchangeRun(group, kAsync, HeldExchange(std::move(exchange))));
    program.done = std::move(done);
    bool handed_over = false;
    if (program.exchange->complete() && starts_at_once(group, program.slot_bytes)) {
      handed_over = program.exchange->pieces() == 1;
      program.begun = program.exchange->begin(workspace, number);
      program.exchange->publish(*workspace.channel(), *program.begun);
    }
    group.lane().submit(std::move(program), background || !handed_over || loop.helps_later());
    return {number, handed_over && !loop.reads_input_later()};
  } catch (const std::exception& error) {
    group.lane().refuse(number, cause_of(error, group.rank()), nullptr);
    throw;
  }
}

void run_in_turn(Group& group, Exchange exchange) {
  group.check_owned(exchange.call_name);
  Lane& lane = group.lane();
  int64_t number = 0;
  std::optional<ExchangeRun> own;  // unless the lane is taken
  {
    const CallLock lock(group, kAsync);
    number = group.next(kAsync);
    try {
      own.emplace(group, kAsync, HeldExchange(std::move(exchange)));
    } catch (const std::exception& error) {
      lane.refuse(number, cause_of(error, group.rank()), nullptr);
      throw;
    }
    if (!lane.begin_now(number, own->call_name())) {
      lane.submit(program_of(number, std::move(*own)), true);
      own.reset();
    }
  }
  if (!own) return lane.wait(number);
  try {
    own->run(group.workspace(kAsync), number);
  } catch (const std::exception& error) {
    group.failed(kAsync, number, error);
    lane.end_now(number);
    throw;
  }
  lane.end_now(number);
}

void refuse(Group& group, int channel, const std::string& reason) { group.refuse(channel, reason); }

}  // namespace symm_cp
