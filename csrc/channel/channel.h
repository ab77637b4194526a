// The memory of one channel of a group. Its calls run one after the other, as steps of a schedule.
//
// When a call fails on a rank, its peers fail it, too. The rank marks the call as failed and raises
// all its flags to the call's epoch, so that no peer waits for it; a peer checks the mark before it
// uses data of the call, and again afterwards. Before its next call the rank waits until every peer
// has entered the failed one: then no peer still reads the data that it left in the slots. Models:
// tests/model/protocol.pml and failures.pml.
//
// A rank may have missed a call that its peers made and aborted: from then on, its call numbers
// belong to different calls on the peers. So ranks on which a call failed compare their next calls
// and the calls that failed before. A rank whose next call has already failed on a peer is behind,
// and fails that call, too; the other ranks' calls take the next number. Failures before a
// successful call of the other channel do not count: the ranks were in step since. Model:
// tests/model/agreement.pml.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "channel/board.h"
#include "channel/wire.h"
#include "memory/mapping.h"
#include "memory/slot_stores.h"

namespace symm_cp {

// A call under way on a rank.
struct Call {
  int64_t number;         // of the calls of the channel, from 1
  uint32_t epoch;         // of the calls on this memory, from 1
  std::string call_name;  // shown in errors, and compared by the peers
  DataPlace place = DataPlace::kSlot;
  WaitBudget budget;
  uint32_t pieces = 1;  // how many this rank gives or takes
  uint64_t digest = 0;  // of the name, see digest_of
  int64_t bytes = 0;    // given to every rank
  int64_t in_step = 0;  // see Group::in_step
};

// FNV-1a over 8-byte words, then folded: hashing byte by byte would take 0.1 us in every call.
inline uint64_t digest_of(std::string_view text) {
  uint64_t hash = 14695981039346656037u;
  while (!text.empty()) {
    uint64_t word = 0;
    const size_t taken = std::min(sizeof(word), text.size());
    std::memcpy(&word, text.data(), taken);
    hash = (hash ^ word) * 1099511628211u;
    hash ^= hash >> 32;
    text.remove_prefix(taken);
  }
  return hash;
}

class Group;

class Channel {
 public:
  Channel(Group& group, int index, std::shared_ptr<Mapping> mapping, WorkspaceLayout layout);

  // Begins a call. After a failed call, waits until all peers have entered that call, and agrees
  // with them on the next call. Returns false if this rank's call must take the next number.
  // `movable`: whether it can.
  bool begin(Call& call, bool movable);
  // Whether `begin` has to wait for the peers to enter a failed call.
  bool has_failed_call() const { return failed_epoch_ != 0; }
  // Fails a call of this rank, begun or not: peers that wait for it throw `cause`.
  void fail(uint32_t epoch, const std::string& cause, const CallSite* other = nullptr);
  // Waits until all ranks are at this call and need larger memory for it.
  void agree_to_replace(Call& call);
  // Throws if the peer has failed this call.
  void throw_if_failed(int peer, const Call& call);

  // The steps that exchange_run.cpp consists of. They throw PeerError; the caller then calls
  // `fail`.

  // Writes this call's record; `shard` is null unless the shard is read in place.
  void announce(Call& call, const void* shard);
  // Raises the flag at `peer`: publishes all earlier writes of this thread to it.
  void signal(int peer, int flag, const Call& call, uint32_t piece = 0) {
    raise(peer, flag, ticket(call.epoch, piece));
  }
  // Returns once `peer` has raised its flag here for this piece of the call; or throws, naming the
  // step.
  void wait(int peer, int flag, Call& call, uint32_t piece = 0);
  // Throws unless all peers are in this call, and none has failed it: data read in place or in
  // slots was intact unless its owner left the call meanwhile.
  void verify_all(const Call& call);
  // The number of a peer's pieces in this call; valid only after a wait for a flag of the call.
  uint32_t pieces_of(int peer, const Call& call) const { return record(peer, call.epoch).pieces; }
  // The bytes that a peer gives to every rank; see `pieces_of`.
  int64_t bytes_of(int peer, const Call& call) const { return record(peer, call.epoch).bytes; }
  // The bytes that a rank gives to each rank in this call, which the rank writes before `announce`.
  int64_t* sizes_of(int rank, const Call& call) const;

  // Address of the shard of `peer` in this call; valid only after a wait for its ready flag.
  void* shard_of(int peer, const Call& call);
  void* slot(int rank, uint32_t epoch) const;
  SlotStores& slot_stores() { return slot_stores_; }
  ResultStores& result_stores() { return result_stores_; }
  const Mapping& mapping() const { return *mapping_; }
  const WorkspaceLayout& layout() const { return layout_; }
  // Reports to the peers that this rank will send no more signals here; waiting peers throw.
  void close() { mapping_->close(); }

 private:
  Word* flag_word(int owner, int writer, int flag) const;
  Record& record(int rank, uint32_t epoch) const;
  Failure& failure(int rank, uint32_t epoch) const;
  bool entered(int peer, uint32_t epoch) const;
  void forget_failures_before(const Call& call);
  void wait_for_failed_call(Call& call);
  // False when the call must take the next number.
  bool agree_on_call(Call& call, bool movable);
  std::vector<std::optional<Standing>> standings(Call& call);
  // Throws when a wait for the peer cannot end.
  void check_wait(int peer, Call& call, const std::string& awaited, bool expired);
  void raise(int peer, int flag, uint32_t value);
  // Whether the peer's last call began on this thread's processor. While this thread spins or
  // yields there, the kernel sees two processes that run and moves neither; a thread that sleeps is
  // woken on an idle processor.
  bool shares_processor(int peer) const;
  template <class Ready, class Awaited>
  void wait_for(Word* word, int peer, Call& call, Ready ready, Awaited awaited);
  // Throws unless the peer's record is of this call, and the peer has not failed it.
  void verify(int peer, const Call& call);
  [[noreturn]] void throw_failure(int peer, const Call& call);

  Group& group_;
  int index_;
  std::shared_ptr<Mapping> mapping_;
  WorkspaceLayout layout_;
  int spins_;
  // The last call that this rank failed, until its peers have entered it.
  uint32_t failed_epoch_ = 0;
  uint32_t begun_epoch_ = 0;                          // of the call that began last
  uint64_t digest_ = 0;                               // its digest
  int64_t in_step_ = 0;                               // see Call; of the same call
  std::array<uint64_t, Standing::kFailed> failed_{};  // see Standing
  std::array<int64_t, Standing::kFailed> failed_in_step_{};
  int64_t reach_ = -1;  // see Standing
  std::map<int64_t, std::weak_ptr<Mapping>> in_place_;
  SlotStores slot_stores_;
  ResultStores result_stores_;
};

}  // namespace symm_cp
