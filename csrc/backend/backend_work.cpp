#include "backend/backend_work.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <thread>
#include <utility>

#include "base/error.h"
#include "base/helper_thread.h"
#include "base/profiler_event.h"
#include "base/python.h"
#include "channel/group.h"

namespace symm_cp {

void Collective::deliver() {
  if (!delivers()) return;
  // Copies bytes only: gradients and versions of tensors are up to the caller's op.
  const at::AutoDispatchBelowADInplaceOrView guard;
  if (conclude) conclude();
  for (auto& [to, from] : results) to.copy_(from);
}

void Collective::begin_event(at::TensorList inputs) { event = ProfilerEvent::begin(op, inputs); }

// --- Ending --------------------------------------------------------------------------------------

Ending::Ending(Collective collective, size_t exchanges)
    : collective_(std::move(collective)),
      event_(std::move(collective_.event)),
      outputs_(collective_.outputs),
      has_work_(collective_.delivers() || event_ != nullptr),
      remaining_(exchanges),
      ended_(exchanges == 0) {}

void Ending::exchange_ended(const std::string& failure, size_t index) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure.empty() && index < failed_index_) {
      failure_ = failure;
      failed_index_ = index;
    }
    if (--remaining_ > 0) return;
  }
  std::string failed_delivery;
  try {
    if (failure_.empty()) collective_.deliver();
  } catch (const std::exception& error) {
    failed_delivery = error.what();
  }
  Collective released;  // freed without the lock
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty()) failure_ = failed_delivery;
    std::swap(released, collective_);
    ended_ = true;
    future = future_;
  }
  end_.notify_all();
  // The future's callbacks may wait for other collectives, which this thread carries out.
  if (future)
    run_in_helper_thread(
        [future, outputs = outputs_, failure = failure_] { settle(*future, outputs, failure); });
}

bool Ending::ended() const {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ended_) return false;
  }
  if (event_) event_->end();
  return true;
}

bool Ending::await(std::chrono::milliseconds limit) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!end_.wait_for(lock, limit, [this] { return ended_; })) return false;
  }
  if (event_) event_->end();
  return true;
}

std::string Ending::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void Ending::settle(c10::ivalue::Future& future, const std::vector<at::Tensor>& outputs,
                    const std::string& failure) {
  if (failure.empty())
    future.markCompleted(c10::IValue(outputs));
  else
    future.setErrorIfNeeded(
        std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, failure)));
}

c10::intrusive_ptr<c10::ivalue::Future> Ending::future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (future_) return future_;
    future = future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (!ended_) return future;
  }
  settle(*future, outputs_, failure_);
  return future;
}

// --- CollectiveWork ------------------------------------------------------------------------------

CollectiveWork::CollectiveWork(c10d::OpType type, std::shared_ptr<Group> group,
                               std::shared_ptr<Ending> ending, int64_t last,
                               uint64_t sequence_number)
    : BackendWork(type, std::move(ending), sequence_number),
      group_(std::move(group)),
      last_(last) {}

CollectiveWork::~CollectiveWork() {
  if (group_ == nullptr || group_.use_count() > 1) return;
  try {
    if (Group::in_engine()) {
      // A callback of a future held the last work of a group; the engine cannot end itself.
      std::thread([group = std::move(group_)] {}).detach();
    } else {
      const WithoutGil without_gil;  // the engine may be about to take Python's lock
      group_.reset();
    }
  } catch (...) {  // the interpreter is ending
  }
}

void CollectiveWork::wake() {
  if (group_ == nullptr) return;
  const WithoutGil without_gil;
  group_->lane().wake();
}

bool CollectiveWork::isCompleted() {
  if (ending_->ended()) return true;
  // A thread that polls is waiting, too, but leaves the transfer to the engine.
  wake();
  return false;
}

bool CollectiveWork::isSuccess() const { return ending_->ended() && ending_->failure().empty(); }

std::exception_ptr CollectiveWork::exception() const {
  try {
    if (ending_->ended()) throw_if_failed();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void CollectiveWork::throw_if_failed() const {
  const std::string failure = ending_->failure();
  if (!failure.empty()) C10_THROW_ERROR(DistBackendError, failure);
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  if (!ending_->ended()) {
    const WithoutGil without_gil;
    if (timeout == kNoTimeout) {
      was_interrupted();  // in an earlier call
      try {
        if (group_ != nullptr) group_->lane().wait(last_);
        while (!ending_->await(std::chrono::milliseconds(50))) throw_if_interrupted();
      } catch (const Interrupted&) {
        return false;  // Python raises the exception of the handler when this call has returned
      } catch (const PeerError&) {
        if (was_interrupted()) return false;  // it carried the exchange out itself
        while (!ending_->await(std::chrono::milliseconds(50)));  // it has the error
      }
    } else {
      wake();
      if (!ending_->await(timeout))
        C10_THROW_ERROR(DistBackendError, "the collective did not end within " +
                                              std::to_string(timeout.count()) + " ms");
    }
  }
  throw_if_failed();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() {
  auto future = ending_->future();
  if (!future->completed()) wake();
  return future;
}

}  // namespace symm_cp
