// Accepts connections of the other ranks of a group on a Unix socket, while the mesh is made.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "memory/segment.h"

namespace symm_cp {

class Listener {
 public:
  // Throws SystemError when no socket can be created.
  Listener(std::string group, int rank, int world_size);

  // This rank's entry in the store, which peers read: token, process, pid namespace and host.
  const std::string& entry() const { return entry_; }
  // The peers that have connected since the last call, with their sockets. Never waits. Rejects
  // connections of other users at once, and connections with a wrong token at their handshake; a
  // connection that sends nothing blocks no other. Throws SystemError when no socket can be opened.
  std::vector<std::pair<int, Descriptor>> accept_ranks();
  // Returns at a connection or a handshake, or after `limit`.
  void wait(std::chrono::milliseconds limit) const;
  // Adds the entries that `wait` polls.
  void add_to(std::vector<pollfd>& entries) const;

  // Connects to a peer by its entry; returns an invalid descriptor when it is not listening.
  static Descriptor connect(const std::string& entry, int rank, int world_size);
  static bool same_host(const std::string& entry);
  // Whether the process of an entry has ended; false if that is unknown.
  static bool process_ended(const std::string& entry);
  static ucred credentials(int socket);

 private:
  std::string group_;
  int rank_;
  int world_size_;
  std::string token_;
  std::string entry_;
  Descriptor listener_;
  std::vector<Descriptor> pending_;  // connected, without a handshake so far
};

}  // namespace symm_cp
