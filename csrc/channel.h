// A channel: one workspace of a group, the calls that follow each other on it, and how the native
// steps of a schedule are carried out there.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

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

enum class Kind : int32_t { kCopy = 0, kSignal = 1, kWait = 2, kReduce = 3, kPublish = 4 };

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

// What a rank says of its call before it signals that its shard is ready. Peers compare `what`,
// so ranks that disagree on the op, dtype or shape raise instead of mixing their bytes.
struct Record {
  static constexpr size_t kWhat = 104;
  uint32_t epoch;
  uint32_t in_place;
  int64_t sequence;  // in place: which rendezvous made the memory,
  int64_t offset;    // and where in it the shard begins
  char what[kWhat];
};
static_assert(sizeof(Record) == 128);

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
  int64_t records;  // record of slot s: records + s * sizeof(Record)
  int64_t slots;
  int64_t slot_bytes;
  int64_t slot_count;
};

class Channel {
 public:
  Channel(std::shared_ptr<Mapping> mapping, Layout layout, std::chrono::milliseconds timeout);

  // Carries out native steps in order in the calling thread. Call `epoch` is 1, 2, ... on every
  // rank alike. Throws PeerError; the channel is then aborted, here and, as they notice, at peers.
  void run(const Command* commands, int count, const Reference* references, void* const* operands,
           uint32_t epoch, const char* what);

  // Raises the flag at `peer` to `epoch`: publishes all earlier writes of this thread to it.
  void signal(int peer, int flag, uint32_t epoch);
  // Returns once `peer` has raised its flag here to `epoch` - or throws, naming the step.
  void wait(int peer, int flag, uint32_t epoch, const char* what);
  // Writes this call's record; `shard` is null unless the shard is read in place.
  void announce(uint32_t epoch, const void* shard, const char* what);
  // Address of the shard of `peer` in this call; only after its ready flag was waited for.
  // Throws PeerError when the peer's record differs from `what`.
  void* shard_of(int peer, uint32_t epoch, const char* what);
  void* slot(int rank, uint32_t epoch) const;
  void abort(const std::string& reason) { mapping_->abort(reason); }
  const Mapping& mapping() const { return *mapping_; }

 private:
  Word* flag_word(int owner, int writer, int flag) const;
  Record& record(int rank, uint32_t epoch) const;
  void* resolve(const Reference& reference, void* const* operands, uint32_t epoch,
                const char* what);
  void run_one(const Command& command, const Reference* references, void* const* operands,
               uint32_t epoch, const char* what);
  void reduce_rows(const Command& command, const Reference* references, void* const* operands,
                   uint32_t epoch, const char* what);
  void copy_rows(const Command& command, void* const* operands, uint32_t epoch, const char* what);

  std::shared_ptr<Mapping> mapping_;
  Layout layout_;
  std::chrono::milliseconds timeout_;
  int spins_;
  std::map<int64_t, std::weak_ptr<Mapping>> in_place_;
};

}  // namespace symm_cp
