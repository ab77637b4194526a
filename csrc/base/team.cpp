#include "base/team.h"

#include <sched.h>

#include <atomic>
#include <bit>
#include <cstdlib>
#include <mutex>

namespace symm_cp {

namespace {

class NoPool : public Pool {
 public:
  int threads() override { return 1; }
  void run(int parts, void (*body)(void*, int), void* argument) override {
    for (int part = 0; part < parts; ++part) body(argument, part);
  }
};

Pool* callers = nullptr;
std::atomic<Threads> chosen{Threads::kWhereCoresSuffice};
std::atomic<int> background{1};
// Indexed by number of threads; 0: not measured. Larger numbers of threads count as not measured.
constexpr int kMostMeasured = 512;
std::array<std::atomic<int64_t>, kMostMeasured + 1> divided_from{};
std::atomic<int64_t> divided{0};
thread_local Team* current = nullptr;
thread_local bool has_left = false;

// The calling thread's cores; none if the system has more cores than a mask has bits.
CoreMask cores_of_thread() {
  CoreMask mask{};
  if (sched_getaffinity(0, sizeof(mask), reinterpret_cast<cpu_set_t*>(mask.data())) != 0)
    mask.fill(0);
  return mask;
}

class OwnCores : public Cores {
 public:
  bool suffice(int threads) override {
    if (threads == 1) return true;
    if (const int known = known_; std::abs(known) == threads) return known > 0;
    const bool enough = threads <= count_cores(cores_of(caller_pool(), threads));
    known_ = enough ? threads : -threads;
    return enough;
  }

 private:
  std::atomic<int> known_{0};  // the last number of threads; negative: too few cores
};

// Within its scope the calling thread has no Team: inside a part it works alone, like the other
// threads.
class Pause {
 public:
  Pause() : paused_(current) { current = nullptr; }
  ~Pause() { current = paused_; }
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

 private:
  Team* paused_;
};

}  // namespace

void set_pool(Pool* pool) { callers = pool; }

Pool& caller_pool() {
  static NoPool none;
  return callers == nullptr ? none : *callers;
}

Cores& own_cores() {
  static OwnCores cores;
  return cores;
}

void set_threads(Threads threads) { chosen = threads; }
void set_background_threads(int threads) { background = threads; }
int background_threads() { return background; }

void set_divided_from(int threads, int64_t bytes) {
  // A part has at least one page: see divide_bytes.
  const auto measured = [bytes](int count) {
    return bytes == 0 ? 0 : std::max(bytes, count * kPage);
  };
  int64_t least = Team::kLeastBytes;
  for (int count = 2; count <= kMostMeasured; ++count) {
    if (threads == 0 || threads == count) divided_from[count] = measured(count);
    if (const int64_t from = divided_from[count]; from > 0) least = std::min(least, from);
  }
  Team::least_bytes_ = least;
}

CoreMask cores_of(Pool& pool, int threads) {
  struct Union {
    std::mutex mutex;
    CoreMask mask{};
  } all;
  const auto add = [](void* argument, int) {
    Union& to = *static_cast<Union*>(argument);
    const CoreMask mask = cores_of_thread();
    const std::lock_guard<std::mutex> lock(to.mutex);
    for (size_t i = 0; i < mask.size(); ++i) to.mask[i] |= mask[i];
  };
  pool.run(threads, add, &all);
  return all.mask;
}

int count_cores(const CoreMask& mask) {
  int count = 0;
  for (const uint32_t word : mask) count += std::popcount(word);
  return count;
}

Team::Team(Cores& cores) : pool_(caller_pool()), cores_(&cores), outer_(current) {
  if (!has_left) current = this;
}

Team::Team(Pool& pool) : pool_(pool), cores_(nullptr), outer_(current) { current = this; }

Team::~Team() { current = outer_; }

int64_t Team::divisions() { return divided; }

void Team::leave_callers_pool() { has_left = true; }

int Team::threads() {
  if (threads_ > 0) return threads_;
  const Threads choice = chosen.load(std::memory_order_relaxed);
  threads_ = 1;
  if (choice == Threads::kOne) return threads_;
  const int all = pool_.threads();
  // Called with one thread as well, to report to the other ranks that there is only one.
  const bool suffice = cores_ == nullptr || cores_->suffice(all);
  if (suffice || choice == Threads::kAll) threads_ = all;
  return threads_;
}

int Team::parts_of_large(int64_t bytes) {
  if (current == nullptr) return 1;
  const int all = current->threads();
  if (all <= kMostMeasured) {
    const int64_t from = divided_from[static_cast<size_t>(all)].load(std::memory_order_relaxed);
    if (from > 0) return bytes < from ? 1 : all;
  }
  return static_cast<int>(std::min<int64_t>(all, std::max<int64_t>(1, bytes / (kLeastBytes / 2))));
}

void Team::run_parts(int parts, void (*body)(void*, int), void* argument) {
  Pool& pool = current->pool_;
  divided.fetch_add(1, std::memory_order_relaxed);
  const Pause pause;
  pool.run(parts, body, argument);
}

}  // namespace symm_cp
