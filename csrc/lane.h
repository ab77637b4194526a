// The copy engine: a queue of native programs and a background thread that carries them out.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "plan.h"

namespace symm_cp {

// Programs run one after the other, in the order of submission. A thread that waits for one helps:
// it runs what is queued up to it unless the engine already does, so a small transfer costs no
// hand-over between threads. An idle engine sleeps; the thread starts with the first program that
// asks for it, and ends with the lane.
class Lane {
 public:
  explicit Lane(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}
  ~Lane();

  struct Program {
    std::shared_ptr<const Plan> plan;
    bool whole;  // else only its rest: the caller has published
    std::vector<void*> operands;
    uint32_t epoch;
  };

  // Returns a ticket. With `background` false the engine is left asleep: the program runs when
  // somebody waits for it, or with the next program that wakes the engine.
  int64_t submit(Program program, bool background);
  // Returns when the program was carried out, or with a ticket beyond the last one when all were;
  // throws what it threw. Any thread, any order.
  void wait(int64_t ticket);
  bool finished(int64_t ticket);
  // True when nothing is queued or running.
  bool idle();
  // True once a program failed: none will run any more.
  bool failed();

 private:
  void serve();
  void run_one(std::unique_lock<std::mutex>& lock);

  std::shared_ptr<Channel> channel_;
  std::mutex mutex_;
  std::condition_variable work_;  // for the engine
  std::condition_variable done_;  // for waiters
  std::deque<Program> queue_;
  std::thread engine_;
  int64_t submitted_ = 0;
  int64_t completed_ = 0;
  bool running_ = false;
  bool wake_ = false;
  bool closing_ = false;
  std::string failure_;
  int64_t failed_ticket_ = 0;
};

}  // namespace symm_cp
