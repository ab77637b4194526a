// One allocation as a group sees it: every rank's data, signal pad and control page.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "peers.h"
#include "wait.h"

namespace symm_cp {

// The first page of a rank's control segment; the signal pad follows it.
struct ControlPage {
  static constexpr size_t kBytes = 4096;
  Word sleepers;  // processes asleep on a word that this rank owns
  Word aborted;   // 1: this rank gave up; `reason` says why. 2: is about to say it
  char reason[512];
};
static_assert(sizeof(ControlPage) <= ControlPage::kBytes);

class Mapping {
 public:
  // Collective over `peers`: exchanges `block` (this rank's allocation) and a fresh control
  // segment with a pad of `pad_bytes`. Throws PeerError on every rank, naming the ranks and both
  // values, when they disagree on sizes or on which rendezvous of the group this is; and when one
  // of them cannot have or map the memory, which then throws what it met.
  Mapping(std::shared_ptr<Peers> peers, const Segment& block, size_t block_bytes, size_t pad_bytes,
          int64_t sequence);
  // Takes part in a rendezvous without memory: all others throw, and say why.
  static void decline(Peers& peers, int64_t sequence, const std::string& reason);

  int rank() const { return peers_->rank(); }
  int world_size() const { return peers_->world_size(); }
  const std::shared_ptr<Peers>& peers() const { return peers_; }
  const std::vector<void*>& data() const { return data_; }
  const std::vector<void*>& pads() const { return pads_; }
  size_t block_bytes() const { return block_bytes_; }
  size_t pad_bytes() const { return pad_bytes_; }
  // Which rendezvous of the group made this mapping: the same number on every rank.
  int64_t sequence() const { return sequence_; }
  ControlPage& control(int rank) const {
    return *reinterpret_cast<ControlPage*>(static_cast<char*>(pads_[rank]) - ControlPage::kBytes);
  }

  // Tells the peers, now and for good, that this rank will not go on.
  void abort(const std::string& reason);
  // Throws when waiting for `peer` is in vain: it aborted, it died, or the time is over. `what`
  // says what was waited for.
  void check_hope(int peer, bool expired, std::chrono::milliseconds timeout,
                  const std::string& what) const;

  // Signal-pad protocol of torch: a word is 0, or 1 between a put and the wait that consumes it.
  // The word of channel c that rank s raises at rank d is pad d's word c * world_size + s. Legal
  // pattern: each put on (channel, source, destination) is followed by one wait there.
  void put_signal(int destination, int channel, int64_t timeout_ms, const char* op = "put_signal");
  void wait_signal(int source, int channel, int64_t timeout_ms, const char* op = "wait_signal");
  void barrier(int channel, int64_t timeout_ms);

 private:
  void map_peers(const Segment& block, std::vector<Received>& received);
  Word* pad_word(int owner, int source, int channel, const char* op) const;
  std::chrono::milliseconds effective(int64_t timeout_ms) const;

  std::shared_ptr<Peers> peers_;
  size_t block_bytes_;
  size_t pad_bytes_;
  int64_t sequence_;
  int spins_;
  Segment control_;
  std::vector<Segment> remote_;  // keeps peers' memory mapped
  std::vector<void*> data_;
  std::vector<void*> pads_;
};

// Finds the mapping of this process's allocation that holds `address`, for a group or its peers;
// null when the address is not symmetric memory, or not rendezvoused with that group.
std::shared_ptr<Mapping> find_mapping(const void* address, const std::string& group);
std::shared_ptr<Mapping> find_mapping(const void* address, const Peers& peers);

// Finds the mapping that the `sequence`-th rendezvous of these peers made; null when it was freed.
std::shared_ptr<Mapping> find_mapping(const Peers& peers, int64_t sequence);

// Forgets the groups that were destroyed; their sockets close when their last mapping goes.
void release_groups();
// Takes part in the next rendezvous of a group as one who could not allocate. Collective.
void decline_rendezvous(const std::string& group, const std::string& reason);

}  // namespace symm_cp
