// Where the other ranks of a group find this process: a listening Unix socket, open while the mesh
// is being made.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "segment.h"

namespace symm_cp {

class Door {
 public:
  // Throws SystemError when a socket cannot be had.
  Door(std::string group, int rank, int world_size);

  // What peers read of this rank in the store: the token, the process and the host.
  const std::string& entry() const { return entry_; }
  // The peers that have knocked since the last call, with their sockets. Never waits. Whoever has
  // another user id is turned away at once, whoever does not know the token when it says so; one
  // that says nothing holds up nobody. Throws SystemError when no socket can be opened any more.
  std::vector<std::pair<int, Descriptor>> arrivals();
  // Returns when somebody knocked or spoke, or the time is over.
  void wait(std::chrono::milliseconds limit) const;

  // Connects to a peer by its entry; an invalid descriptor when it does not listen (now).
  static Descriptor knock(const std::string& entry, int rank, int world_size);
  static bool same_host(const std::string& entry);
  // Whether the process of an entry has ended; false where that cannot be told.
  static bool gone(const std::string& entry);
  static ucred credentials(int socket);

 private:
  std::string group_;
  int rank_;
  int world_size_;
  std::string token_;
  std::string entry_;
  Descriptor listener_;
  std::vector<Descriptor> silent_;  // connected, and have not said who they are
};

}  // namespace symm_cp
