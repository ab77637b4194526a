// Aborts the process when a stream of a workspace waits for a signal that cannot arrive. Stream
// waits have no time-out, and a thread that synchronizes with the stream cannot be given an error,
// so two extra threads watch the waits (watcher.h): a reader copies the flags to the host, and a
// judge decides from the reader's last copy. The driver may block any thread that calls it (it
// locks the context while it loads a module, say), so only the reader calls it, holding no mutex:
// neither the judge nor the threads that issue ops ever wait for the driver here.
//
// After an error in the middle of a call this rank gives up the workspace: it writes a mark to the
// peers, which abort when they wait for this rank. This rank continues, and its streams must end,
// or threads that synchronize with them hang. Some waits end because their flags still arrive. To
// end the others, the reader writes the awaited values to this rank's own flags. The streams then
// compute from data that never came, and signal the results to the peers as if they were valid. So
// the reader writes the values only once no peer can mistake the results for valid ones:
//
//   each peer has died, or has given up the workspace too (its results are lost anyway); or the
//   time-out has passed since giving up, after which no peer waits for this rank any more.
//
// Some peers may wait even later, so the reader first raises the mark to kDrained. A peer's judge
// aborts when a wait for this rank ends under that mark.
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

// This rank's flags, and when waits for them fail.
struct WatchedFlags {
  std::string group;
  int rank;
  int world_size;
  driver::Address flags;
  std::chrono::milliseconds timeout;
  std::vector<Descriptor> processes;  // the ranks' pidfds; invalid if unknown
  // The flags of the peers mapped here that report that this rank gave up, and the word of this
  // rank's memory that is copied to them.
  std::vector<driver::Address> marks;
  driver::Address mark;
};

// Host memory that flags are copied to and from, and streams for these copies. It is reused and
// never freed, since freeing it would wait for the device.
struct HostFlags {
  driver::Context context = nullptr;
  driver::Stream reading = nullptr;
  driver::Stream writing = nullptr;
  uint32_t* words = nullptr;
  size_t count = 0;
};

class StreamWaits {
 public:
  // The device's context must be current in the calling thread. Throws driver::Error.
  StreamWaits(const driver::Api& api, WatchedFlags about);
  ~StreamWaits();
  StreamWaits(const StreamWaits&) = delete;
  StreamWaits& operator=(const StreamWaits&) = delete;

  // A stream will wait, in call `epoch` of op `call_name`, until `peer` has raised a flag to
  // `needed`.
  void expect(int peer, int flag, uint32_t needed, uint32_t epoch, const char* call_name);
  // Stops watching. Returns when flags are no longer read or written, or after two seconds. The
  // context must be current.
  void close();
  // Whether all writes to flags have arrived. The context must be current.
  bool written();
  // Reports to the peers that this rank completes no further call; from then on waits end as
  // described above instead of aborting. Throws driver::Error when a report fails. The context must
  // be current.
  void give_up();

  // Returns why the process must abort, if it must. Does not call the driver.
  std::optional<std::string> judge();
  // Reads the flags when a stream waits, and ends the waits of a given-up workspace once the judge
  // has decided so. The context must be current; the driver may block the calling thread.
  void read();
  std::chrono::milliseconds interval() const;
  driver::Context context() const { return host_.context; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Pair {  // a flag of a peer
    uint32_t needed = 0;
    uint32_t seen = 0;
    std::optional<Clock::time_point> since;  // when it was found unsatisfied; reset by a change
  };
  struct Wait {
    size_t pair;
    uint32_t needed;
    uint32_t epoch;
  };
  struct Peer {
    std::optional<Clock::time_point> died;    // when the judge noticed
    std::optional<Clock::time_point> marked;  // when the reader delivered the mark
  };
  struct Write {  // of a value to one of this rank's flags
    size_t pair;
    uint32_t value;
  };

  // These take the mutex.
  bool abandoned();
  void deliver(Clock::time_point begun);
  // The caller of these holds the mutex.
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
  std::mutex mutex_;  // guards the members below
  std::condition_variable idle_;
  bool closed_ = false;
  std::optional<Clock::time_point> closing_;
  std::optional<Clock::time_point> reading_;  // start of the reading under way
  bool lost_ = false;                         // the reading under way is abandoned
  Clock::time_point read_;                    // when the last delivered reading began
  std::optional<Clock::time_point> given_up_;
  std::optional<Clock::time_point> draining_;
  std::vector<Peer> peers_;
  std::vector<Pair> pairs_;
  std::vector<size_t> unsure_;      // waits that ended under a mark: it may be kDrained by now
  std::optional<size_t> deceived_;  // a wait that ended under kDrained
  std::vector<Wait> waits_;         // a ring of the last waits
  size_t next_ = 0;                 // the ring's next place
  std::vector<std::string> names_;  // of the last calls
};

}  // namespace symm_cp
