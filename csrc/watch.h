// Aborts the process when a stream waits for a signal that cannot arrive. Stream waits have no
// time-out, and an error cannot be returned to a thread that synchronizes with the stream, so a
// thread of its own reads the flags that streams wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "driver.h"
#include "segment.h"

namespace symm_cp {

// Where this rank's flags are, and when waits for them fail.
struct WatchedFlags {
  std::string group;
  int rank;
  int world_size;
  driver::Address flags;
  std::chrono::milliseconds timeout;
  std::vector<Descriptor> processes;  // pidfds of the ranks; invalid where there is none
};

// What the streams of one workspace wait for. `expect` may be called during `check`.
class StreamWaits {
 public:
  // The calling thread has the context of the device. Throws driver::Error.
  StreamWaits(const driver::Api& api, WatchedFlags about);
  ~StreamWaits();
  StreamWaits(const StreamWaits&) = delete;
  StreamWaits& operator=(const StreamWaits&) = delete;

  // A stream will wait, in call `epoch` of op `what`, until `peer` has raised a flag to `needed`.
  void expect(int peer, int flag, uint32_t needed, uint32_t epoch, const char* call_name);
  // Stops watching: the flags are not read afterwards.
  void close();
  // Stops watching, and has `tell` put on a stream what tells the peers. Throws what `tell` throws.
  void give_up(const std::function<void(driver::Stream)>& tell);
  // Returns why a wait cannot end, if there is one. To be polled; never waits for the device.
  std::optional<std::string> check();
  std::chrono::milliseconds interval() const;

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

  void drain();
  bool finish_reading();
  void begin_reading();
  bool dead(int rank) const;
  std::optional<std::string> find_failure(bool fresh);
  std::string describe(size_t pair) const;

  const driver::Api& api_;
  WatchedFlags about_;
  driver::Context context_ = nullptr;
  driver::Stream stream_ = nullptr;
  uint32_t* read_ = nullptr;  // of the host, where flags are copied to
  std::mutex mutex_;          // for what follows
  bool reading_ = false;
  bool closed_ = false;
  // Ranks that were known to have died, or given up, when the last reading began.
  std::vector<bool> lost_;
  std::vector<bool> gave_up_;
  std::vector<Pair> pairs_;
  std::vector<Wait> waits_;         // a ring of the last ones;
  size_t next_ = 0;                 // where the next one goes
  std::vector<std::string> names_;  // of the last calls
};

// The thread that checks all waits of this process.
class Watcher {
 public:
  static Watcher& instance();
  // Checks them until nobody else holds them.
  void add(const std::shared_ptr<StreamWaits>& waits);
  // Ends the thread: the driver may be unloaded after it.
  void stop();

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<StreamWaits>> all_;
  std::thread thread_;
  std::atomic<int> process_{0};  // that the thread is of: not that of a fork
  bool stopping_ = false;
};

}  // namespace symm_cp
