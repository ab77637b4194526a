// An exchange under way, in the two halves that a thread or the copy engine may carry out.
#pragma once

#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "channel/channel.h"
#include "exchange/copy.h"
#include "exchange/exchange.h"

namespace symm_cp {

class Workspace;

// The most bytes that the first piece of any rank may take, for `Workspace::begin`.
int64_t slot_bytes_of(const Exchange& exchange, const Loop& loop);
const Loop& loop_of(Group& group, int channel, const Exchange& exchange);

// Owns an exchange, or refers to an exchange that outlives the run.
class HeldExchange {
 public:
  explicit HeldExchange(Exchange&& own) : own_(std::move(own)) {}
  explicit HeldExchange(Exchange& borrowed) : borrowed_(&borrowed) {}

  Exchange& operator*() { return borrowed_ != nullptr ? *borrowed_ : *own_; }
  const Exchange& operator*() const { return borrowed_ != nullptr ? *borrowed_ : *own_; }
  Exchange* operator->() { return &**this; }
  const Exchange* operator->() const { return &**this; }

 private:
  std::optional<Exchange> own_;
  Exchange* borrowed_ = nullptr;
};

class ExchangeRun {
 public:
  // Throws std::invalid_argument if the exchange has more bytes than a call can take; an exchange
  // that has to be completed throws when it begins.
  ExchangeRun(Group& group, int channel, HeldExchange exchange);

  const std::string& call_name() const { return exchange_->call_name; }
  // Whether its inputs and outputs are known.
  bool complete() const { return exchange_->complete == nullptr; }
  int64_t slot_bytes() const { return slot_bytes_; }
  // This rank's number of pieces; after its first waits, the largest of all ranks.
  int64_t pieces() const { return pieces_; }
  // Carries out the whole call of that number.
  void run(Workspace& workspace, int64_t number);
  // These do the same in parts. `publish` hands the first piece to the peers and does not wait.
  Call begin(Workspace& workspace, int64_t number);
  void publish(Channel& channel, Call& call);
  void finish(Channel& channel, Call& call);

 private:
  // Sets all that depends on the sizes of inputs and outputs.
  void measure();
  bool gives_alike() const;
  void announce(Channel& channel, Call& call);
  void compare_sizes(Channel& channel, int peer, const Call& call);
  void steps(Channel& channel, Call& call, int64_t piece, size_t first, size_t last);
  // Returns the bytes that were moved.
  int64_t step(Channel& channel, Call& call, const Command& step, int64_t piece);
  int64_t copy(Channel& channel, const Call& call, const Command& step, int64_t piece);
  // Consecutive copies of boxes form one pass: the steps from `first` to before `last`.
  size_t end_of_pass(size_t at, size_t last) const;
  int64_t copy_pass(Channel& channel, const Call& call, size_t first, size_t last, int64_t piece);
  int64_t copy_boxes(Channel& channel, const Call& call, size_t first, size_t last, int64_t piece,
                     bool past_caches);
  std::vector<PlaneCopy> copies_of(Channel& channel, const Call& call, const Command& step,
                                   int64_t piece, bool past_caches);
  // Calls `store(past_caches)`, which writes about that many bytes to a place and returns how many.
  template <class Store>
  int64_t stored(Channel& channel, const Place& to, int64_t bytes, const Store& store);
  // The same for the result: all its stores use the same method, and are timed together.
  template <class Store>
  int64_t stored_result(const Store& store);
  int64_t reduce_all(Channel& channel, const Call& call, const Command& step, int64_t piece);
  // Makes the handler give data to a peer.
  int64_t produce(Channel& channel, const Call& call, int peer);
  // Makes the handler work, or take a peer's data.
  int64_t consume(Channel& channel, const Call& call, int peer);
  // Where a piece of a place begins; sets `left` to its bytes, if this rank gives or takes them.
  char* address(Channel& channel, const Call& call, const Place& place, int64_t piece,
                int64_t* left);
  // This rank's input or output there; null for other memory.
  const Extent* extent_of(const Place& place) const;

  HeldExchange exchange_;
  const Loop* loop_;
  int world_size_;
  int rank_;
  int64_t slot_bytes_;
  int64_t result_bytes_ = 0;
  bool past_caches_ = false;  // how the result is stored, and for how long so far
  std::chrono::steady_clock::duration storing_{};
  int64_t room_ = 0;  // the bytes of a part in a piece
  int64_t pieces_ = 1;
  std::vector<const void*> sources_;
};

}  // namespace symm_cp
