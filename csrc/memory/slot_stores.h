// Chooses how to store to slots and large results: past the caches if ordinary stores take longer.
//
// Peers have read a slot before it is written again, so their caches hold its lines, and a store
// waits until they release them. On an AMD EPYC the same stores sometimes took four times as long,
// apparently when the ranks' cores shared no cache. Past the caches a store does not wait, but
// peers then read memory. Which way is faster depends on the ranks' current cores, so both are
// measured throughout.
//
// A large result may not fit into the caches. Stored past them, it evicts nothing that others need,
// and no line is read before it is written. The size from which this pays depends on this rank's
// share of a cache, which a virtual machine does not show, so it is measured as well.
#pragma once

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>

namespace symm_cp {

// `kWorth`: stores go past the caches if ordinary stores take more than this percentage of their
// time; it is over 100 because reading takes longer after stores past the caches. `kRun`: the
// number of consecutive stores in a trial of the other way; 2 if the first store is still affected
// by how the previous one left the memory.
template <int kWorth, uint64_t kRun>
class MeasuredStores {
 public:
  // Whether the next store goes past the caches; then pass the seconds that it took per byte to
  // `add`.
  bool next() {
    ++count_;
    if (count_ <= 2 * kSamples) return (count_ - 1) / kRun % 2 == 1;
    const bool past_caches = 100 * usual_.pace() > kWorth * past_.pace();
    return count_ % kTrial < kRun ? !past_caches : past_caches;
  }
  void add(bool past_caches, double pace) { (past_caches ? past_ : usual_).add(pace); }

 private:
  // One of this many stores takes the other way, to measure it again.
  static constexpr uint64_t kTrial = 64;
  static constexpr uint64_t kSamples = 2;

  // Keeps the better of the last two samples, as a sample may have been interrupted.
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

class SlotStores : public MeasuredStores<160, 1> {
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

 private:
  // Smaller stores are too short to be measured.
  static constexpr int64_t kLeast = int64_t{64} << 10;
};

class ResultStores {
 public:
  // Smaller results fit into the caches. Each power of two from here on is measured separately.
  static constexpr int64_t kLarge = int64_t{4} << 20;

  // Whether the next result of that size goes past the caches; then pass the time of all its stores
  // to `add`, unless some failed.
  bool next(int64_t bytes) { return bytes >= kLarge && of(bytes).next(); }
  void add(int64_t bytes, bool past_caches, std::chrono::duration<double> time) {
    if (bytes >= kLarge) of(bytes).add(past_caches, time.count() / static_cast<double>(bytes));
  }
  // Calls `store(past_caches)`, which writes a result.
  template <class Store>
  void run(int64_t bytes, const Store& store) {
    const bool past_caches = next(bytes);
    const auto begin = std::chrono::steady_clock::now();
    store(past_caches);
    add(bytes, past_caches, std::chrono::steady_clock::now() - begin);
  }
  // The calling thread's instance.
  static ResultStores& of_thread() {
    static thread_local ResultStores stores;
    return stores;
  }

 private:
  using Stores = MeasuredStores<115, 2>;
  static constexpr size_t kSizes = 6;
  Stores& of(int64_t bytes) {
    const auto at = static_cast<size_t>(std::bit_width(static_cast<uint64_t>(bytes / kLarge)) - 1);
    return by_size_[std::min(at, kSizes - 1)];
  }
  Stores by_size_[kSizes];
};

}  // namespace symm_cp
