// The ranks of a group as processes of this host: a mesh of Unix sockets, made once per group.
// It carries descriptors of shared memory, and shows when a peer's process is gone.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "channel/board.h"
#include "channel/wait.h"
#include "memory/segment.h"
#include "rendezvous/listener.h"

namespace symm_cp {

// The group's key-value store, through which the ranks find each other.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> get(const std::string& key) = 0;
  // Whether a rank's process is known to have ended before its first call.
  virtual bool lost(int /*rank*/) { return false; }
};

// The data that one rank sends to all others in a rendezvous.
struct Payload {
  std::vector<int64_t> words;
  std::vector<int> fds;  // borrowed
};

struct Received {
  std::vector<int64_t> words;
  std::vector<Descriptor> fds;
  std::string call_name;  // the call that needs the rendezvous
};

// A rank aborts its call, and all calls of another channel up to `other`, if any, so that ranks
// that disagreed continue with the same call numbers.
class GaveUp : public PeerError {
 public:
  GaveUp(const std::string& call_name, std::string cause, std::optional<CallSite> with)
      : PeerError(call_name, std::move(cause)), other(std::move(with)) {}
  std::optional<CallSite> other;
};

// The call of another channel that was aborted together with a call that threw.
inline const CallSite* other_of(const std::exception& error) {
  const auto* found = dynamic_cast<const GaveUp*>(&error);
  return found != nullptr && found->other ? &*found->other : nullptr;
}

// Runs every few milliseconds in a rendezvous; throws when it cannot succeed.
using OnSlice = std::function<void()>;

// A rendezvous: its key, which is used once, the call it is for, and how long it may take.
struct Rendezvous {
  std::string key;
  std::string call_name;
  WaitBudget& budget;
  OnSlice on_slice = [] {};
};

class Peers {
 public:
  // Starts without peers.
  Peers(std::string group, int rank, int world_size, std::chrono::milliseconds timeout);

  // Collective: makes the mesh (mesh.cpp), or continues it after an aborted rendezvous. Throws
  // PeerError, naming the rank, when a peer does not come within the budget, died, refused this
  // rendezvous, or is on another host. Sockets are in the abstract namespace: no file is left
  // behind. Their names are public, so connections are checked by user id and a 128-bit token, and
  // none can block a rank. The rest of this class is for ranks that have met.
  void meet(Bootstrap& bootstrap, const Rendezvous& rendezvous);

  // Reports to ranks that look for this rank that it refuses the rendezvous `key`. Not collective.
  static void refuse_before(Bootstrap& bootstrap, int rank, const std::string& key,
                            const std::string& reason);

  // Throws when a peer has refused this call, or a later one, with `refuse_before`.
  static void check_refusal(Bootstrap& bootstrap, const Rendezvous& rendezvous, int peer);

  // Collective: sends the payload to every peer and returns each rank's payload (this rank's entry
  // is empty). All ranks pass the same key; rendezvous with different keys may overlap in any
  // order. A rendezvous may have several rounds; the last one ends it. When a rank fails it refuses
  // the key, and every rank throws the first cause.
  std::vector<Received> exchange(const Rendezvous& rendezvous, int round, const Payload& payload,
                                 bool last);

  // Reports to all connected peers that this rank does not take part in the rendezvous (any more).
  // Not collective: peers receive it when they come to the rendezvous.
  void refuse(const std::string& key, const std::string& reason, const CallSite* other = nullptr);

  // Throws when a peer has refused the rendezvous by a message that has arrived by now.
  void check_refused(const std::string& key, const std::string& context, int peer);

  // True when the process of `rank` has ended; never true for a stopped or busy one.
  bool dead(int rank) const;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const std::string& group() const { return group_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  Board& board(int rank) const { return *reinterpret_cast<Board*>(boards_[rank].data()); }
  // False in a child that was forked after the group was made: it is not a rank.
  bool owned() const { return forks_ == fork_count(); }
  // Throws PeerError in such a child.
  void check_owned(const std::string& call_name) const;

 private:
  static constexpr size_t kMaxWords = 8;
  struct Message {
    static Message of(const std::string& key, int32_t round, const std::string& text);
    char key[48];
    int32_t round;
    int32_t words;  // of a refusal: the other channel; word[0]: the number there
    int64_t word[kMaxWords];
    char text[256];  // the call's name, or a refusal's reason
  };
  struct Incoming {
    std::optional<Received> payload;
    std::string refusal;
    std::optional<CallSite> other;
    bool refused = false;
  };
  struct StaleEntry {  // an entry in the store whose process has ended
    std::string entry;
    Clock::time_point since;
  };
  struct Peer {
    Descriptor socket;
    Descriptor process;      // a pidfd; invalid where the kernel has none
    std::string entry;       // the entry through which this rank connected
    bool has_board = false;  // the peer has this rank's board
    bool closed = false;
    std::map<std::pair<std::string, int>, Incoming>
        incoming;  // by key and round; refusals: round -1
  };
  // mesh.cpp
  void make_mesh(Bootstrap& bootstrap, const Rendezvous& rendezvous);
  void find_peer(Bootstrap& bootstrap, const Rendezvous& rendezvous, int peer, bool thorough,
                 StaleEntry& stale);
  void connect_to(const std::string& entry, int peer);
  void add_connection(int peer, Descriptor socket, std::string entry);
  void forget(int peer);
  void check_connection(Bootstrap& bootstrap, const Rendezvous& rendezvous, int peer,
                        bool thorough);
  bool exchange_boards(const Rendezvous& rendezvous);
  void take_board(int peer);
  void wait_for_peers();
  int missing_board() const;
  [[noreturn]] void throw_late(const Rendezvous& rendezvous);

  bool send_message(int peer, const Message& message, const std::vector<int>& fds);
  void read_messages();
  bool read_message(Peer& peer);
  void throw_if_gone(int peer, const std::string& key, const std::string& context);
  void end(const std::string& key);
  bool collect(const std::string& key, int round, const std::string& call_name,
               std::vector<Received>& all, std::vector<bool>& have);
  void throw_if_refused(const std::string& key, const std::string& context, int peer) const;
  [[noreturn]] void throw_missing(int peer, const std::string& call_name, const std::string& why);
  void check_missing(const std::string& key, const std::string& call_name,
                     const std::vector<bool>& have, bool expired, WaitBudget& budget);

  std::string group_;
  int rank_;
  int world_size_;
  std::chrono::milliseconds timeout_;
  int forks_;
  std::vector<Peer> peers_;
  std::vector<Segment> boards_;
  std::optional<Listener> listener_;  // until the mesh is made
  std::mutex mutex_;                  // messages, which sockets there are, and which are closed
  std::deque<std::string> ended_;     // keys whose late messages are dropped
};

// The longest time between the end of a socket and the end of its process.
inline constexpr std::chrono::milliseconds kExitGrace{500};

// Throws ResourceError unless this process can open `count` more files.
void require_descriptors(int count, const std::string& call_name);

// How ranks name a rendezvous for a call: the channel and the call's number.
std::string key_of_call(int channel, int64_t number);

}  // namespace symm_cp
