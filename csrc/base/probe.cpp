#include "base/probe.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <thread>

namespace symm_cp {

Probe& Probe::instance() {
  static Probe probe;
  return probe;
}

void Probe::begin(uint64_t seed, int64_t delay_us, int64_t fatal) {
  std::lock_guard<std::mutex> lock(mutex_);
  random_.seed(seed);
  delay_us_ = delay_us;
  fatal_ = fatal;
  steps_ = 0;
  on_.store(true, std::memory_order_relaxed);
}

int64_t Probe::end() {
  std::lock_guard<std::mutex> lock(mutex_);
  on_.store(false, std::memory_order_relaxed);
  return steps_;
}

void Probe::step() {
  int64_t pause = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (steps_++ == fatal_) kill(getpid(), SIGKILL);
    const uint64_t drawn = random_();
    if (delay_us_ > 0 && drawn % 2 == 0)
      pause = static_cast<int64_t>((drawn >> 8) % static_cast<uint64_t>(delay_us_));
  }
  if (pause > 0) std::this_thread::sleep_for(std::chrono::microseconds(pause));
}

}  // namespace symm_cp
