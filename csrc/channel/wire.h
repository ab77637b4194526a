// What the native part shares with Python: the types that cross the C functions, and the layout of
// a workspace. symm_cp/native/declared.py reads this file, so nothing of it is written twice; it
// knows enumerations, structs of plain fields, and constants that are literals or lists of texts.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace symm_cp {

// A word in shared memory that other processes read and write.
using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free);

// The memory of a step: an operand of the call, a rank's slot or, in loops, this rank's input or
// output, or a rank's input in symmetric memory.
enum class Buffer : int32_t { kOperand, kSlot, kInput, kOutput, kSymmetric };

// Where a step's bytes begin. Streams know the sizes of a call, and give the number of the operand,
// or the rank, and an offset in bytes. Loops serve calls of any size, and give the rank, and a part
// of the buffer (-1: all of it).
struct Place {
  Buffer buffer;
  int32_t index;
  int32_t chunk;
  int64_t offset;
};

// The steps of programs: of loops on CPU (exchange/exchange.h) and of streams (cuda/streams.h),
// which refuse each other's. Loops: kPublish writes the record of this rank's call; kProduce makes
// the caller write this rank's data for `peer`, and kConsume read that of `peer`, or work. Streams:
// kRecord records an event on the lane, kWaitEvent makes the lane wait for one; kArrived writes the
// epoch to this rank's own flag `flag` for writer `peer`, which a kernel polls.
enum class Kind : int32_t {
  kCopy,
  kSignal,
  kWait,
  kReduce,
  kPublish,
  kProduce,
  kConsume,
  kRecord,
  kWaitEvent,
  kArrived
};

// Only the fields of its kind are read.
struct Command {
  Kind kind;
  int32_t lane;     // streams
  int32_t peer;     // signal, produce: to; wait, consume: from
  int32_t flag;     // signal, wait, arrived: index in kFlagNames
  int32_t lag;      // wait: for the signal of that many calls ago
  int32_t event;    // record, wait for an event
  int32_t alone;    // copy: depends on the copy before it and must not share its batch
  int32_t remote;   // copy: reads or writes the memory of a peer
  Place to;         // copy, reduce, produce
  Place source;     // copy
  int32_t sources;  // reduce: how many, and the first of them in the program's sources
  int32_t first_source;
  // Copies on streams: bytes of a row, and how far apart the rows begin.
  int64_t bytes;
  int64_t rows;
  int64_t to_pitch;
  int64_t from_pitch;
};

// A step that was carried out. Times are of the monotonic clock, which all processes of a host
// share.
struct TraceEvent {
  Command command;
  int64_t start;  // nanoseconds
  int64_t end;
  uint32_t epoch;
  int32_t engine;  // 1: on the copy engine; 0: in a calling thread
  char call_name[40];
};

// Element types of native reductions, numbered as torch numbers its scalar types.
enum class DType : int32_t {
  kUint8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kFloat32,
  kFloat64,
  kComplex64 = 9,
  kComplex128,
  kBool,
  kBfloat16 = 15
};

// How native reductions combine elements, numbered as c10d numbers its operators.
enum class ReduceOp : int32_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor };

// The collectives of exchange.h. kTwoShotAllReduce is an all-reduce whose inputs and outputs are
// lists of the parts that the ranks reduce. In a kJoiningAllToAll a rank takes from all at once; in
// a kHandledAllToAll the caller writes and reads the slots.
enum class ExchangeKind : int32_t {
  kAllGather,
  kAllReduce,
  kTwoShotAllReduce,
  kReduceScatter,
  kAllToAll,
  kJoiningAllToAll,
  kHandledAllToAll
};

// The loops of a kind of exchange, by where the input lies; not every kind has both.
enum class LoopKind : int32_t { kPlain, kInPlace };
inline constexpr int kLoopKinds = 2;

// Elements of a tensor that travel in one piece of an exchange with strides: `planes` times `rows`
// runs of `row` bytes. They lie in the slot without gaps.
struct Box {
  int32_t peer;     // gives or takes the elements
  int32_t piece;    // in which they travel
  int64_t operand;  // number of the tensor
  int64_t offset;   // where they begin in the tensor, in bytes
  int64_t in_slot;  // and in the peers' part of the slot
  int64_t planes;
  int64_t plane_pitch;
  int64_t rows;
  int64_t pitch;
  int64_t row;
};

// The channels of a group.
enum ChannelIndex : int { kSync = 0, kAsync = 1, kChannels = 2 };
inline constexpr const char* kChannelNames[] = {"sync", "async"};

// The bytes of a piece of an exchange, over all parts: small enough that both halves of all ranks'
// slots fit into the caches. Its parts begin at multiples of kPartAlignment.
inline constexpr int64_t kPieceBytes = 524288;
inline constexpr int64_t kPartAlignment = 64;

// Flags of a workspace. A rank raises the first kFlags at a peer; the others exist on devices only:
// "arrived", for a rank's own polling kernel; "gave up", of a rank that has aborted the call;
// "sent", the words that streams copy to peers' flags, see sent_offset; and "ready in place".
inline constexpr const char* kFlagNames[] = {
    "ready", "partial", "reduced", "taken", "done", "arrived", "gave up", "sent", "ready in place"};
inline constexpr int kFlags = 5;
inline constexpr int kDeviceFlags = 9;
inline constexpr int kReadyFlag = 0;
inline constexpr int kPartialFlag = 1;
inline constexpr int kGaveUpFlag = 6;
inline constexpr int kSentFlag = 7;
inline constexpr int kReadyInPlaceFlag = 8;
inline constexpr int64_t kFlagBytes = 64;  // a cache line for each flag and writer

// Offset of the flag that `writer` raises from the first flag of its owner.
constexpr int64_t flag_offset(int flag, int writer, int world_size) {
  return (int64_t{flag} * world_size + writer) * kFlagBytes;
}

// Streams raise a peer's flag by copying a word of this rank to it, as they cannot write there
// themselves (CUDA 13.1 and later). Each lane has a word, which it sets to the epoch of its call
// before it signals; a word that always holds 1, for graphs, and the mark of an aborted rank
// follow.
inline constexpr int kLanes = 4;
inline constexpr int kSecondLane = 3;  // of kernels
inline constexpr int kConstantOne = kLanes;
inline constexpr int kMark = kLanes + 1;

// Offset of the word of a lane, or of the constant, from the first flag.
constexpr int64_t sent_offset(int word, int rank, int world_size) {
  return flag_offset(kSentFlag, rank, world_size) + word * int64_t{sizeof(Word)};
}

// The last call that a workspace takes; the next call announces that the workspace is replaced. A
// wait compares 32-bit numbers by their difference, so that 2^31 calls later a flag that few ops
// raise would look raised (tests/model/protocol.pml, WRAP).
inline constexpr int64_t kLastEpoch = 0x7ffffffe;

// On CPU the value of a flag is a call and a piece of it; pieces are numbered from 0 in each call.
inline constexpr int kPieceBits = 14;
inline constexpr int64_t kMaxPieces = int64_t{1} << kPieceBits;
inline constexpr int64_t kLastCpuEpoch = 0x1fffe;
static_assert(kLastCpuEpoch == (int64_t{1} << (31 - kPieceBits)) - 2);

constexpr uint32_t ticket(uint32_t epoch, uint32_t piece) { return epoch << kPieceBits | piece; }

// Whether a flag that shows `seen` was raised to `ticket`: tickets stay below 2^31, so the
// difference tells which is later.
inline bool reached(uint32_t seen, uint32_t ticket) {
  return static_cast<int32_t>(seen - ticket) >= 0;
}

// The place of the data of a call: in the slot, in the caller's symmetric tensor, or nowhere yet,
// because the ranks replace the workspace first.
enum class DataPlace : uint32_t { kSlot = 0, kInPlace = 1, kReplaced = 2 };

// The bytes of a call's name that peers compare.
inline constexpr size_t kMaxCallName = 103;

// The entry that a rank writes for its call before it signals that its shard is ready. Peers
// compare it, so ranks that disagree on the op, dtype, shape or place raise instead of mixing their
// bytes.
struct Record {
  Word epoch;
  Word failed;  // the call failed after this was written
  DataPlace place;
  uint32_t pieces;   // number that this rank gives or takes
  int64_t sequence;  // in place: which rendezvous made the memory,
  int64_t offset;    // and where in it the shard begins
  // Peers compare the digest, so that they need this cache line only; the name is for errors.
  uint64_t digest;
  int64_t bytes;  // given to every rank
  char call_name[kMaxCallName + 1];
};
inline constexpr int64_t kRecordBytes = 192;  // a multiple of a cache line
static_assert(sizeof(Record) <= kRecordBytes);

// Why a call failed on a rank. There is room for the last kFailures; the mark itself is in the
// record.
struct Failure {
  Word epoch;
  int32_t other_channel;  // ranks that disagree have also given up this call of another channel
  int64_t other_number;   // (0: none), so that all go on with the same numbers
  char cause[240];
};
inline constexpr int64_t kFailures = 8;

// After the failures: for each slot, the number of bytes that this rank gives to each rank, in an
// exchange where these numbers differ.
constexpr int64_t sizes_bytes(int world_size) { return (8 * world_size + 63) / 64 * 64; }

// Parts of a workspace begin on pages; the calls take its slots in turn.
inline constexpr int64_t kPageBytes = 4096;
inline constexpr int64_t kSlots = 2;

// Where the parts of a workspace lie, in bytes from its beginning.
struct WorkspaceLayout {
  int64_t flags;  // see flag_offset
  int64_t flag_count;
  int64_t records;  // one for each slot; the failures follow
  int64_t slots;
  int64_t slot_bytes;
  int64_t slot_count;

  int64_t end() const { return slots + slot_count * slot_bytes; }
  int64_t slot_offset(uint32_t epoch) const { return slots + epoch % slot_count * slot_bytes; }
  int64_t record_offset(uint32_t epoch) const {
    return records + epoch % slot_count * kRecordBytes;
  }
  int64_t sizes_offset(uint32_t epoch, int world_size) const {
    return failure_offset(0) + kFailures * static_cast<int64_t>(sizeof(Failure)) +
           epoch % slot_count * sizes_bytes(world_size);
  }
  int64_t failure_offset(uint32_t epoch) const {
    return records + slot_count * kRecordBytes +
           epoch % kFailures * static_cast<int64_t>(sizeof(Failure));
  }
};

}  // namespace symm_cp
