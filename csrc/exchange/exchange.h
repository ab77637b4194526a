// Collectives without Python: each rank gives bytes, and takes bytes or sums of them.
//
// Plain inputs go through the slot of the call in pieces: the slot has two halves, piece p uses
// half p % 2, and a rank may be one piece ahead of its peers. The steps of a piece are those of a
// registered pattern (symm_cp/schedule/patterns), which Python lowers once for each group; sizes
// and addresses come with the call.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "channel/wire.h"

namespace symm_cp {

class Boxes;
class Group;
class SlotStores;

// Stands for the time-out of the group.
inline constexpr std::chrono::milliseconds kGroupTimeout{0};

// Bytes in memory; none where `bytes` is 0. They are contiguous, or (of kAllGather and kAllToAll
// only) in rows of `row` bytes that begin `pitch` bytes apart.
struct Extent {
  void* data = nullptr;
  int64_t bytes = 0;  // of all rows
  int64_t row = 0;    // 0: contiguous
  int64_t pitch = 0;
  const int64_t* numbers = nullptr;  // of the rows, where they are not 0, 1, 2 and so on
};

// The steps of one piece.
struct Loop {
  std::vector<LoopStep> steps;
  std::vector<Area> sources;  // of reductions
  size_t published = 0;       // the number of steps that hand this rank's data to the peers
  bool parted = false;        // the slot holds a part for each rank
  bool slotted = false;       // data goes through the slot

  // Whether the input is read after this rank's data has been handed over.
  bool reads_input_later() const;
  // Whether peers need later steps of this rank, too: a rank that has begun must then go on.
  bool helps_later() const;
};

// The bytes of a piece, of all parts together: both halves of all ranks' slots fit into the caches.
inline constexpr int64_t kPieceBytes = int64_t{512} << 10;

// What a caller does in a kHandledAllToAll, in this order. Exceptions end the call on all ranks.
class SlotHandler {
 public:
  virtual ~SlotHandler() = default;
  // Writes what this rank gives to a peer, before the peer hears that it is there. Each peer reads
  // the part that belongs to it by what both know; no byte is written twice.
  virtual void give(int peer, char* slot, SlotStores& stores) = 0;
  // Works while the peers write. What it does with this rank's slot, peers must not read.
  virtual void keep() = 0;
  // Reads what a peer gives to this rank, or notes where it is: it stays there until the last one
  // was taken.
  virtual void take(int peer, const char* slot) = 0;
};

struct Exchange {
  ExchangeKind kind;
  std::string call_name;  // shown in errors, and compared by the peers
  // Of kAllGather, kAllReduce: one; of the others: one for each rank. A rank that gives nothing has
  // empty ones (broadcast: kAllGather with one input that is not empty).
  std::vector<Extent> input;
  // Of kAllReduce, kReduceScatter: one; of the others: one for each rank. Empty where a rank takes
  // nothing (gather: kAllGather with outputs on one rank). May be the same memory as the input,
  // where a piece lies at the same address in both.
  std::vector<Extent> output;
  DType dtype = DType::kUint8;
  ReduceOp reduce_op = ReduceOp::kSum;
  // The input lies in symmetric memory that was rendezvoused with the group, on all ranks: peers
  // read it where it is. Not for kAllToAll.
  bool in_place = false;
  // For kHandledAllToAll, which has one piece. Inputs and outputs have sizes only.
  SlotHandler* handler = nullptr;
  // For all-to-alls with strides: the boxes, and the addresses of the tensors. Inputs and outputs
  // have sizes only.
  std::shared_ptr<const Boxes> boxes;
  std::vector<char*> operands;
  // Of all parts together; the same on all ranks. With another size than the usual one there is one
  // piece: a caller that wants all its data to have left its input when `start` returns gives what
  // the largest part of any rank takes, rounded up to kPartAlignment, times the number of parts.
  int64_t piece_bytes = kPieceBytes;
  // How long this rank waits for its peers.
  std::chrono::milliseconds timeout = kGroupTimeout;
  // If an earlier exchange gives the sizes of this one: sets inputs and outputs when the exchanges
  // before it have ended, in the thread that carries it out. Its exceptions end the call on all
  // ranks.
  std::function<void(Exchange&)> complete;
};

// Whether an all-reduce is a kTwoShotAllReduce: then a rank reads less, the less the more ranks
// there are, but waits twice. Where they meet was measured with 3 and 4 ranks on 2 cores.
constexpr bool two_shot(int ranks, int64_t bytes) {
  return ranks > 2 && bytes * (ranks - 1) >= (int64_t{192} << 10);
}

// Returns an all-to-all of boxes, without the addresses of the tensors. `joining`: the data
// from all ranks lies side by side, rather than the data for all ranks.
Exchange exchange_of(std::string call_name, std::shared_ptr<const Boxes> boxes, bool joining);

// Parts of a piece begin at multiples of this.
inline constexpr int64_t kPartAlignment = 64;

// Carries an exchange out in the calling thread. Calls of several threads take turns. Throws
// PeerError and ResourceError, after it has reported them to the peers.
void run(Group& group, Exchange& exchange);
inline void run(Group& group, Exchange&& exchange) { run(group, exchange); }

// Takes why an exchange failed; empty: it succeeded. Runs in the thread that carried it out,
// without a lock, perhaps after a wait for the exchange has returned. Must not throw; may start
// other exchanges but not wait for one.
using Done = std::function<void(const std::string& failure)>;

// Leaves an exchange to the copy engine of the group, behind those started before; never waits for
// a peer. Returns its number, for `group->lane().wait(number)` and `finished(number)`; the memory
// that it names must live until then. What of the input fits into the first piece may be
// overwritten once this has returned only if `published` says so. With `background` false the
// engine is woken only for what peers need of this rank later: else the exchange goes on when a
// thread waits for it.
struct Started {
  int64_t number;
  bool published;
};
Started start(Group& group, Exchange exchange, bool background, Done done = {});
// Whether `start` would begin the exchange before it returns. Under a CallLock of kAsync.
bool starts_at_once(Group& group, const Exchange& exchange);

// Carries an exchange out in the calling thread as `run` does, but in one order with those started:
// it is the same call to the peers whether a rank starts it or runs it.
void run_in_turn(Group& group, Exchange exchange);

// Tells the peers that this rank refuses the call which they may be making now (`channel`: kSync
// for `run`, kAsync for `start`). Never waits.
void refuse(Group& group, int channel, const std::string& reason);

}  // namespace symm_cp
