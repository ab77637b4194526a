// One allocation as a group sees it: every rank's data, signal pad and control page.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "channel/wait.h"
#include "memory/rank_cores.h"
#include "rendezvous/peers.h"

namespace symm_cp {

// The first page of a rank's control segment; the signal pad follows it.
struct ControlPage {
  static constexpr size_t kBytes = 4096;
  Word sleepers;  // processes asleep on a word that this rank owns
  Word closed;    // 1: this rank has closed the memory and sends no more signals
  alignas(64) CoreRecord cores;
};
static_assert(sizeof(ControlPage) <= ControlPage::kBytes);

class Mapping {
 public:
  // Collective over `peers`: exchanges `block` (this rank's allocation) and a fresh control segment
  // with a pad of `pad_bytes`. Throws PeerError on every rank, naming the ranks and both values,
  // when ranks disagree on sizes or on the purpose of the rendezvous. When a rank cannot allocate
  // or map the memory, it throws its own error and the others throw PeerError. `sequence`
  // identifies the mapping on all ranks.
  Mapping(std::shared_ptr<Peers> peers, const Segment& block, size_t block_bytes, size_t pad_bytes,
          int64_t sequence, const Rendezvous& rendezvous);

  int rank() const { return peers_->rank(); }
  int world_size() const { return peers_->world_size(); }
  const std::shared_ptr<Peers>& peers() const { return peers_; }
  const std::vector<void*>& data() const { return data_; }
  const std::vector<void*>& pads() const { return pads_; }
  size_t block_bytes() const { return block_bytes_; }
  size_t pad_bytes() const { return pad_bytes_; }
  // The number of the rendezvous of tensors that made this mapping, identical on every rank.
  int64_t sequence() const { return sequence_; }
  ControlPage& control(int rank) const {
    return *reinterpret_cast<ControlPage*>(static_cast<char*>(pads_[rank]) - ControlPage::kBytes);
  }

  // The cores of the ranks, for a Team.
  Cores& cores() const { return cores_; }

  // Reports to the peers that this rank sends no more signals here.
  void close();
  // Throws when `peer` cannot signal any more, because it died or has closed the memory, or when
  // the wait has expired. `call_name` names the waiting call, which says once that it waits.
  void throw_if_peer_lost(int peer, bool expired, WaitBudget& budget,
                          const std::string& call_name) const;

  // Signal-pad protocol of torch: a word is 0, or 1 between a put and the wait that consumes it.
  // The word of channel c that rank s raises at rank d is pad d's word c * world_size + s. Legal
  // pattern: each put on (channel, source, destination) is followed by one wait there.
  void put_signal(int destination, int channel, int64_t timeout_ms);
  void wait_signal(int source, int channel, int64_t timeout_ms);
  void barrier(int channel, int64_t timeout_ms);

  // One-sided signals, up to the time-out of the group. The first kind of signal is a 64-bit number
  // in a rank's memory, such as the number at the end of its pad. A rank that sees the number also
  // sees all earlier writes of the rank that put it there. `source` may be -1: any rank.
  void put_number(int owner, int64_t* number, int64_t value);
  void await_number(int64_t* number, int source, const char* op,
                    const std::function<bool(int64_t)>& ready);
  int64_t* number_of(int owner) const;
  // The second kind of signal is counted for each source; each wait consumes one.
  void count_signal(int destination);
  void take_signal(int source, const char* op);

 private:
  Word* counter(int owner, int source) const;
  void map_peers(const Segment& block, std::vector<Received>& received);
  Word* pad_word(int owner, int source, int channel, const char* op) const;
  WaitBudget budget_of(int64_t timeout_ms) const;
  void put(int destination, int channel, WaitBudget& budget, const char* op);
  void await(int source, int channel, WaitBudget& budget, const char* op);

  std::shared_ptr<Peers> peers_;
  size_t block_bytes_;
  size_t pad_bytes_;
  int64_t sequence_;
  int spins_;
  Segment control_;
  std::vector<Segment> remote_;  // keeps peers' memory mapped
  std::vector<void*> data_;
  std::vector<void*> pads_;
  mutable RankCores cores_;  // mutable: changes the ranks' records, not the mapping
};

// Defined in symmetric_memory.cpp, which has torch's groups and tensors:

// Finds the mapping of this process's allocation that holds `address`, for a group or its peers;
// null when the address is not symmetric memory, or not rendezvoused with that group.
std::shared_ptr<Mapping> find_mapping(const void* address, const std::string& group);
std::shared_ptr<Mapping> find_mapping(const void* address, const Peers& peers);

// The offset of an address in its allocation; nullopt outside of symmetric memory.
std::optional<size_t> symmetric_offset(const void* address);
// Finds the mapping for one-sided operations, which name no group: the mapping of the group of all
// ranks, or the only mapping; null if there is none. `address` is in symmetric memory.
std::shared_ptr<Mapping> find_mapping(const void* address);

// Finds the mapping that the `sequence`-th rendezvous of these peers made; null when it was freed.
std::shared_ptr<Mapping> find_mapping(const Peers& peers, int64_t sequence);

// A place in the signal pad of an allocation, the same on each rank.
struct PadPlace {
  std::shared_ptr<Mapping> mapping;
  size_t offset;
};

// The signal pad, of any rank, that contains an address.
std::optional<PadPlace> find_pad(const void* address);

// Returns the peers of a group. Collective at the first call for a group; see Peers.
std::shared_ptr<Peers> peers_of(const std::string& group, const Rendezvous& rendezvous);
// Refuses to take part in a rendezvous of a group whose peers this rank may not have met yet.
// `other`: see Workspace::fail. Not collective.
void refuse_peers(const std::string& group, const std::string& key, const std::string& reason,
                  const CallSite* other = nullptr);
// Throws when a peer has refused, by `refuse_peers`, to take part in this call or a later one.
void check_refused_peers(const std::string& group, const Rendezvous& rendezvous, int peer);
// The time-out of a group's ops, unless the user chose another.
std::chrono::milliseconds timeout_of(const std::string& group);

// The time-out of waits in which no group is named.
std::chrono::milliseconds default_timeout();

// Forgets the groups that were destroyed; their sockets close when their last mapping is freed.
void release_groups();

}  // namespace symm_cp
