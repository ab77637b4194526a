// Loops on torch's intra-op threads.
//
// Replaces at::parallel_for, which loops in the calling thread unless compiled with -fopenmp. With
// that option this library would link the compiler's OpenMP runtime next to torch's, with threads
// of its own (clang's runtime is not g++'s). Instead, the function that starts a parallel region
// comes from the runtime that torch has loaded.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

namespace symm_cp {

// The number of threads that a loop of the calling thread has at this moment.
int loop_threads();
// Calls body(argument, thread, threads) in each thread of a parallel region.
void run_region(void (*body)(void* argument, int thread, int threads), void* argument);

// Like at::parallel_for: calls body(first, last) for parts of the range of at least `grain` each,
// the n-th part in the n-th thread. Rethrows the exception of one of the parts.
template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  if (begin >= end) return;
  if (end - begin <= std::max<int64_t>(grain, 1) || loop_threads() == 1) {
    const at::internal::ThreadIdGuard number(0);
    const c10::ParallelGuard guard(true);
    return body(begin, end);
  }
  struct Region {
    int64_t begin, end, grain;
    const Body& body;
    std::atomic_flag failed = ATOMIC_FLAG_INIT;
    std::exception_ptr failure = nullptr;

    void run(int thread, int threads) {
      const int64_t count = end - begin;
      const int64_t parts =
          std::min<int64_t>(threads, at::divup(count, std::max<int64_t>(grain, 1)));
      const int64_t length = at::divup(count, parts);
      const int64_t first = begin + thread * length;
      if (first >= end) return;
      const at::internal::ThreadIdGuard number(thread);
      const c10::ParallelGuard guard(true);
      try {
        body(first, std::min(end, first + length));
      } catch (...) {
        if (!failed.test_and_set()) failure = std::current_exception();
      }
    }
  } region{begin, end, grain, body};
  run_region([](void* argument, int thread,
                int threads) { static_cast<Region*>(argument)->run(thread, threads); },
             &region);
  if (region.failure) std::rethrow_exception(region.failure);
}

}  // namespace symm_cp
