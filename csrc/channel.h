// The memory of one channel of a group, the calls that follow each other there, and how the native
// steps of a schedule are carried out.
//
// A call that fails on a rank is, for its peers, a call that never was. The rank marks it as failed
// and raises all its flags to the number of the call, so that nobody waits for it; a peer looks at
// the mark before it uses data of the call and once more when it has used it. Before its next call
// the rank waits until every peer has come to the call that failed: then nobody reads what it left
// in the slots. Model: tests/model/protocol.pml.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "board.h"
#include "error.h"
#include "mapping.h"
#include "wire.h"

namespace symm_cp {

// A call under way on a rank.
struct Call {
  int64_t number;    // of the calls of the channel, from 1
  uint32_t epoch;    // of those that this memory has seen, from 1
  std::string what;  // names it in errors and to the peers
  Place place = Place::kSlot;
  WaitBudget budget;
};

class Group;

class Channel {
 public:
  Channel(Group& group, int index, std::shared_ptr<Mapping> mapping, WorkspaceLayout layout);

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
  const WorkspaceLayout& layout() const { return layout_; }
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
  WorkspaceLayout layout_;
  int spins_;
  uint32_t debt_ = 0;  // the last call that this rank failed, until its peers have come to it
  std::map<int64_t, std::weak_ptr<Mapping>> in_place_;
};

}  // namespace symm_cp
