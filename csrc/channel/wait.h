// Waiting for a 32-bit word in shared memory: spin briefly, yield, then sleep in the kernel.
//
// Memory order: `publish` makes every earlier write of the caller visible to every process that
// sees the new value through `wait_until` (release / acquire, through sequentially consistent
// operations).
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <functional>
#include <string>

#include "base/pauses.h"
#include "base/python.h"
#include "channel/wire.h"

namespace symm_cp {

using Clock = std::chrono::steady_clock;

// How long a call may wait for its peers, in all its waits together. Computation in between does
// not count: a long kernel must not use up a peer's time.
struct WaitBudget {
  explicit WaitBudget(std::chrono::milliseconds all) : limit(all), left(all) {}
  // Says on stderr, once for each budget, that the call has waited for long. `context` names the
  // call and what it waits for. Call it about every `kSlice` of a wait.
  void say_if_long(const std::string& group, const std::function<std::string()>& context);
  Clock::duration waited() const {
    return limit - left + (begin == Clock::time_point{} ? Clock::duration{} : Clock::now() - begin);
  }
  std::chrono::milliseconds limit;
  Clock::duration left;
  Clock::time_point begin{};  // of the wait under way

 private:
  bool said_ = false;
};

// Charges a budget for the lifetime of this object.
class Waiting {
 public:
  explicit Waiting(WaitBudget& budget) : budget_(budget) { budget.begin = Clock::now(); }
  ~Waiting() {
    budget_.left -= Clock::now() - budget_.begin;
    budget_.begin = {};
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  Clock::duration left() const { return budget_.limit - budget_.waited(); }
  bool expired() const { return left() <= Clock::duration::zero(); }

 private:
  WaitBudget& budget_;
};

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The futexes are shared between processes, so the PRIVATE flag must not be set.
inline void futex_wake(Word* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Also returns when a signal arrives.
inline void futex_sleep(Word* word, uint32_t seen, std::chrono::nanoseconds limit) {
  timespec ts{};
  ts.tv_sec = limit.count() / 1000000000;
  ts.tv_nsec = limit.count() % 1000000000;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, seen, &ts, nullptr, 0);
}

// Wakes the sleepers on `word` after it changed. `sleepers` counts the processes that sleep on any
// word of the same owner; reading it after a sequentially consistent store saves the system call in
// the common case, and cannot miss a sleeper, which counts itself before it looks again.
inline void wake_sleepers(Word* word, Word* sleepers) {
  pause_at_random();
  if (sleepers->load(std::memory_order_seq_cst) != 0) futex_wake(word);
}

inline void publish(Word* word, Word* sleepers, uint32_t value) {
  pause_at_random();
  word->store(value, std::memory_order_seq_cst);
  wake_sleepers(word, sleepers);
}

// How long to spin before sleeping. With more ranks than processors, none may spin: the awaited
// rank needs the processor.
inline int spin_rounds(int world_size) {
  cpu_set_t allowed;
  const bool known = sched_getaffinity(0, sizeof(allowed), &allowed) == 0;
  return known && world_size <= CPU_COUNT(&allowed) ? 1000 : 40;
}

// How long to yield the processor, again and again, before sleeping: waking up takes longer than
// most waits last, and the awaited process may be on this processor.
inline constexpr std::chrono::microseconds kYieldTime{100};

// How often a sleeping rank checks for peers that died or failed, and for Ctrl-C.
inline constexpr std::chrono::nanoseconds kSlice = std::chrono::milliseconds(50);

// Returns once `ready(value of word)` holds. While asleep, `on_slice(expired)` runs about every
// `kSlice`, and with expired = true once the budget is used up: it throws when the wait cannot end.
// The word decides: if a peer raised it and then died or failed, the wait succeeds. With `at_once`
// a wait sleeps without spinning before.
template <class Ready, class OnSlice>
void wait_until(Word* word, Word* sleepers, int spins, WaitBudget& budget, Ready ready,
                OnSlice on_slice, bool at_once = false) {
  const PauseAtBothEnds pauses;
  for (int i = 0; i < (at_once ? 1 : spins); ++i) {
    if (ready(word->load(std::memory_order_acquire))) return;
    cpu_relax();
  }
  const WithoutGil without_gil;
  const Waiting waiting(budget);
  const Clock::time_point end = Clock::now() + kYieldTime;
  while (!at_once && Clock::now() < end) {
    sched_yield();
    if (ready(word->load(std::memory_order_acquire))) return;
  }
  while (true) {
    sleepers->fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = word->load(std::memory_order_seq_cst);
    const bool arrived = ready(seen);
    if (!arrived) {
      pause_at_random();
      const auto left = std::chrono::nanoseconds(waiting.left());
      if (left.count() > 0) futex_sleep(word, seen, left < kSlice ? left : kSlice);
    }
    sleepers->fetch_sub(1, std::memory_order_seq_cst);
    pause_at_random();
    if (arrived || ready(word->load(std::memory_order_acquire))) return;
    try {
      throw_if_interrupted();
      on_slice(waiting.expired());
    } catch (...) {
      if (ready(word->load(std::memory_order_acquire))) return;
      throw;
    }
  }
}

}  // namespace symm_cp
