// Ends a process whose streams wait in vain. A wait of a stream has no end of its own, and whoever
// synchronizes with the stream cannot be told; so a thread looks at what is waited for.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "driver.h"
#include "segment.h"

namespace symm_cp {

// Where this rank's own flags are, and what the waits for them are measured by.
struct Watched {
  std::string group;
  int rank;
  int world_size;
  driver::Address flags;
  std::chrono::milliseconds timeout;
  std::vector<Descriptor> processes;  // pidfds of the ranks; invalid where there is none
};

// What the streams of one workspace wait for. `expect` may be called while another thread looks.
class Waits {
 public:
  // The calling thread has the context of the device. Throws driver::Error.
  Waits(const driver::Api& api, Watched about);
  ~Waits();
  Waits(const Waits&) = delete;
  Waits& operator=(const Waits&) = delete;

  // A stream will wait, in call `epoch` of op `what`, until `peer` has raised a flag to `needed`.
  void expect(int peer, int flag, uint32_t needed, uint32_t epoch, const char* what);
  // Nothing is waited for any more, and the flags are not read after it.
  void close();
  // The same, and writes marks of it to the peers' flags.
  void give_up(std::vector<driver::MemOp> marks);
  // Why a wait is in vain, if one is. Call it again and again: it never waits for the device.
  std::optional<std::string> look();
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

  void settle();
  bool take_in();
  void begin_reading();
  bool dead(int rank) const;
  std::optional<std::string> judge(bool fresh);
  std::string describe(size_t pair) const;

  const driver::Api& api_;
  Watched about_;
  driver::Context context_ = nullptr;
  driver::Stream stream_ = nullptr;
  uint32_t* read_ = nullptr;  // of the host, where flags are copied to
  std::mutex mutex_;          // for what follows
  bool reading_ = false;
  bool closed_ = false;
  // Ranks that were known to be dead, or to have given up, when the last reading began.
  std::vector<bool> lost_;
  std::vector<bool> gave_up_;
  std::vector<Pair> pairs_;
  std::vector<Wait> waits_;         // the last ones, and
  size_t next_ = 0;                 // where the next is put;
  std::vector<std::string> names_;  // of the last calls
};

// The thread that looks at all waits of this process.
class Watch {
 public:
  static Watch& instance();
  // Looks at them until nobody else holds them.
  void add(const std::shared_ptr<Waits>& waits);
  // Ends the thread: the driver may be unloaded after it.
  void stop();

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<Waits>> all_;
  std::thread thread_;
  std::atomic<int> process_{0};  // that the thread is of: not that of a fork
  bool stopping_ = false;
};

}  // namespace symm_cp
