// The waits of the streams of one workspace, and whether they can end. Stream waits have no
// time-out, and an error cannot be returned to a thread that synchronizes with the stream, so two
// threads of their own look after them (watcher.h): a reader copies the flags to the host, and a
// judge decides by what the reader delivered last. The driver may hold up any thread that calls it
// (while a module is loaded, say, the context is locked), so only the reader calls it, and no mutex
// is held meanwhile: neither the judge nor the threads that issue ops ever wait for the driver
// here.
//
// After an error in the middle of a call the workspace is given up: peers are told by a mark, and
// abort when they wait for this rank. This rank lives on, and its streams must end, or whoever
// synchronizes with them hangs. Flags that come naturally end its waits. The others are ended by
// writing the awaited values to this rank's own flags. What the streams do then is computed from
// data that never came, and they signal it to the peers as if it were good. So that is done only
// once nobody can take it for good:
//
//   each peer has died, or has given up the workspace as well (its results are lost anyway); or
//   the time-out has passed since, after which nobody waits for this rank any more.
//
// A peer that comes even later finds the mark raised to kDrained first. Its judge aborts when a
// wait for this rank ends under that mark.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "memory/segment.h"

namespace symm_cp {

// Where this rank's flags are, and when waits for them fail.
struct WatchedFlags {
  std::string group;
  int rank;
  int world_size;
  driver::Address flags;
  std::chrono::milliseconds timeout;
  std::vector<Descriptor> processes;  // pidfds of the ranks; invalid where there is none
  // The peers' flags that say that this rank gave up, as far as they are mapped here, and a word of
  // this rank's memory that is copied there.
  std::vector<driver::Address> marks;
  driver::Address mark;
};

// Memory of the host that flags are copied to and from, and streams for that. Never freed, since
// the driver would wait for the device, but used again.
struct HostFlags {
  driver::Context context = nullptr;
  driver::Stream reading = nullptr;
  driver::Stream writing = nullptr;
  uint32_t* words = nullptr;
  size_t count = 0;
};

class StreamWaits {
 public:
  // The calling thread has the context of the device. Throws driver::Error.
  StreamWaits(const driver::Api& api, WatchedFlags about);
  ~StreamWaits();
  StreamWaits(const StreamWaits&) = delete;
  StreamWaits& operator=(const StreamWaits&) = delete;

  // A stream will wait, in call `epoch` of op `call_name`, until `peer` has raised a flag to
  // `needed`.
  void expect(int peer, int flag, uint32_t needed, uint32_t epoch, const char* call_name);
  // Stops watching. Returns when flags are no longer read nor written, or after two seconds. The
  // calling thread has the context.
  void close();
  // Whether all that was written to flags has arrived. The calling thread has the context.
  bool written();
  // Tells the peers that this rank completes no further call; from then on waits do not abort, but
  // are ended as said above. Throws driver::Error when a peer cannot be told. The calling thread
  // has the context.
  void give_up();

  // Returns why the process must be aborted, if it must. Calls no driver.
  std::optional<std::string> judge();
  // Reads the flags when something waits, and ends the waits of a given-up workspace when that was
  // decided. The calling thread has the context; the driver may hold it up.
  void read();
  std::chrono::milliseconds interval() const;
  driver::Context context() const { return host_.context; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Pair {  // a flag of a peer
    uint32_t needed = 0;
    uint32_t seen = 0;
    std::optional<Clock::time_point> since;  // unsatisfied, and unchanged
  };
  struct Wait {
    size_t pair;
    uint32_t needed;
    uint32_t epoch;
  };
  struct Peer {
    std::optional<Clock::time_point> died;    // when the judge noticed,
    std::optional<Clock::time_point> marked;  // and when the mark was delivered
  };
  struct Write {  // of a value to an own flag
    size_t pair;
    uint32_t value;
  };

  // These take the mutex.
  bool abandoned();
  void deliver(Clock::time_point begun);
  // These need it.
  bool waiting() const;
  size_t mark_of(size_t peer) const;
  void look_for_the_dead(Clock::time_point now);
  std::optional<std::string> find_failure(Clock::time_point now);
  std::optional<std::string> judge_given_up(Clock::time_point now);
  std::string silence(Clock::time_point now) const;
  std::string describe(size_t pair) const;
  size_t earliest(size_t pair) const;
  std::string disagreement(size_t pair, uint32_t needed) const;
  // These call the driver, without the mutex.
  bool copy_flags();
  bool end_waits(const std::vector<Write>& writes);
  driver::Result mark_peers(uint32_t mark);

  const driver::Api& api_;
  WatchedFlags about_;
  HostFlags host_;
  std::mutex mutex_;  // for what follows
  std::condition_variable idle_;
  bool closed_ = false;
  std::optional<Clock::time_point> closing_;
  std::optional<Clock::time_point> reading_;  // under way, since
  bool lost_ = false;                         // a reading that nobody waits for any more
  Clock::time_point read_;                    // when the last delivered reading began
  std::optional<Clock::time_point> given_up_;
  std::optional<Clock::time_point> draining_;
  std::vector<Peer> peers_;
  std::vector<Pair> pairs_;
  std::vector<size_t> unsure_;      // waits that ended under a mark: it may be kDrained by now
  std::optional<size_t> deceived_;  // a wait that ended under kDrained
  std::vector<Wait> waits_;         // a ring of the last ones;
  size_t next_ = 0;                 // where the next one goes
  std::vector<std::string> names_;  // of the last calls
};

}  // namespace symm_cp
