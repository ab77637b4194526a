#include "base/helper_pool.h"

#include <algorithm>

namespace symm_cp {

HelperPool::HelperPool(int threads) {
  for (int part = 1; part < threads; ++part) helpers_.emplace_back([this, part] { serve(part); });
}

HelperPool::~HelperPool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  begun_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void HelperPool::run(int parts, void (*body)(void*, int), void* argument) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    parts_ = parts;
    body_ = body;
    argument_ = argument;
    busy_ = static_cast<int>(helpers_.size());
    ++runs_;
  }
  begun_.notify_all();
  body(argument, 0);
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [this] { return busy_ == 0; });
}

void HelperPool::serve(int part) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (int64_t seen = 0;;) {
    begun_.wait(lock, [&] { return closing_ || runs_ != seen; });
    if (closing_) return;
    seen = runs_;
    if (part < parts_) {
      lock.unlock();
      body_(argument_, part);
      lock.lock();
    }
    if (--busy_ == 0) ended_.notify_one();
  }
}

}  // namespace symm_cp
