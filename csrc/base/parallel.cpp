#include "base/parallel.h"

#include <pthread.h>

#include <atomic>

#include "base/team.h"

// The function that g++ calls for `#pragma omp parallel`. All OpenMP runtimes have it: g++'s own,
// and clang's and Intel's for programs compiled by g++. Null if torch was built without OpenMP.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* argument, unsigned threads, unsigned flags)
    __attribute__((weak));
int omp_get_thread_num() __attribute__((weak));
int omp_get_num_threads() __attribute__((weak));
}

namespace symm_cp {

namespace {

// A forked process has none of the runtime's threads, but g++'s runtime would wait for them.
std::atomic<bool> has_run{false}, is_forked{false};

void after_fork_in_child() {
  if (has_run) is_forked = true;
}

class TorchPool : public Pool {
 public:
  int threads() override { return loop_threads(); }
  void run(int parts, void (*body)(void*, int), void* argument) override {
    parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
      for (int64_t part = first; part < last; ++part) body(argument, static_cast<int>(part));
    });
  }
};

const bool pool_is_set = [] {
  static TorchPool pool;
  pthread_atfork(nullptr, nullptr, after_fork_in_child);
  set_pool(&pool);
  return true;
}();

}  // namespace

int loop_threads() {
  if (GOMP_parallel == nullptr || is_forked || at::in_parallel_region()) return 1;
  return at::get_num_threads();
}

void run_region(void (*body)(void*, int, int), void* argument) {
  struct Call {
    void (*body)(void*, int, int);
    void* argument;
  } given{body, argument};
  has_run = true;
  const auto run = [](void* all) {
    const auto& [each, its_argument] = *static_cast<const Call*>(all);
    each(its_argument, omp_get_thread_num(), omp_get_num_threads());
  };
  GOMP_parallel(run, &given, 0, 0);
}

}  // namespace symm_cp
