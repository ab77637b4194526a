// Faults that tests inject between two steps of a schedule: random delays, or the rank's death.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <random>

namespace symm_cp {

class Probe {
 public:
  static Probe& instance();

  bool on() const { return on_.load(std::memory_order_relaxed); }
  // From now on sleeps for up to `delay_us` microseconds before about every other step, and kills
  // the process before step `fatal`, counted from 0 (-1: never).
  void begin(uint64_t seed, int64_t delay_us, int64_t fatal);
  // Returns the number of steps since `begin`.
  int64_t end();
  void step();

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::mt19937_64 random_;
  int64_t delay_us_ = 0;
  int64_t fatal_ = -1;
  int64_t steps_ = 0;
};

}  // namespace symm_cp
