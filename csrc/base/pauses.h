// Random pauses of all threads of a process around its waits, signals and requests to stores, for
// whole runs of tests. Unlike the delays of `Probe`, they do not depend on what a thread does: no
// step is counted, and they last until they are set again.
#pragma once

#include <atomic>
#include <cstdint>

namespace symm_cp {

extern std::atomic<int64_t> longest_pause_us;  // 0: no pauses

// Seeds the pauses; each thread draws a sequence of its own.
void set_pauses(uint64_t seed, int64_t longest_us);
void draw_pause();

// Only tests set pauses; otherwise this is one load.
inline void pause_at_random() {
  if (longest_pause_us.load(std::memory_order_relaxed) != 0) draw_pause();
}

struct PauseAtBothEnds {
  PauseAtBothEnds() { pause_at_random(); }
  ~PauseAtBothEnds() { pause_at_random(); }
};

}  // namespace symm_cp
