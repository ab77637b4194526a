// The copy engine: a queue of native programs and a background thread that carries them out.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "channel/channel.h"
#include "exchange/exchange_run.h"

namespace symm_cp {

class Group;
class Workspace;

// Programs are the calls of the channel `async`, carried out one after the other in the order of
// their numbers. A thread that waits for one runs the queue up to it, unless the engine
// already does, so a small transfer needs no hand-over between threads. An idle engine
// sleeps; the thread starts with the first program that asks for it, and ends with the lane. A
// failure ends only its own program: later programs go on.
class Lane {
 public:
  explicit Lane(Group& group) : group_(group) {}
  ~Lane() { close(); }

  struct Program {
    int64_t number;  // of the call
    std::string call_name;
    int64_t slot_bytes = 0;
    std::unique_ptr<ExchangeRun> exchange = nullptr;  // without one the call only makes slots
    std::optional<Call> begun = std::nullopt;  // the caller has published; only the rest is left
    Done done = {};
  };

  // With `background` false the engine is not woken: the program runs when a thread waits for
  // it, or with the next program that wakes the engine.
  void submit(Program program, bool background);
  // Takes the lane for a call that the calling thread carries out itself, up to `end_now`; false
  // when another program is queued or running.
  bool begin_now(int64_t number, const std::string& call_name);
  void end_now(int64_t number);
  // Queues the refusal of a call, which is reported to the peers when its turn comes. Never waits.
  void refuse(int64_t number, const std::string& cause, const CallSite* other);
  // Returns when the call has ended (all calls, for a number beyond the last), and throws if it
  // failed. Any thread, any order.
  void wait(int64_t number);
  bool finished(int64_t number);
  // Makes the engine run the queued programs, whether or not a thread waits.
  void wake();
  // True when nothing is queued or running.
  bool idle();
  // Ends the engine; a running program fails at its next check, because the group is closing, and
  // queued programs fail.
  void close();

 private:
  struct Item {
    Program program;
    std::string refusal;  // not empty: instead of the program
    std::optional<CallSite> other;
  };
  void push(Item item, bool background);
  void wake_engine();  // with the lock held
  void serve();
  bool run_one(std::unique_lock<std::mutex>& lock);
  std::string carry_out(Item& item, bool& interrupted);
  void run_program(Program& program, Workspace& workspace);

  Group& group_;
  std::mutex mutex_;
  std::condition_variable work_;  // for the engine
  std::condition_variable done_;  // for waiters
  std::deque<Item> queue_;
  std::thread engine_;
  int64_t submitted_ = 0;
  int64_t completed_ = 0;
  bool running_ = false;
  std::string running_name_;
  int64_t running_number_ = 0;
  bool wake_ = false;
  bool closing_ = false;
  std::map<int64_t, std::string> failures_;  // of calls that may still be waited for
};

}  // namespace symm_cp
