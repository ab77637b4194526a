// Chooses how to store to slots and large results: past the caches if ordinary stores take longer.
//
// Peers have read a slot before it is written again, so their caches hold its lines, and a store
// waits until they release them. Past the caches a store does not wait, but peers then read memory.
// On an AMD EPYC, all-reduces of 4, 64 and 512 KiB took 0.8, 5.4 and 40 us past the caches and 1.4,
// 12 and 82 us through them between cores without a common cache; 1.8 times as long past them on
// two threads of one core. So both are measured throughout.
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

// Stores of less than `kLeast` bytes never go past the caches. Each power of two from there on is
// measured separately. `kWorth`: stores go past the caches if ordinary stores take more than this
// percentage of their time; it is over 100 because reading takes longer after stores past the
// caches. `kRun`: the number of consecutive stores in a trial of the other way; 2 if the first
// store is still affected by how the previous one left the memory.
template <int64_t kLeast, int kWorth, uint64_t kRun>
class MeasuredStores {
 public:
  // Whether the next store of that size goes past the caches; then pass its time to `add`, unless
  // it failed.
  bool next(int64_t bytes) { return bytes >= kLeast && of(bytes).next(); }
  void add(int64_t bytes, bool past_caches, std::chrono::duration<double> time) {
    if (bytes >= kLeast) of(bytes).add(past_caches, time.count() / static_cast<double>(bytes));
  }
  // Calls `store(past_caches)`, which writes about that many bytes.
  template <class Store>
  void run(int64_t bytes, const Store& store) {
    const bool past_caches = next(bytes);
    const auto begin = std::chrono::steady_clock::now();
    store(past_caches);
    add(bytes, past_caches, std::chrono::steady_clock::now() - begin);
  }

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

  class OfSize {
   public:
    bool next() {
      ++count_;
      if (count_ <= 2 * kSamples) return (count_ - 1) / kRun % 2 == 1;
      const bool past_caches = 100 * usual_.pace() > kWorth * past_.pace();
      return count_ % kTrial < kRun ? !past_caches : past_caches;
    }
    void add(bool past_caches, double pace) { (past_caches ? past_ : usual_).add(pace); }

   private:
    uint64_t count_ = 0;
    Way usual_, past_;
  };

  static constexpr size_t kSizes = 8;
  OfSize& of(int64_t bytes) {
    const auto at = static_cast<size_t>(std::bit_width(static_cast<uint64_t>(bytes / kLeast)) - 1);
    return by_size_[std::min(at, kSizes - 1)];
  }
  OfSize by_size_[kSizes];
};

// Smaller stores take no longer through the caches on any cores.
class SlotStores : public MeasuredStores<int64_t{4} << 10, 160, 1> {};

// Smaller results fit into the caches.
class ResultStores : public MeasuredStores<int64_t{4} << 20, 115, 2> {
 public:
  static constexpr int64_t kLarge = int64_t{4} << 20;
  // The calling thread's instance.
  static ResultStores& of_thread() {
    static thread_local ResultStores stores;
    return stores;
  }
};

}  // namespace symm_cp
