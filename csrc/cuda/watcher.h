// The threads that look after the waits of streams (watch.h): a judge for the process, which never
// waits, and a reader for each context, which the driver may hold up.
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

// A thread that visits the waits of streams, again and again, until nobody else holds them.
class Rounds {
 public:
  Rounds(std::function<void()> begin, std::function<void(StreamWaits&)> visit);
  void add(const std::shared_ptr<StreamWaits>& waits);
  // Ends the thread. One that does not end within a second is left behind, with this object.
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
  // Watches them until nobody else holds them.
  void add(const driver::Api& api, const std::shared_ptr<StreamWaits>& waits);
  // Ends the threads: the driver may be unloaded after it. Waits at most a second for each.
  void stop();

 private:
  std::mutex mutex_;
  pid_t process_ = 0;  // the process whose threads they are; a fork has none
  // Never destroyed: a thread may be held up in the driver, or belong to the parent of this
  // process.
  Rounds* judge_ = nullptr;
  std::map<driver::Context, Rounds*> readers_;
};

}  // namespace symm_cp
