#include "base/pauses.h"

#include <chrono>
#include <random>
#include <thread>

namespace symm_cp {

namespace {

using Clock = std::chrono::steady_clock;

// A sleeping thread wakes late by about this much, so shorter pauses yield in a loop instead.
constexpr std::chrono::microseconds kSpinBelow{60};

std::atomic<uint64_t> seed_of_next{0};
std::atomic<int> generation{0};  // of the settings

std::mt19937_64& generator() {
  thread_local std::mt19937_64 random;
  thread_local int known = -1;
  if (const int latest = generation.load(); known != latest) {
    known = latest;
    random.seed(seed_of_next.fetch_add(0x9e3779b97f4a7c15));
  }
  return random;
}

}  // namespace

std::atomic<int64_t> longest_pause_us{0};

void set_pauses(uint64_t seed, int64_t longest_us) {
  seed_of_next.store(seed);
  generation.fetch_add(1);
  longest_pause_us.store(longest_us);
}

// Pauses one time in four, mostly for a small part of the longest pause: other threads' steps take
// microseconds or milliseconds.
void draw_pause() {
  const uint64_t drawn = generator()();
  if (drawn % 4 != 0) return;
  const auto longest = static_cast<uint64_t>(longest_pause_us.load(std::memory_order_relaxed));
  const uint64_t scaled = longest >> ((drawn >> 8) % 8);
  const std::chrono::microseconds pause((drawn >> 16) % (scaled + 1));
  if (pause >= kSpinBelow) return std::this_thread::sleep_for(pause);
  const auto end = Clock::now() + pause;
  while (Clock::now() < end) std::this_thread::yield();
}

}  // namespace symm_cp
