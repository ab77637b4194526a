// How to store to a slot: past the caches where the usual way takes far longer.
//
// Peers have read a slot before it is written again, so their caches hold its lines, and a store
// waits until they have given these up. On an AMD EPYC that took four times as long at some times
// as at others: where the ranks' cores shared no cache, by all signs. Past the caches a store does
// not wait, but peers then read memory. As it depends on the cores that the ranks run on at the
// moment, it is measured all the time.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace symm_cp {

class SlotStores {
 public:
  // Calls `store(past_caches)`, which writes about `bytes` to a slot and returns how many it wrote.
  template <class Store>
  int64_t run(int64_t bytes, const Store& store) {
    if (bytes < kLeast) return store(false);
    const bool past_caches = next();
    const auto begin = std::chrono::steady_clock::now();
    const int64_t stored = store(past_caches);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    if (stored > 0) add(past_caches, seconds.count() / static_cast<double>(stored));
    return stored;
  }

  // Whether the next store goes past the caches; then `add` says the seconds that it took per byte.
  bool next() {
    ++count_;
    if (count_ <= 2 * kSamples) return count_ % 2 == 0;
    const bool past_caches = usual_.pace() > kWorth * past_.pace();
    return count_ % kTrial == 0 ? !past_caches : past_caches;
  }
  void add(bool past_caches, double pace) { (past_caches ? past_ : usual_).add(pace); }

 private:
  // Smaller ones are too short to be measured.
  static constexpr int64_t kLeast = int64_t{64} << 10;
  // The factor by which storing past the caches must be faster, as reading takes longer after it.
  static constexpr double kWorth = 1.6;
  // One of this many stores takes the other way, to measure it again.
  static constexpr uint64_t kTrial = 64;
  static constexpr uint64_t kSamples = 2;

  // The better of the last samples: others may have been interrupted.
  class Way {
   public:
    double pace() const { return std::min(last_, before_); }
    void add(double pace) {
      before_ = last_;
      last_ = pace;
    }

   private:
    double last_ = 0, before_ = 0;
  };

  uint64_t count_ = 0;
  Way usual_, past_;
};

}  // namespace symm_cp
