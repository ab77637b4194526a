// Asynchronous collectives as torch sees them: works, and futures that need no waiter.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/profiler_event.h"
#include "exchange/exchange.h"
#include "messages/messages.h"

namespace symm_cp {

class Group;

// torch gave reduce_scatter_tensor_coalesced a type of its own after 2.11.
template <class Type>
constexpr auto coalesced_scatter_type(int) -> decltype(Type::REDUCE_SCATTER_TENSOR_COALESCED) {
  return Type::REDUCE_SCATTER_TENSOR_COALESCED;
}
template <class Type>
constexpr Type coalesced_scatter_type(long) {
  return Type::_REDUCE_SCATTER_BASE;
}
inline constexpr c10d::OpType kCoalescedScatter = coalesced_scatter_type<c10d::OpType>(0);

// The exchanges of one call of a collective, and the tensors that it needs until it has ended.
struct Collective {
  const char* op = "";
  std::vector<Exchange> exchanges;
  std::vector<at::Tensor> kept;                            // their memory is read or written
  std::vector<std::pair<at::Tensor, at::Tensor>> results;  // at the end: copies second to first
  std::vector<at::Tensor> outputs;                         // the call's, in torch's order
  std::function<void()> conclude;        // at the end: processes the received data
  std::shared_ptr<ProfilerEvent> event;  // null unless a profiler observes

  bool delivers() const { return !results.empty() || conclude; }
  // Writes the results that are not in the caller's tensors yet.
  void deliver();
  // Begins the event "symm_cp:<op>" in torch's profiler, if an observer is active. The event ends
  // with this object, or with the `Ending` made from it.
  void begin_event(at::TensorList inputs);
};

// The end of a collective in the background: the thread that carries out its last exchange ends it.
// Holds no reference to the group, because a group's thread must not be its last owner.
class Ending {
 public:
  // `exchanges`: the number of exchanges to wait for.
  explicit Ending(Collective collective, size_t exchanges = 0);

  // Notes that an exchange ended; an empty `failure` means success. Two threads may call this at
  // once. The failure with the smallest index counts, as it may have caused the later ones.
  void exchange_ended(const std::string& failure, size_t index = 0);
  // Whether the collective has ended. If so, this and `await` end the profiler's event.
  bool ended() const;
  // Waits until it has ended, soon after its last exchange. Returns false after `limit`.
  bool await(std::chrono::milliseconds limit);
  // Why it failed; empty on success. Call this only after it has ended.
  std::string failure() const;
  // Whether there is something to do at the end: results to deliver, an event to end.
  bool has_work() const { return has_work_; }
  const std::vector<at::Tensor>& outputs() const { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> future();

 private:
  static void settle(c10::ivalue::Future& future, const std::vector<at::Tensor>& outputs,
                     const std::string& failure);

  Collective collective_;  // until it has ended
  std::shared_ptr<ProfilerEvent> event_;
  std::vector<at::Tensor> outputs_;
  bool has_work_;
  mutable std::mutex mutex_;
  std::condition_variable end_;
  size_t remaining_;
  bool ended_ = false;
  std::string failure_;
  size_t failed_index_ = SIZE_MAX;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// The common part of all works of the backend.
class BackendWork : public c10d::Work {
 public:
  BackendWork(c10d::OpType type, std::shared_ptr<Ending> ending, uint64_t sequence_number)
      : Work(-1, type), ending_(std::move(ending)), sequence_number_(sequence_number) {}
  // Ends the profiler's event if the caller waited for the future only.
  ~BackendWork() override { ending_->ended(); }

  std::vector<at::Tensor> result() override { return ending_->outputs(); }
  void synchronize() override { wait(); }
  uint64_t getSequencenumber() const override { return sequence_number_; }

 protected:
  std::shared_ptr<Ending> ending_;

 private:
  uint64_t sequence_number_;
};

// A send or a receive.
class MessageWork : public BackendWork {
 public:
  // `limit`: how long `wait` waits for the peer.
  MessageWork(c10d::OpType type, Delivery delivery, std::shared_ptr<Ending> ending,
              std::chrono::milliseconds limit, uint64_t sequence_number);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  // Links `ending_` to the end of the delivery; until then `ending_` has nothing to do.
  void connect();

  Delivery delivery_;
  std::once_flag connected_once_;
  std::atomic<bool> connected_{false};
  std::chrono::milliseconds limit_;
};

class CollectiveWork : public BackendWork {
 public:
  // `last`: the number of the last exchange on the group's lane. Null `group`: it has ended.
  CollectiveWork(c10d::OpType type, std::shared_ptr<Group> group, std::shared_ptr<Ending> ending,
                 int64_t last, uint64_t sequence_number);
  ~CollectiveWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  // Wakes the engine, which ends it.
  void wake();
  void throw_if_failed() const;

  std::shared_ptr<Group> group_;
  int64_t last_;
};

}  // namespace symm_cp
