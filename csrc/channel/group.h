// The ranks of a process group as one process sees them: which calls they make, on which memory.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "channel/channel.h"
#include "exchange/exchange.h"
#include "exchange/lane.h"

namespace symm_cp {

class Group;

// The memory of one channel: made at the first call, replaced by larger memory when a call needs
// it, dropped when the ranks may no longer use the same memory. For one thread at a time.
class Workspace {
 public:
  Workspace(Group& group, int index) : group_(group), index_(index) {}
  ~Workspace();

  // Begins call `number`, whose slots take `slot_bytes`. When memory has to be made, or after a
  // failed call, this is collective and waits for the peers.
  Call begin(int64_t number, int64_t slot_bytes, const std::string& call_name,
             std::chrono::milliseconds timeout = kGroupTimeout);
  // Whether `begin` would return at once.
  bool begins_at_once(int64_t slot_bytes) const;
  // Ends a call that this rank failed or refuses to make. `other`: a call of another channel that
  // is aborted with it. Never waits.
  void fail(int64_t number, const std::string& cause, const CallSite* other = nullptr);
  // Makes slots of at least `slot_bytes` at the next call that needs new memory.
  void reserve(int64_t slot_bytes) { reserved_ = std::max(reserved_, slot_bytes); }
  // Skips `calls` calls, as if they had been made. For tests.
  void skip(int64_t calls) { base_ -= calls; }

  Channel* channel() const { return channel_.get(); }
  // The number of the last call that began or failed.
  int64_t last() const { return last_; }
  int64_t slot_bytes() const { return channel_ == nullptr ? 0 : channel_->layout().slot_bytes; }
  // The number of the last call that began, counted from the first call on this memory.
  int64_t epoch() const { return channel_ == nullptr ? 0 : last_ - base_; }
  int64_t bytes() const { return static_cast<int64_t>(memory_.size()); }
  void close();
  // Releases the memory: the next call makes new memory, with ranks that have done the same.
  void drop();

 private:
  class Opening;
  bool serves(int64_t number, int64_t slot_bytes) const;
  void agree_with_peers(Call& call);
  void open(Call& call, int64_t slot_bytes);
  void check_peer(const CallSite& site, const Call& call, int peer);

  Group& group_;
  int index_;
  Segment memory_;
  std::shared_ptr<Channel> channel_;
  int64_t base_ = 0;     // the number of the last call before this memory was made
  int64_t last_ = 0;     // the number of the last call that began
  int64_t opening_ = 0;  // the call for which memory is being made
  int64_t reserved_ = 0;
};

// A peer has continued without this rank's call, or uses different memory: the result of failures
// on different ranks while memory was being replaced.
class OutOfStep : public PeerError {
 public:
  using PeerError::PeerError;
};

// Where the parts of a workspace lie (memory.py gives the formula).
WorkspaceLayout layout_of(int world_size, int64_t slot_bytes);

class Group {
 public:
  // `timeout`: how long a call waits for its peers; zero stands for the process group's time-out.
  // `offset`: bytes by which slots are moved, the same on all ranks; for tests.
  Group(std::string name, int rank, int world_size, std::chrono::milliseconds timeout,
        int64_t offset = 0);
  ~Group();

  const std::string& name() const { return name_; }
  // No other group of this process gets this number.
  int64_t number() const { return number_; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int64_t offset() const { return offset_; }
  void set_offset(int64_t offset) { offset_ = offset; }
  WaitBudget budget(std::chrono::milliseconds timeout) const {
    return WaitBudget(timeout == kGroupTimeout ? timeout_.load() : timeout);
  }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  Workspace& workspace(int index) { return workspaces_[index]; }
  Lane& lane() { return lane_; }

  // The number of a new call on a channel. For the threads that call ops, in the order of the
  // calls.
  int64_t next(int index, bool by_user = true);
  // How many calls the calling thread has made, of all groups.
  static int64_t made_by_this_thread();
  // Raises the number of the call that runs as `number`, and of all later calls, by 1.
  void move(int index, int64_t number);
  // Returns the number under which the call that got `number` from `next` runs. Call this in the
  // order of the calls.
  int64_t moved(int index, int64_t number);
  // For a call in the background: the number of a call on the channel `sync` that succeeded before
  // it; the last such call, if none has failed since. Calls with a smaller value were made before
  // the ranks were in step there. 0 for other calls.
  int64_t in_step(int index, int64_t number) const {
    return index == kAsync ? in_step_[static_cast<size_t>(number) % kOrdinals].load() : 0;
  }
  // Sets whether the last call on the channel `sync` has failed.
  void set_sync_failed(bool failed) { sync_failed_ = failed; }
  // How many calls of a channel have begun.
  int64_t made(int index) const { return board().made(index); }
  // The peers, once they are known.
  std::shared_ptr<Peers> known_peers() const { return std::atomic_load(&peers_); }
  // The steps of an exchange, which Python has lowered for this group.
  const Loop& loop(int index, ExchangeKind kind, LoopKind loop_kind) const;
  void set_loop(int index, ExchangeKind kind, LoopKind loop_kind, Loop loop);
  // Whether all ranks share this host's memory; nullopt until checked (groups.h).
  std::optional<bool> on_one_host() const {
    const Hosts known = hosts_;
    return known == Hosts::kUnknown ? std::nullopt : std::optional(known == Hosts::kOne);
  }
  void set_on_one_host(bool all) { hosts_ = all ? Hosts::kOne : Hosts::kSeveral; }
  // For Python, whose calls on the channel `sync` have several parts. See CallLock.
  void lock_calls() { acquire(call_locks_[kSync]); }
  bool try_lock_calls() { return call_locks_[kSync].try_lock(); }
  void unlock_calls() { call_locks_[kSync].unlock(); }
  // Collective at the first call.
  std::shared_ptr<Peers> peers(const Rendezvous& rendezvous);

  // Refuses a call, and reports the reason at once to the peers, which may be making it. Never
  // waits.
  void refuse(int index, const std::string& reason);
  // Ends a call that threw, and reports that to the peers.
  void failed(int index, int64_t number, const std::exception& error);
  // Aborts all calls up to that number that this rank has not made. `other`: the last call of
  // another channel that is aborted with them.
  void give_up_at(int index, int64_t number, const std::string& cause,
                  const CallSite* other = nullptr);
  // Throws `GaveUp` when this rank and the peer are each blocked in a call that the other one can
  // never make, and `OutOfStep` when the peer has gone past this rank's call.
  // `on_memory`: the call waits in the memory of its channel, not for new memory.
  void check_agreement(const CallSite& call, int peer, bool on_memory);
  // Throws once a call of any rank has timed out: a late rank may have left calls out, and its
  // calls would then be paired with other calls of its peers, in silence.
  void throw_if_timed_out(const std::string& call_name) const;
  // Notes that the group must refuse calls, if the error is a time-out or a peer has timed out.
  void note_time_out(const std::exception& error);
  // Throws when this object is being destroyed, or was aborted.
  void throw_if_closing() const;
  std::string closed_text() const;
  // Fails waiting calls within a moment, and later calls that have to wait.
  void abort() { closing_ = true; }

  // Marks the calling thread as blocked in a call, until `unblock`.
  void block(const CallSite& call);
  void unblock();
  int64_t generation(int index) const;
  void set_generation(int index, int64_t number);
  void set_entered(int index, int64_t number);
  // Throws PeerError in a fork of the process that made this object.
  void check_owned(const std::string& call_name) const;
  bool owned() const { return forks_ == fork_count(); }
  // For lane.cpp: marks the calling thread as an engine, which makes no calls of its own.
  static void enter_engine();
  static bool in_engine();

 private:
  Board& board() const { return *board_.load(); }
  std::atomic<int64_t>& ordinal_of(int index, int64_t number) {
    return ordinals_[index][static_cast<size_t>(number) % kOrdinals];
  }
  void compare(const CallSite& call, int peer, const CallSite& theirs);
  void throw_if_missed(const CallSite& call, int peer) const;
  void end(int index, int64_t number, const std::string& cause, const CallSite* other);
  void check_generation(const CallSite& call, int peer);

  std::string name_;
  int64_t number_;
  int rank_;
  int world_size_;
  std::atomic<std::chrono::milliseconds> timeout_;
  int64_t offset_;
  int forks_;
  std::mutex mutex_;                      // numbers, and making the peers
  std::deque<int64_t> moves_[kChannels];  // the number of the last call at each move
  std::thread::id first_thread_;
  bool several_threads_ = false;  // more than one thread has made calls
  Board own_board_{};             // until there are peers
  std::atomic<Board*> board_{&own_board_};
  std::shared_ptr<Peers> peers_;
  Workspace workspaces_[kChannels];
  static constexpr size_t kOrdinals = 1024;
  std::atomic<int64_t> ordinals_[kChannels][kOrdinals]{};  // of the last calls
  std::atomic<int64_t> in_step_[kOrdinals]{};              // of the last calls of kAsync
  int64_t last_in_step_ = 0;
  std::atomic<bool> sync_failed_{false};
  Clock::time_point mismatch_since_[kChannels]{};  // since when a peer seems to use other memory
  Clock::time_point apart_since_[kChannels]{};     // since when it seems to make another first call
  std::atomic<bool> closing_{false};
  std::atomic<bool> timed_out_{false};  // a call, here or on a peer
  std::string time_out_;                // its error; set once, before the flag
  // Throws Interrupted when a handler of a signal raises while it waits.
  static void acquire(std::recursive_timed_mutex& mutex);
  static constexpr int kKinds = 9;
  std::optional<Loop> loops_[kChannels][kKinds][kLoopKinds];
  enum class Hosts { kUnknown, kOne, kSeveral };
  std::atomic<Hosts> hosts_{Hosts::kUnknown};
  std::recursive_timed_mutex call_locks_[kChannels];
  friend class CallLock;
  Lane lane_;
};

// Calls of several threads on one channel take turns.
class CallLock {
 public:
  CallLock(Group& group, int index) : mutex_(group.call_locks_[index]) { Group::acquire(mutex_); }
  ~CallLock() { mutex_.unlock(); }
  CallLock(const CallLock&) = delete;
  CallLock& operator=(const CallLock&) = delete;

 private:
  std::recursive_timed_mutex& mutex_;
};

// In its scope, `ask` runs before the thread's first call gets its number, and may throw. Code
// before that point can refuse a call without waiting for peers.
class BeforeNumber {
 public:
  explicit BeforeNumber(std::function<void()> ask);
  ~BeforeNumber();
  BeforeNumber(const BeforeNumber&) = delete;
  BeforeNumber& operator=(const BeforeNumber&) = delete;
  static void ask();

 private:
  std::function<void()> ask_;
};

// In its scope the calling thread may be marked as blocked (`Group::block`); unmarks it at the end.
class Blocked {
 public:
  explicit Blocked(Group& group) : group_(group) {}
  ~Blocked() {
    if (!Group::in_engine()) group_.unblock();
  }
  Blocked(const Blocked&) = delete;
  Blocked& operator=(const Blocked&) = delete;

 private:
  Group& group_;
};

}  // namespace symm_cp
