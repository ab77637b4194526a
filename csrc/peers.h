// The ranks of a group as processes of this host: a mesh of Unix sockets, made once per group.
// It carries descriptors of shared memory, and tells when a peer's process is gone.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "segment.h"

namespace symm_cp {

// What the group offers for finding each other: its key-value store.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> get(const std::string& key) = 0;
};

// What one rank sends to all others in a rendezvous.
struct Parcel {
  std::vector<int64_t> words;
  std::vector<int> fds;  // borrowed
};

struct Received {
  std::vector<int64_t> words;
  std::vector<Descriptor> fds;
};

class Peers {
 public:
  // Collective. Throws PeerError, naming the rank, when a peer does not come within the time-out
  // or lives on another host. Sockets are in the abstract namespace: no file is left behind, and
  // both the 128-bit name and the peer's user id are checked.
  Peers(Bootstrap& bootstrap, std::string group, int rank, int world_size,
        std::chrono::milliseconds timeout);

  // Collective: sends the parcel to every peer and returns what each rank sent (the own entry is
  // empty). Calls are serialised. After an error the mesh is unusable (see `broken`).
  std::vector<Received> exchange(const Parcel& parcel);

  // True when the process of `rank` has ended; never true for a stopped or busy one.
  bool dead(int rank) const;

  bool broken() const { return broken_; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const std::string& group() const { return group_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  struct Peer {
    Descriptor socket;
    Descriptor process;  // a pidfd; invalid where the kernel has none
  };

  void accept_from(int listener, const std::string& token);
  bool connect_to(Bootstrap& bootstrap, int peer);
  void adopt(int peer, Descriptor socket);
  void send_parcel(int peer, const Parcel& parcel);
  Received receive_parcel(int peer, std::chrono::steady_clock::time_point deadline);

  std::string group_;
  int rank_;
  int world_size_;
  std::chrono::milliseconds timeout_;
  std::vector<Peer> peers_;
  std::mutex mutex_;
  bool broken_ = false;
};

}  // namespace symm_cp
