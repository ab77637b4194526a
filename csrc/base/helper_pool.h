// The library's own threads that share the work of one thread, such as a copy engine.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "base/team.h"

namespace symm_cp {

// A pool for use by one thread at a time. Its threads sleep between runs.
class HelperPool : public Pool {
 public:
  // `threads` includes the thread that calls `run`.
  explicit HelperPool(int threads);
  ~HelperPool() override;
  HelperPool(const HelperPool&) = delete;
  HelperPool& operator=(const HelperPool&) = delete;

  int threads() override { return static_cast<int>(helpers_.size()) + 1; }
  void run(int parts, void (*body)(void* argument, int part), void* argument) override;

 private:
  void serve(int part);

  std::mutex mutex_;
  std::condition_variable begun_, ended_;
  int64_t runs_ = 0;
  int parts_ = 0;
  int busy_ = 0;  // helpers that have not finished their part
  void (*body_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  bool closing_ = false;
  std::vector<std::thread> helpers_;
};

}  // namespace symm_cp
