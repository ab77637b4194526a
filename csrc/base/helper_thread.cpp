#include "base/helper_thread.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "base/python.h"
#include "base/team.h"

namespace symm_cp {

namespace {

// How long a thread waits for its next task before it ends.
constexpr std::chrono::seconds kIdle{10};

class Helpers {
 public:
  void add(std::function<void()> task) {
    bool enough;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
      enough = idle_ >= tasks_.size();
    }
    if (enough)
      added_.notify_one();
    else
      std::thread([this] { run(); }).detach();
  }

 private:
  void run() {
    Team::leave_callers_pool();
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      if (tasks_.empty()) {
        ++idle_;
        const bool found = added_.wait_for(lock, kIdle, [this] { return !tasks_.empty(); });
        --idle_;
        if (!found) return;
      }
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;
};

// Never destroyed: threads may end after static destructors have run. A forked process has none of
// the threads.
Helpers& helpers() {
  static std::mutex mutex;
  static Helpers* instance = nullptr;
  static int forks = -1;
  std::lock_guard<std::mutex> lock(mutex);
  if (forks != fork_count()) {
    forks = fork_count();
    instance = new Helpers;
  }
  return *instance;
}

}  // namespace

void run_in_helper_thread(std::function<void()> task) { helpers().add(std::move(task)); }

}  // namespace symm_cp
