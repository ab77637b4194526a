// Random pauses of all threads of a process around its waits, signals and requests to stores, for
// whole runs of tests. Unlike the delays of `Probe`, they do not depend on what a thread does: no
// step is counted, and they last until they are set again.
#pragma once

#include <atomic>
#include <cstdint>

namespace symm_cp {

extern std::atomic<int64_t> longest_pause_us;  // 0: no pauses

// Draws from `seed` from now on, in each thread another sequence.
void set_pauses(uint64_t seed, int64_t longest_us);
void draw_pause();

// Tests alone set pauses; else this is one load.
inline void pause_at_random() {
  if (longest_pause_us.load(std::memory_order_relaxed) != 0) draw_pause();
}

struct PauseAtBothEnds {
  PauseAtBothEnds() { pause_at_random(); }
  ~PauseAtBothEnds() { pause_at_random(); }
};

}  // namespace symm_cp
