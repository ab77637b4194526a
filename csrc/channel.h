// The memory of one channel of a group, the calls that follow each other there, and how the native
// steps of a schedule are carried out.
//
// A call that fails on a rank is, for its peers, a call that never was. The rank marks it as failed
// and raises all its flags to the number of the call, so that nobody waits for it; a peer looks at
// the mark before it uses data of the call and once more when it has used it. Before its next call
// the rank waits until every peer has come to the call that failed: then nobody reads what it left
// in the slots. Model: tests/model/protocol.pml.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "board.h"
#include "error.h"
#include "mapping.h"

namespace symm_cp {

// Where a step's bytes are. The offsets within a workspace come from memory.py.
enum class Space : int32_t {
  kOperand = 0,  // an address given with the call: operands[index]
  kSlot = 1,     // the workspace slot of rank `index` in this call
  kShard = 2,    // the shard that rank `index` published in this call: its slot, or in place
};

struct Reference {
  Space space;
  int32_t index;
  int64_t offset;
};

enum class Kind : int32_t {
  kCopy = 0,
  kSignal = 1,
  kWait = 2,
  kReduce = 3,
  kPublish = 4,
  kVerify = 5,  // the last step of a call: none of the peers has failed it meanwhile
};

// Mirrored by runtime/cpu.py. `bytes` is per row; rows are `pitch` bytes apart.
struct Command {
  Kind kind;
  int32_t peer;    // signal: to; wait: from
  int32_t flag;    // which flag of the pair of ranks
  int32_t lag;     // wait: calls ago
  Reference to;    // copy, reduce
  Reference from;  // copy; publish: the shard when it is in place
  int64_t bytes;   // copy, reduce
  int64_t rows;
  int64_t to_pitch;
  int64_t from_pitch;
  int32_t dtype;         // reduce
  int32_t mean;          // reduce; publish: 1 when the shard is in place
  int32_t first_source;  // reduce: its sources are references[first_source ...]
  int32_t sources;
};
static_assert(sizeof(Command) == 96);

// What a rank says of its call before it signals that its shard is ready. Peers compare it, so
// ranks that disagree on the op, dtype, shape or place raise instead of mixing their bytes.
enum class Place : uint32_t {
  kPlain = 0,
  kInPlace = 1,  // the shard is read from the caller's symmetric tensor
  kMoves = 2,    // the call needs larger slots: the ranks meet to make new memory
};
struct Record {
  static constexpr size_t kWhat = 104;
  Word epoch;
  Word failed;  // the call failed after this was written
  Place place;
  uint32_t reserved;
  int64_t sequence;  // in place: which rendezvous made the memory,
  int64_t offset;    // and where in it the shard begins
  char what[kWhat];
};
static_assert(sizeof(Record) == 136 && sizeof(Record) <= 192);

// Why a call failed on a rank. There is room for the last few: the mark itself is in the record.
struct Failure {
  Word epoch;
  int32_t other_channel;  // ranks that disagree have also given up this call of another channel
  int64_t other_number;   // (0: none), so that all go on with the same numbers
  char cause[240];
};
static_assert(sizeof(Failure) == 256);
inline constexpr int64_t kFailures = 8;

// The names of the flags between ranks, in the order of memory.py.
inline constexpr const char* kFlagNames[] = {"ready", "reduced", "taken", "done"};
inline constexpr int64_t kFlagBytes = 64;  // memory.py: a cache line for each

// Whether a flag that shows `seen` was raised to `epoch`. Epochs stay below 2^31 (memory.py), so
// that the difference tells which is later.
inline bool reached(uint32_t seen, uint32_t epoch) {
  return static_cast<int32_t>(seen - epoch) >= 0;
}

struct Layout {
  int64_t flags;  // flag f of writer w: flags + (f * world_size + w) * 64
  int64_t flag_count;
  int64_t records;  // record of slot s: records + s * kRecordBytes; the failures follow
  int64_t slots;
  int64_t slot_bytes;
  int64_t slot_count;
};
inline constexpr int64_t kRecordBytes = 192;

// A call under way on a rank.
struct Call {
  int64_t number;    // of the calls of the channel, from 1
  uint32_t epoch;    // of those that this memory has seen, from 1
  std::string what;  // names it in errors and to the peers
  Place place = Place::kPlain;
  WaitBudget budget;
};

class Group;

class Channel {
 public:
  Channel(Group& group, int index, std::shared_ptr<Mapping> mapping, Layout layout);

  // Begins a call: after one that failed, waits until all peers have come to that one.
  void begin(Call& call);
  // Whether `begin` would wait.
  bool in_debt() const { return debt_ != 0; }
  // Carries out native steps in order in the calling thread. Throws PeerError; the caller then
  // calls `fail`.
  void run(const Command* commands, int count, const Reference* references, void* const* operands,
           Call& call);
  // Ends a call of this rank, which may not have begun: peers that wait for it throw `cause`.
  void fail(uint32_t epoch, const std::string& cause, const CallSite* other = nullptr);
  // Waits until all ranks are at this call and need larger memory for it.
  void meet(Call& call);

  // Address of the shard of `peer` in this call; only after its ready flag was waited for.
  void* shard_of(int peer, const Call& call);
  void* slot(int rank, uint32_t epoch) const;
  const Mapping& mapping() const { return *mapping_; }
  const Layout& layout() const { return layout_; }
  // No peer waits for this rank here any more, or it hears that it does so for nothing.
  void close() { mapping_->close(); }

 private:
  Word* flag_word(int owner, int writer, int flag) const;
  Record& record(int rank, uint32_t epoch) const;
  Failure& failure(int rank, uint32_t epoch) const;
  bool entered(int peer, uint32_t epoch) const;
  // Raises the flag at `peer`: publishes all earlier writes of this thread to it.
  void signal(int peer, int flag, uint32_t epoch);
  // Returns once `peer` has raised its flag here `lag` calls ago - or throws, naming the step.
  void wait(int peer, int flag, int lag, Call& call);
  template <class Ready>
  void wait_for(Word* word, int peer, Call& call, Ready ready, const std::string& awaited);
  // Writes this call's record; `shard` is null unless the shard is read in place.
  void announce(Call& call, const void* shard);
  // Throws unless the peer's record is of this call, and the peer has not failed it.
  void verify(int peer, const Call& call);
  [[noreturn]] void throw_failure(int peer, const Call& call);
  void* resolve(const Reference& reference, void* const* operands, const Call& call);
  void run_one(const Command& command, const Reference* references, void* const* operands,
               Call& call);
  void reduce_rows(const Command& command, const Reference* references, void* const* operands,
                   const Call& call);
  void copy_rows(const Command& command, void* const* operands, const Call& call);

  Group& group_;
  int index_;
  std::shared_ptr<Mapping> mapping_;
  Layout layout_;
  int spins_;
  uint32_t debt_ = 0;  // the last call that this rank failed, until its peers have come to it
  std::map<int64_t, std::weak_ptr<Mapping>> in_place_;
};

}  // namespace symm_cp
