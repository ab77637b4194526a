// Copies and reductions by several threads of a rank.
//
// The functions that copy and reduce (exchange/copy.h, exchange/reduce.h) divide large work among
// the threads of the calling thread's Team. Without a Team they work alone: in the threads that
// this library starts itself, and where no caller has opened one. The division changes neither
// results nor what ranks send each other, so ranks may divide differently.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

namespace symm_cp {

// Threads that carry out parts of work side by side.
class Pool {
 public:
  virtual ~Pool() = default;
  // The number of threads that the calling thread has at this moment: 1 within a part.
  virtual int threads() = 0;
  // Calls body(argument, part) for each part, part p always in the same thread, and returns when
  // all have returned. There are at most `threads()` parts. `body` must not throw.
  virtual void run(int parts, void (*body)(void* argument, int part), void* argument) = 0;
};

// The pool of the threads that call ops. Loading the library sets torch's threads
// (base/parallel.cpp); without a pool, each thread works alone.
void set_pool(Pool* pool);
Pool& caller_pool();

// Which threads copy and reduce: one; all, if there are enough cores; or always all.
enum class Threads { kOne, kWhereCoresSuffice, kAll };
void set_threads(Threads threads);
// The number of a copy engine's own threads; see lane.cpp.
void set_background_threads(int threads);
int background_threads();

// The cores that threads may run on. In a loop of short parts, a thread that has to wait for a core
// holds up all others for a time slice, some milliseconds: more threads help only if each has a
// core of its own.
class Cores {
 public:
  virtual ~Cores() = default;
  // Whether there is a core for each of this many threads of the calling thread's pool, beside the
  // threads of other ranks.
  virtual bool suffice(int threads) = 0;
};

// The cores of this process, for calls without other ranks.
Cores& own_cores();

// One bit for each core, by its number. `cores_of` returns the cores on which a pool's threads may
// run.
constexpr int kMostCores = 2048;
using CoreMask = std::array<uint32_t, kMostCores / 32>;
CoreMask cores_of(Pool& pool, int threads);
int count_cores(const CoreMask& mask);

// Within its scope the calling thread divides large work.
class Team {
 public:
  // Uses the pool of the threads that call ops, if the cores suffice for it and for the ranks that
  // may work at the same time. Has no effect in threads that have left that pool.
  explicit Team(Cores& cores);
  // Uses all threads of another pool, regardless of the number of cores.
  explicit Team(Pool& pool);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // The number of parts into which the calling thread divides work on `bytes`: 1 if the work is so
  // small that the threads' synchronisation would take longer.
  static int parts_of(int64_t bytes) { return bytes < kLeastBytes ? 1 : parts_of_large(bytes); }
  // Calls body(part) for each part.
  template <class Body>
  static void run(int parts, const Body& body) {
    run_parts(
        parts, [](void* argument, int part) { (*static_cast<const Body*>(argument))(part); },
        const_cast<Body*>(&body));
  }

  // How often work was divided in this process, for tests.
  static int64_t divisions();
  // From now on the calling thread, which the library has started, does not use the pool of the
  // threads that call ops: OpenMP would start a second set of threads for it.
  static void leave_callers_pool();

 private:
  // Work of at least this many bytes is divided, into parts of at least half that; if there are
  // more threads than parts, some threads get none. At 256 KiB one thread copies in 1.17 of the
  // time of two and adds in 1.25 (benchmarks/results/threads_1.json); at half of that they tie.
  static constexpr int64_t kLeastBytes = int64_t{128} << 10;

  static int parts_of_large(int64_t bytes);
  static void run_parts(int parts, void (*body)(void*, int), void* argument);
  int threads();

  Pool& pool_;
  Cores* cores_;
  int threads_ = 0;  // 0: not yet decided
  Team* outer_;
};

// A page: the system allocates each page on the memory node of the first thread that writes to it.
constexpr int64_t kPage = 4096;

// Calls body(begin, end) for parts of the bytes that begin at `to`: one thread writes all of a
// page, since the first thread to touch a page decides its memory node. Parts are multiples of
// `unit` bytes, a power of two up to 64.
template <class Body>
void divide_bytes(const void* to, int64_t bytes, int64_t unit, const Body& body) {
  const int parts = Team::parts_of(bytes);
  if (parts == 1) return body(int64_t{0}, bytes);
  const int64_t first = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kPage);
  const auto cut = [&](int part) {
    if (part == 0 || part == parts) return part == 0 ? int64_t{0} : bytes;
    const int64_t even = bytes / parts * part;
    return ((first + even) / kPage * kPage - first) / unit * unit;
  };
  Team::run(parts, [&](int part) { body(cut(part), cut(part + 1)); });
}

// Calls body(begin, end) for parts of the rows; `bytes` is the size of all rows together.
template <class Body>
void divide_rows(int64_t rows, int64_t bytes, const Body& body) {
  const int wanted = Team::parts_of(bytes);
  const int parts = static_cast<int>(std::min<int64_t>(wanted, rows));
  // A few long rows are better processed one after the other, each divided among the threads.
  if (parts < 2 || (parts < wanted && Team::parts_of(bytes / rows) > 1))
    return body(int64_t{0}, rows);
  Team::run(parts, [&](int part) { body(rows * part / parts, rows * (part + 1) / parts); });
}

}  // namespace symm_cp
