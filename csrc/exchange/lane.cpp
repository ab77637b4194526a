#include "exchange/lane.h"

#include <algorithm>

#include "base/error.h"
#include "base/helper_pool.h"
#include "base/team.h"
#include "channel/group.h"
#include "exchange/trace.h"

namespace symm_cp {

namespace {
constexpr size_t kMaxFailures = 4096;  // failed calls that no thread has waited for
}

void Lane::close() {
  std::deque<Item> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    std::swap(dropped, queue_);
  }
  work_.notify_all();
  if (engine_.joinable()) {
    if (group_.owned())
      engine_.join();
    else
      engine_.detach();  // a forked process has no such thread
  }
  if (!group_.owned()) return;
  for (const Item& item : dropped)
    if (item.program.done) item.program.done(group_.closed_text());
}

void Lane::wake_engine() {
  wake_ = true;
  if (!engine_.joinable()) engine_ = std::thread([this] { serve(); });
  work_.notify_one();
}

void Lane::wake() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!queue_.empty() && !closing_) wake_engine();
}

void Lane::push(Item item, bool background) {
  std::lock_guard<std::mutex> lock(mutex_);
  submitted_ = item.program.number;
  queue_.push_back(std::move(item));
  if (background) wake_engine();
}

void Lane::submit(Program program, bool background) {
  push({std::move(program), {}, std::nullopt}, background);
}

void Lane::refuse(int64_t number, const std::string& cause, const CallSite* other) {
  Item item{{number, {}}, cause.empty() ? "refused" : cause, std::nullopt};
  if (other != nullptr) item.other = *other;
  push(std::move(item), true);
  // If the lane is idle, the refusal is reported before this returns.
  std::unique_lock<std::mutex> lock(mutex_);
  if (!running_ && queue_.size() == 1) run_one(lock);
}

void Lane::run_program(Program& program, Workspace& workspace) {
  if (program.exchange == nullptr)
    workspace.begin(program.number, program.slot_bytes, program.call_name);
  else if (program.begun)
    program.exchange->finish(*workspace.channel(), *program.begun);
  else
    program.exchange->run(workspace, program.number);
}

// Returns why the item failed; empty on success.
std::string Lane::carry_out(Item& item, bool& interrupted) {
  Program& program = item.program;
  Workspace& workspace = group_.workspace(kAsync);
  if (!item.refusal.empty()) {
    workspace.fail(program.number, item.refusal, item.other ? &*item.other : nullptr);
    return item.refusal;
  }
  try {
    run_program(program, workspace);
  } catch (const std::exception& error) {
    group_.failed(kAsync, program.number, error);
    interrupted = dynamic_cast<const Interrupted*>(&error) != nullptr;
    return error.what();
  }
  return {};
}

// Runs the oldest program without holding the lock. Returns whether a signal interrupted it.
bool Lane::run_one(std::unique_lock<std::mutex>& lock) {
  bool interrupted = false;
  running_ = true;
  Item item = std::move(queue_.front());
  queue_.pop_front();
  Program& program = item.program;
  running_name_ = program.call_name;
  running_number_ = program.number;
  lock.unlock();
  pause_at_random();
  std::string failure = carry_out(item, interrupted);
  lock.lock();
  running_ = false;
  completed_ = program.number;
  Done done = std::move(program.done);
  const std::string told = done ? failure : std::string();
  if (!failure.empty() && item.refusal.empty()) {
    failures_[completed_] = std::move(failure);
    if (failures_.size() > kMaxFailures) failures_.erase(failures_.begin());
  }
  done_.notify_all();
  if (!done) return interrupted;
  lock.unlock();
  done(told);
  // Destroys the captures of `done` without the lock: a tensor may have to wait for Python's lock,
  // whose owner may be waiting for this one.
  done = nullptr;
  lock.lock();
  return interrupted;
}

bool Lane::begin_now(int64_t number, const std::string& call_name) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (running_ || !queue_.empty()) return false;
  running_ = true;
  running_name_ = call_name;
  running_number_ = number;
  submitted_ = number;
  return true;
}

void Lane::end_now(int64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  running_ = false;
  completed_ = number;
  done_.notify_all();
  if (wake_) work_.notify_one();
}

void Lane::serve() {
  Recorder::enter_engine();
  Group::enter_engine();
  Team::leave_callers_pool();
  HelperPool helpers(std::min(background_threads(), caller_pool().threads()));
  const Team team(helpers);
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return closing_ || (wake_ && !running_); });
    if (closing_) return;
    if (queue_.empty()) {
      wake_ = false;
      continue;
    }
    run_one(lock);
  }
}

void Lane::wait(int64_t number) {
  std::unique_lock<std::mutex> lock(mutex_);
  number = std::min(number, submitted_);
  const Blocked blocked(group_);
  while (completed_ < number) {
    if (!running_ && !queue_.empty()) {
      const bool interrupted = run_one(lock);
      if (wake_) work_.notify_one();  // the engine may have found the lane taken
      // Python raises the handler's exception when this returns: the next program may wait for
      // long.
      if (interrupted && completed_ < number) throw Interrupted("interrupted by a signal");
    } else if (done_.wait_for(lock, kSlice) == std::cv_status::timeout) {
      const CallSite site{kAsync, group_.moved(kAsync, running_number_), running_name_};
      lock.unlock();
      throw_if_interrupted();
      if (!Group::in_engine()) group_.block(site);
      lock.lock();
    }
  }
  const auto failure = failures_.find(number);
  if (failure == failures_.end()) return;
  const std::string call_name = failure->second;
  failures_.erase(failure);
  throw PeerError(call_name);
}

bool Lane::finished(int64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ >= number;
}

bool Lane::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return !running_ && queue_.empty();
}

}  // namespace symm_cp
