// Collectives without Python: each rank gives bytes, and takes bytes or sums of them.
//
// Plain inputs go through the slot of the call in pieces: the slot has two halves, piece p uses
// half p % 2, and a rank may be one piece ahead of its peers. The steps of a piece come from a
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

// Bytes in memory; none where `bytes` is 0. They are contiguous, or (for kAllGather and kAllToAll
// only) in rows of `row` bytes that begin `pitch` bytes apart.
struct Extent {
  void* data = nullptr;
  int64_t bytes = 0;  // of all rows
  int64_t row = 0;    // 0: contiguous
  int64_t pitch = 0;
  const int64_t* numbers = nullptr;  // of the rows; null: 0, 1, 2 and so on
};

// The steps of one piece.
struct Loop {
  std::vector<Command> steps;
  std::vector<Place> sources;  // of reductions
  // These follow from the steps:
  size_t published = 0;  // the number of steps that hand this rank's data to the peers
  bool parted = false;   // the slot holds a part for each rank
  bool slotted = false;  // data goes through the slot

  Loop(std::vector<Command> steps, std::vector<Place> sources);
  // Whether the input is read after this rank's data has been handed over.
  bool reads_input_later() const;
  // Whether peers need later steps of this rank, too: a rank that has begun must then go on.
  bool helps_later() const;
};

// The caller's steps in a kHandledAllToAll, in this order. Exceptions end the call on all ranks.
class SlotHandler {
 public:
  virtual ~SlotHandler() = default;
  // Writes this rank's data for a peer, before it is signalled to the peer. Each peer reads its
  // part at the place that both ranks compute; no byte is written twice.
  virtual void give(int peer, char* slot, SlotStores& stores) = 0;
  // Works while the peers write. It may use only parts of this rank's slot that peers do not read.
  virtual void keep() = 0;
  // Reads a peer's data for this rank, or notes its address: the data stays there until the last
  // peer's data was taken.
  virtual void take(int peer, const char* slot) = 0;
};

struct Exchange {
  ExchangeKind kind;
  std::string call_name;  // shown in errors, and compared by the peers
  // kAllGather and kAllReduce have one input, other kinds one for each rank. The inputs of a rank
  // that gives nothing are empty (broadcast: kAllGather with one input that is not empty).
  std::vector<Extent> input;
  // kAllReduce and kReduceScatter have one output, other kinds one for each rank. The outputs of a
  // rank that takes nothing are empty (gather: kAllGather with outputs on one rank). May be the
  // same memory as the input, if a piece lies at the same address in both.
  std::vector<Extent> output;
  DType dtype = DType::kUint8;
  ReduceOp reduce_op = ReduceOp::kSum;
  // The input lies in symmetric memory that was rendezvoused with the group, on all ranks: peers
  // read it there. Not for kAllToAll.
  bool in_place = false;
  // For kHandledAllToAll, which has one piece. Inputs and outputs have sizes only.
  SlotHandler* handler = nullptr;
  // For all-to-alls with strides: the boxes, and the addresses of the tensors. Inputs and outputs
  // have sizes only.
  std::shared_ptr<const Boxes> boxes;
  std::vector<char*> operands;
  // The bytes of a piece, of all parts together; identical on all ranks. With a size other than
  // kPieceBytes there is one piece: if all data must have left the input when `start` returns, set
  // this to the bytes of the largest part of any rank, rounded up to kPartAlignment, times the
  // number of parts.
  int64_t piece_bytes = kPieceBytes;
  // How long this rank waits for its peers.
  std::chrono::milliseconds timeout = kGroupTimeout;
  // Set if an earlier exchange determines this exchange's sizes. It sets the inputs and outputs
  // after all earlier exchanges, in the thread that carries out this one. Its exceptions end the
  // call on all ranks.
  std::function<void(Exchange&)> complete;
};

// Whether an all-reduce is a kTwoShotAllReduce: then a rank waits twice. With more than two ranks
// it reads less; with two, it reads and writes as much as in one shot. The break-even point was
// measured with 3 and 4 ranks on 2 cores.
constexpr bool two_shot(int ranks, int64_t bytes) {
  return ranks > 2 && bytes * (ranks - 1) >= (int64_t{192} << 10);
}

// Returns an all-to-all of boxes, without the addresses of the tensors. `joining`: the data
// from all ranks lies side by side, rather than the data for all ranks.
Exchange exchange_of(std::string call_name, std::shared_ptr<const Boxes> boxes, bool joining);

// Carries an exchange out in the calling thread. Calls of several threads take turns. Throws
// PeerError and ResourceError, after it has reported them to the peers.
void run(Group& group, Exchange& exchange);
inline void run(Group& group, Exchange&& exchange) { run(group, exchange); }

// Called when an exchange ends, with its failure; empty on success. Runs in the thread that carried
// it out, without a lock, perhaps after a wait for the exchange has returned. Must not throw; may
// start other exchanges but not wait for one.
using Done = std::function<void(const std::string& failure)>;

// Queues an exchange on the group's copy engine, behind exchanges started before; never waits for a
// peer. Returns its number, for `group->lane().wait(number)` and `finished(number)`; its memory
// must live until then. If `published`, the caller may overwrite the input's first piece after this
// returns. With `background` false, the engine is woken only for steps that peers need from this
// rank later; without such steps, the exchange goes on when a thread waits for it.
struct Started {
  int64_t number;
  bool published;
};
Started start(Group& group, Exchange exchange, bool background, Done done = {});
// Whether `start` would begin the exchange before it returns. Under a CallLock of kAsync.
bool starts_at_once(Group& group, const Exchange& exchange);

// Carries an exchange out in the calling thread like `run`, but in the same queue as started
// exchanges: to the peers it is the same call whether a rank starts it or runs it.
void run_in_turn(Group& group, Exchange exchange);

// Reports to the peers that this rank refuses the call that they may be making now (`channel`:
// kSync for `run`, kAsync for `start`). Never waits.
void refuse(Group& group, int channel, const std::string& reason);

}  // namespace symm_cp
