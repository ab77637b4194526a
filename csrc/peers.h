// The ranks of a group as processes of this host: a mesh of Unix sockets, made once per group.
// It carries descriptors of shared memory, and tells when a peer's process is gone.
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

#include "board.h"
#include "error.h"
#include "segment.h"
#include "wait.h"

namespace symm_cp {

// What the group offers for finding each other: its key-value store.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> get(const std::string& key) = 0;
  // Whether the process of a rank is known to have ended, before it said anything here.
  virtual bool lost(int /*rank*/) { return false; }
};

// What one rank sends to all others in a rendezvous.
struct Parcel {
  std::vector<int64_t> words;
  std::vector<int> fds;  // borrowed
};

struct Received {
  std::vector<int64_t> words;
  std::vector<Descriptor> fds;
  std::string what;  // the call that the rank meets for
};

// A rank gives up its call, and with it all calls of another channel up to that of `other`, if any:
// ranks that disagree then go on with the same numbers.
class GaveUp : public PeerError {
 public:
  GaveUp(const std::string& what, std::string cause, std::optional<CallSite> with)
      : PeerError(what, std::move(cause)), other(std::move(with)) {}
  std::optional<CallSite> other;
};

// What was given up with a call that threw.
inline const CallSite* other_of(const std::exception& error) {
  const auto* found = dynamic_cast<const GaveUp*>(&error);
  return found != nullptr && found->other ? &*found->other : nullptr;
}

// Throws when a rank that waits in a rendezvous will never be joined; runs every few milliseconds.
using OnSlice = std::function<void()>;

// What ranks meet for: the name of the rendezvous, which is never used again, and of the call; and
// how long it may take.
struct Meeting {
  std::string key;
  std::string what;
  WaitBudget& budget;
  OnSlice on_slice = [] {};
};

class Peers {
 public:
  // Collective. Throws PeerError, naming the rank, when a peer does not come within the budget,
  // died, refused to meet, or lives on another host. Sockets are in the abstract
  // namespace: no file is left behind. Their names are public, so strangers are turned away by
  // their user id and by a 128-bit token, and none of them can hold up a rank.
  Peers(Bootstrap& bootstrap, std::string group, int rank, int world_size,
        std::chrono::milliseconds timeout, const Meeting& meeting);

  // Tells ranks that look for this one that it will not meet them for `key`. Not collective.
  static void refuse_before(Bootstrap& bootstrap, int rank, const std::string& key,
                            const std::string& reason);

  // Throws when a peer has refused this call so, or a later one.
  static void check_refusal(Bootstrap& bootstrap, const Meeting& meeting, int peer);

  // Collective: sends the parcel to every peer and returns what each rank sent (the own entry is
  // empty). All ranks give the same key; rendezvous with different keys may overlap in any order. A
  // rendezvous may have several rounds; the last one ends it. When a rank fails it refuses the key,
  // and every rank throws the first cause.
  std::vector<Received> exchange(const Meeting& meeting, int round, const Parcel& parcel,
                                 bool last);

  // Tells all peers that this rank does not, or no longer, take part in the rendezvous. Not
  // collective: peers hear of it when they come.
  void refuse(const std::string& key, const std::string& reason, const CallSite* other = nullptr);

  // True when the process of `rank` has ended; never true for a stopped or busy one.
  bool dead(int rank) const;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const std::string& group() const { return group_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  Board& board(int rank) const { return *reinterpret_cast<Board*>(boards_[rank].data()); }
  // False in a child that was forked after the group was made: it is no rank.
  bool owned() const { return forks_ == fork_count(); }
  // Throws PeerError in such a child.
  void check_owned(const std::string& what) const;

 private:
  struct Message;
  struct Letter {
    std::optional<Received> parcel;
    std::string refusal;
    std::optional<CallSite> other;
    bool refused = false;
    bool truncated = false;
  };
  struct Suspicion {  // an entry in the store whose process is gone
    std::string entry;
    Clock::time_point since;
  };
  struct Peer {
    Descriptor socket;
    Descriptor process;  // a pidfd; invalid where the kernel has none
    bool closed = false;
    std::map<std::pair<std::string, int>, Letter> letters;  // by key and round; refusals: round -1
  };
  void meet(Bootstrap& bootstrap, const Meeting& meeting);
  void look_for(Bootstrap& bootstrap, const Meeting& meeting, int peer, bool closely,
                Suspicion& suspicion);
  void connect_to(const std::string& entry, int peer);
  void adopt(int peer, Descriptor socket);
  void exchange_boards(const Meeting& meeting);
  bool send_message(int peer, const Message& message, const std::vector<int>& fds);
  void read_letters();
  bool read_letter(Peer& peer);
  void end(const std::string& key);
  bool collect(const std::string& key, int round, const std::string& what,
               std::vector<Received>& all, std::vector<bool>& have);
  [[noreturn]] void throw_missing(int peer, const std::string& what, const std::string& why);
  void check_missing(const std::string& key, const std::string& what, const std::vector<bool>& have,
                     bool expired, const WaitBudget& budget);

  std::string group_;
  int rank_;
  int world_size_;
  std::chrono::milliseconds timeout_;
  int forks_;
  std::vector<Peer> peers_;
  std::vector<Segment> boards_;
  std::mutex mutex_;               // letters, and who is closed
  std::deque<std::string> ended_;  // keys whose late letters are of no use
};

// Throws PeerError unless this process can open so many more files.
void require_descriptors(int count, const std::string& what);

// How ranks name a rendezvous for a call: the channel and the call's number.
std::string key_of_call(int channel, int64_t number);

}  // namespace symm_cp
