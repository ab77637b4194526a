#include "channel/wait.h"

#include <cstdio>

namespace symm_cp {

namespace {

// How long a call waits in silence. Shorter: ranks that save a checkpoint, or load data, are named
// for nothing; longer: a user has given up before.
std::atomic<int64_t> silent_ms{10000};

}  // namespace

void WaitBudget::say_if_long(const std::string& group,
                             const std::function<std::string()>& context) {
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(this->waited());
  if (said_ || waited.count() < silent_ms) return;
  said_ = true;
  std::fprintf(
      stderr,
      "symm_cp: still waiting, group '%s': %s: %.0f s so far, time-out after %.0f s. If "
      "that rank should be here: `symm-cp doctor` tells whether this machine is at fault\n",
      group.c_str(), context().c_str(), static_cast<double>(waited.count()) / 1000,
      static_cast<double>(limit.count()) / 1000);
  std::fflush(stderr);
}

}  // namespace symm_cp

extern "C" {

// Sets after how many milliseconds waiting calls say so, unless negative; returns the value before.
int64_t symm_cp_say_waits_after(int64_t milliseconds) {
  const int64_t before = symm_cp::silent_ms;
  if (milliseconds >= 0) symm_cp::silent_ms = milliseconds;
  return before;
}

}  // extern "C"
