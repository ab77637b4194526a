// The threads that watch the waits of streams (watch.h): one judge per process, which never waits,
// and one reader per context, which the driver may block.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda/driver.h"
#include "cuda/watch.h"

namespace symm_cp {

// A thread that visits the waits of streams repeatedly, until nobody else holds them.
class Rounds {
 public:
  Rounds(std::function<void()> begin, std::function<void(StreamWaits&)> visit);
  void add(const std::shared_ptr<StreamWaits>& waits);
  // Ends the thread. A thread that does not end within a second is left running, and keeps this
  // object.
  void stop();

 private:
  void serve();

  std::function<void()> begin_;
  std::function<void(StreamWaits&)> visit_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<StreamWaits>> all_;
  bool stopping_ = false;
  bool ended_ = false;
  std::thread thread_;
};

class Watcher {
 public:
  static Watcher& instance();
  // Watches waits until nobody else holds them.
  void add(const driver::Api& api, const std::shared_ptr<StreamWaits>& waits);
  // Ends the threads, so that the driver may be unloaded. Waits at most a second for each.
  void stop();

 private:
  std::mutex mutex_;
  pid_t process_ = 0;  // the process that owns the threads; a fork has none
  // Never destroyed: a thread may be blocked in the driver, or belong to this process's parent.
  Rounds* judge_ = nullptr;
  std::map<driver::Context, Rounds*> readers_;
};

}  // namespace symm_cp
