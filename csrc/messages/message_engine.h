// The internals of messages.h: the state of all messages of a rank in a group, and their progress.
//
// A thread that starts a transmission or waits for one progresses all of them meanwhile, so a small
// blocking receive needs no hand-over. While no thread waits, a thread of the group, the engine,
// does: it sleeps in poll() on its eventfd, on the sockets (links.h) and on the peers' processes.
// Peers wake it only if there are transmissions that have not ended.
#pragma once

#include <atomic>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "messages/messages.h"
#include "messages/ring.h"
#include "rendezvous/links.h"

namespace symm_cp {

// A send or receive. The engine's lock guards all fields but `ended` until `ended` is set; then
// nothing changes any more.
struct Transmission {
  Transmission(bool sends_, int peer_, uint64_t tag_, MessageBytes message_)
      : sends(sends_), peer(peer_), tag(tag_), message(std::move(message_)) {}
  bool sends;
  int peer;  // of a receive from any source: kAnySource until it is matched
  uint64_t tag;
  MessageBytes message;
  bool any_source = false;
  uint64_t id = 0;
  int64_t moved = 0;      // bytes of a long message so far
  bool accepted = false;  // a receive of a long message that has been matched
  // For an accepted receive that reads the sender's memory: the address there, and the sender's
  // number of withdrawals before.
  uint64_t address = 0;
  uint64_t withdrawals = 0;
  std::string failure = {};
  std::function<void()> then = {};
  std::atomic<bool> ended{false};

  char* data() const { return static_cast<char*>(message.data); }
};
using TransmissionPtr = std::shared_ptr<Transmission>;

// A frame that the ring to a peer has had no room for.
struct QueuedFrame {
  Frame frame;
  TransmissionPtr transmission;  // its buffer is sent, and it ends with the frame;
  std::unique_ptr<char[]> copy;  // or the bytes themselves
};

// A message without a receive so far.
struct Arrival {
  int source;
  Frame frame;
  std::unique_ptr<char[]> bytes;  // of kEager
};

// The state between this rank and one peer.
struct MessageLink {
  std::shared_ptr<const Bell> bell;  // the peer's; null until it has answered
  std::string gone;                  // why there will be no more messages, as in "died"
  bool left_in_order = false;
  std::string complaint;  // the peer's, about a send that had already ended

  // To the peer.
  Segment out_memory;
  Ring out;
  bool connected = false;
  uint64_t last_id = 0;
  std::deque<QueuedFrame> queue;
  int64_t queued_bytes = 0;                     // copies in the queue
  std::map<uint64_t, TransmissionPtr> offered;  // long sends
  std::deque<TransmissionPtr> streaming;        // long sends that the peer has accepted
  std::atomic<bool> backlog{false};             // something waits for room in the ring,
  std::atomic<uint64_t> seen_head{0};           // as of this `head` of the ring

  // From the peer.
  Segment in_memory;
  Ring in;
  std::map<uint64_t, TransmissionPtr> accepted;  // long receives
  std::deque<TransmissionPtr> reading;           // accepted receives that read the peer's memory
  std::atomic<bool> readable{false};             // `reading` is not empty
  pid_t process = 0;                             // the peer's; 0 if its memory cannot be read
  std::atomic<bool> incoming{false};             // `in` exists;
  std::atomic<uint64_t> taken{0};                // the bytes taken from it
};

// Which long messages a rank reads in the sender's memory. Two ranks that both wait copy through
// the ring at the same time, faster than one of them reads.
enum class Reads { kNever, kUnattended, kAlways };

class MessageEngine : public std::enable_shared_from_this<MessageEngine> {
 public:
  MessageEngine(std::shared_ptr<Bootstrap> bootstrap, std::string group, int rank, int world_size,
                std::chrono::milliseconds timeout, std::function<void(int rank)> on_loss);

  TransmissionPtr start(bool sends, int peer, uint64_t tag, MessageBytes message);
  void wait(Transmission& transmission, std::chrono::milliseconds timeout);
  // Returns a transmission's failure, and reports the loss (`on_loss`); empty unless it has failed.
  std::string failure_of(const Transmission& transmission);
  void when_done(Transmission& transmission, std::function<void()> then);
  void close(std::chrono::milliseconds linger);
  // Fails all transmissions in flight, reports that to the peers, and ends the thread.
  void end(const std::string& reason);
  bool owned() const { return forks_ == fork_count(); }

 private:
  // The lock. Once it is released, calls the `when_done` callbacks of transmissions that ended.
  class Held {
   public:
    explicit Held(MessageEngine& engine) : engine_(engine), lock_(engine.mutex_) {}
    ~Held();
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

   private:
    MessageEngine& engine_;
    std::unique_lock<std::mutex> lock_;
  };
  class Attending;
  struct Ended {
    std::shared_ptr<void> owner;
    std::function<void()> then;
  };

  // --- message_engine.cpp: with the lock held

  void start_send(MessageLink& link, const TransmissionPtr& transmission);
  void start_receive(const TransmissionPtr& transmission);
  void reach(int peer);
  void finish(Transmission& transmission, std::string failure = {});
  // Withdraws a transmission, and reports that to its peer. Returns false if it has ended.
  bool give_up(Transmission& transmission, const std::string& reason);
  void withdraw_send(Transmission& transmission, const std::string& reason);
  void fail_all(const std::string& reason);
  void fail_link(MessageLink& link, const std::string& reason);
  void lose(int peer, const std::string& reason, bool in_order);
  void fail_receives(int peer, const std::string& reason, bool any_source);
  void refuse_if_lost(Transmission& transmission);
  // Reports to this rank that a transmission with `peer`, or kAnySource, failed.
  void report_loss(int peer) const;
  // Progresses everything as far as possible. Returns whether anything progressed.
  bool progress();
  bool take_frames(int peer);
  void handle(int peer, const Frame& frame);
  void handle_message(int peer, const Frame& frame);
  void handle_piece(MessageLink& link, const Frame& frame);
  void handle_taken(MessageLink& link, const Frame& frame);
  // Reads on in the memory of a peer. Returns whether there was anything to read.
  bool read_on(int peer);
  bool attended(const MessageLink& link) const;
  void end_reading(int peer, bool complete);
  void answer(int peer, const TransmissionPtr& receive, FrameKind kind);
  void handle_rejection(int peer, const Frame& frame);
  void handle_withdrawal(int peer, const Frame& frame);
  void deliver(const TransmissionPtr& transmission, int peer, const Frame& frame,
               const char* bytes);
  static std::string read_text(const MessageLink& link, const Frame& frame);
  bool reply(int peer, FrameKind kind, const Frame& about, const std::string& words);
  bool flush(MessageLink& link);
  bool push_queued(MessageLink& link);
  bool push_pieces(MessageLink& link);
  static uint32_t piece_of(const Transmission& send);
  static bool next_fits(MessageLink& link);
  void apply(LinkEvent& event);
  // Called before a leaving thread releases the lock: the engine comes next.
  void hand_over();
  bool undelivered() const;
  std::string describe(const Transmission& transmission) const;

  // --- without the lock

  // Whether there is work for `progress`.
  bool stirring() const;
  void wake_waiters();
  bool spin(const Transmission& transmission);
  bool yield(const Transmission& transmission);
  void sleep(Transmission& transmission, const Waiting& waiting, WaitBudget& budget);
  void serve();
  void serve_links();
  void check_owned(const std::string& what) const;

  std::shared_ptr<Bootstrap> bootstrap_;
  const std::function<void(int rank)> on_loss_;
  const std::string group_;
  const int rank_;
  const int world_size_;
  const std::chrono::milliseconds timeout_;
  const int forks_;
  const int spins_;
  const Reads reads_;
  std::mutex mutex_;  // guards the fields below
  std::optional<Bell> bell_;
  std::vector<std::unique_ptr<MessageLink>> links_;
  std::map<uint64_t, std::list<TransmissionPtr>> posted_;  // receives without a message, by tag
  std::map<uint64_t, std::list<Arrival>> unexpected_;      // by tag
  std::vector<Ended> ended_;
  int live_ = 0;           // transmissions that have not ended
  int any_sources_ = 0;    // receives from any source in posted_
  bool watching_ = false;  // the engine looks for the end of ranks to which there is no link
  int waiting_ = 0;        // threads that wait
  std::string closed_;     // why it is closed; empty: it is not
  std::thread thread_;
};

}  // namespace symm_cp
