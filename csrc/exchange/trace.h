// Records how long steps take, while switched on.
#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "channel/wire.h"

namespace symm_cp {

class Recorder {
 public:
  static Recorder& instance();

  bool on() const { return on_.load(std::memory_order_relaxed); }
  // Starts an empty recording, or ends it.
  void record(bool on);
  void add(const Command& command, int64_t start, int64_t end, uint32_t epoch,
           const char* call_name);
  // Returns the recorded steps, and clears them.
  std::vector<TraceEvent> take();

  static int64_t now();
  // Marks the calling thread as a copy engine.
  static void enter_engine();

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::vector<TraceEvent> events_;
};

}  // namespace symm_cp
