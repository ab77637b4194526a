// How ranks that exchange messages find each other, and notice that one is gone.
//
// A link goes from a rank that sends to one that receives, and the sender makes it alone: it
// creates the ring without publishing it, writes into it at once, and connects to the receiver's
// socket, whose name each rank puts into the store with its first message. The ring's descriptor
// goes through the socket. So a receiver never looks for senders, not even when it receives from
// any source: senders connect to its socket. Only the sender reads the store, again and again until
// the receiver is there. A rank that receives from a given rank makes a link to it as well: answers
// need it, and it shows when that rank dies.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "channel/wait.h"
#include "messages/ring.h"
#include "rendezvous/listener.h"
#include "rendezvous/peers.h"

namespace symm_cp {

// The words, in a page of shared memory, on which a rank sleeps. Peers wake it after they have
// published something to it: its waiting threads through the futex `rings`, or else its engine,
// which sleeps in poll(), through an eventfd. Sleepers count themselves, then check their rings
// once more; wakers publish first, then read the counts: so no sleeper is missed
// (tests/model/sleep.pml).
struct Doorbell {
  Word rings;
  alignas(64) Word sleepers;
  Word engine;  // 1: the engine must be woken
  Word closed;  // 1: the rank has left in good order
};

// A rank's doorbell as mapped here.
class Bell {
 public:
  Bell() = default;
  static Bell create();
  Bell(Segment page, Descriptor event) : page_(std::move(page)), event_(std::move(event)) {}
  bool there() const { return page_.data() != nullptr; }
  Doorbell& doorbell() const { return *reinterpret_cast<Doorbell*>(page_.data()); }
  int page_fd() const { return page_.fd(); }
  int event_fd() const { return event_.get(); }
  // Wakes the sleepers, after something was published.
  void ring() const;
  // Wakes the engine, asleep or not.
  void kick() const;
  // Called by the owner: forgets the kicks.
  void quiet() const;

 private:
  Segment page_;
  Descriptor event_;
};

// An event on the link to a peer, for the engine.
struct LinkEvent {
  enum What { kIncoming, kConnected, kGone };
  What what;
  int peer;
  Segment ring = {};                      // kIncoming: the peer's frames for this rank
  std::shared_ptr<const Bell> bell = {};  // kIncoming, kConnected: the peer's
  std::string reason = {};                // kGone, as in "died"
  bool in_order = false;                  // kGone: the peer closed its messages
  pid_t process = 0;  // kIncoming: the peer's, as seen here; 0 if it is of another namespace
};

// All sockets of a rank's messages. For one thread, the engine's; waits only for the store.
class Connector {
 public:
  // Publishes this rank's entry in the store. `bell`: this rank's bell, which outlives this object.
  Connector(std::shared_ptr<Bootstrap> bootstrap, std::string group, int rank, int world_size,
            const Bell& bell);

  // A peer to which a link is wanted, and the descriptor of the ring for it.
  struct Wanted {
    int peer;
    int ring;
  };
  // Makes the wanted links whose peers are there, and returns the events since the last call.
  // `all`: also detects the end of ranks to which there is no link.
  std::vector<LinkEvent> step(const std::vector<Wanted>& wanted, bool all);
  // Returns at an event, when this rank's bell is kicked, or when it is time for another step.
  void wait();

 private:
  struct Contact {
    Descriptor out;      // a socket that this rank has connected, to send messages
    Descriptor in;       // one that the peer has connected
    Descriptor process;  // a pidfd, where the kernel has them
    std::shared_ptr<const Bell> bell;
    bool connected = false;  // the peer has answered on `out`
    bool incoming = false;   // and has sent its ring on `in`
    bool stirred = false;    // there is something to read, or an end
    bool gone = false;
    std::optional<Clock::time_point> hung_up;  // when a socket was found closed
    std::optional<Clock::time_point> ended;    // when the entry's process was found ended
    std::string entry;
    std::string loss;  // why there will be no link
    int store_failures = 0;
  };
  void look_for(int peer, std::optional<int> ring);
  void connect(Contact& contact, const std::string& entry, int ring);
  void accept_all();
  void greet(int peer, std::vector<LinkEvent>& events);
  void add_event(LinkEvent::What what, int peer, Segment ring, Descriptor page, Descriptor event,
                 std::vector<LinkEvent>& events);
  void check_gone(int peer, std::vector<LinkEvent>& events);

  std::shared_ptr<Bootstrap> bootstrap_;
  int rank_;
  int world_size_;
  const Bell& bell_;
  Listener listener_;
  std::vector<Contact> contacts_;
  size_t wanted_before_ = 0;
  bool looking_ = false;  // some peer is not there yet
  std::chrono::milliseconds pause_{1};
  Clock::time_point next_look_{};
};

}  // namespace symm_cp
