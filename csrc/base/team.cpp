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
  const int64_t parts = bytes / (kLeastBytes / 2);
  return static_cast<int>(std::min<int64_t>(current->threads(), parts));
}

void Team::run_parts(int parts, void (*body)(void*, int), void* argument) {
  Pool& pool = current->pool_;
  divided.fetch_add(1, std::memory_order_relaxed);
  const Pause pause;
  pool.run(parts, body, argument);
}

}  // namespace symm_cp
