// Random pauses in all threads of a process, around its waits, signals and requests to stores, for
// whole test runs. Unlike the delays of `Probe` they are not tied to the steps of a schedule, and
// they stay in effect until they are set again.
#pragma once

#include <atomic>
#include <cstdint>

namespace symm_cp {

extern std::atomic<int64_t> longest_pause_us;  // 0: no pauses

// Seeds the pauses; each thread draws a sequence of its own.
void set_pauses(uint64_t seed, int64_t longest_us);
void draw_pause();

// Costs one load unless a test has set pauses.
inline void pause_at_random() {
  if (longest_pause_us.load(std::memory_order_relaxed) != 0) draw_pause();
}

struct PauseAtBothEnds {
  PauseAtBothEnds() { pause_at_random(); }
  ~PauseAtBothEnds() { pause_at_random(); }
};

}  // namespace symm_cp
