// Messages between two ranks of a group: sends and receives with tags, over shared memory.
//
// A send is matched with the receive of the same tag at its destination, in the order in which they
// were started; a receive may leave the source open. A message of up to kEagerBytes is copied out
// of the sender's buffer at once, whether or not there is a receive. A longer one is offered. Once
// there is a receive, it goes in pieces through a ring in shared memory (ring.h); if no thread of
// the sender waits, the receiver copies it out of the sender's memory, by a system call, where that
// is allowed (Yama's ptrace_scope, other containers). See messages.cpp for who makes progress, and
// links.h for how ranks connect.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "rendezvous/peers.h"

namespace symm_cp {

class MessageEngine;
struct Transmission;

inline constexpr int kAnySource = -1;
inline constexpr int64_t kEagerBytes = int64_t{64} << 10;

// The bytes of a message. `name` describes them, as in "float32[2, 3]", and is shown in errors (up
// to 87 characters). `owner` is kept until the transmission has ended: it may hold the memory.
struct MessageBytes {
  void* data;  // only read by a send
  int64_t bytes;
  std::string name;
  std::shared_ptr<void> owner;
};

// A send or a receive that was started. May be waited for by any thread, also after the Messages
// are gone. Dropping it neither ends nor disturbs the transmission.
class Delivery {
 public:
  // True when it has ended, whether it succeeded or not. Never waits; acquires the received bytes.
  bool done() const;
  // Returns when a send's buffer may be used again, or a receive's buffer is filled. Throws
  // PeerError, naming the ranks, when the peer died, left, sent another size, or did not answer
  // within `timeout` (zero stands for the group's; only the time in waits counts); Interrupted on
  // Ctrl-C. The transmission has ended then, and its buffer is not touched any more.
  void wait(std::chrono::milliseconds timeout = {});
  // The source of a receive or the destination of a send; kAnySource before that is known.
  int peer() const;
  // Why it failed; empty unless it has.
  std::string failure() const;
  // Calls `then` when it has ended: in this thread if it has already, else in one that makes
  // progress, without locks held. At most one at a time.
  void when_done(std::function<void()> then);

 private:
  friend class Messages;
  Delivery(std::shared_ptr<MessageEngine> engine, std::shared_ptr<Transmission> transmission)
      : engine_(std::move(engine)), transmission_(std::move(transmission)) {}
  std::shared_ptr<MessageEngine> engine_;
  std::shared_ptr<Transmission> transmission_;
};

// All sends and receives of this rank in one group. Any number of threads.
class Messages {
 public:
  // Not collective; opens nothing before the first message. `timeout`: how long waits last by
  // default. `bootstrap`: the group's store, the same on all ranks; a separate thread uses it, and
  // it is kept until the Messages are closed. Its `lost` reports ranks that died before their first
  // message. `on_loss`: called, by any thread, when a message's failure is reported to this rank,
  // and `rank` is gone; must not wait.
  Messages(std::shared_ptr<Bootstrap> bootstrap, std::string group, int rank, int world_size,
           std::chrono::milliseconds timeout, std::function<void(int rank)> on_loss = {});
  ~Messages();  // closes
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  // Start a transmission; never wait for a peer. Throw std::invalid_argument unless the peer is
  // another rank of the group, PeerError when the peer is known to be gone, the Messages are closed
  // or this process is a fork, and ResourceError.
  Delivery start_send(int destination, uint64_t tag, MessageBytes message);
  Delivery start_receive(int source, uint64_t tag, MessageBytes buffer);  // or kAnySource

  // The same with the wait. `receive` returns the source.
  void send(int destination, uint64_t tag, MessageBytes message,
            std::chrono::milliseconds timeout = {});
  int receive(int source, uint64_t tag, MessageBytes buffer,
              std::chrono::milliseconds timeout = {});

  // Delivers eager messages that have not left yet (for at most `linger`), then ends: transmissions
  // in flight fail, and peers that wait for this rank see that it has left. A second call does
  // nothing.
  void close(std::chrono::milliseconds linger = std::chrono::seconds(10));
  // Ends at once; transmissions in flight fail with `reason`.
  void abort(const std::string& reason);

 private:
  std::shared_ptr<MessageEngine> engine_;
};

}  // namespace symm_cp
