// Queues, threads and events of the simulated device.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <utility>

#include "driver_model.h"

namespace simulated {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kSignalBytes = 4;

// Never destroyed: streams run until the process ends.
struct Machine {
  std::mutex mutex;  // for the streams, and for handing out tickets in the order of issue
  std::set<SimStream*> streams;
  uint64_t tickets = 0;
  std::atomic<uint64_t> turn{0};
  std::atomic<int> polling{0};  // polling kernels that run
};
Machine& machine() {
  static Machine* it = new Machine;
  return *it;
}

bool hangs_on_purpose() {
  return std::any_of(std::begin(settings().faults), std::end(settings().faults),
                     [](const std::atomic<int>& fault) { return fault == kHangs; });
}

// Returns once `ready`; a wait that takes too long is a deadlock.
void spin_until(const std::function<bool()>& ready, const char* what) {
  const auto patience = std::chrono::milliseconds(settings().patience_ms);
  auto end = Clock::now() + patience;
  for (int i = 0; !ready(); ++i) {
    // Longer later: the many streams of many ranks share few processors.
    if (i > 100) std::this_thread::sleep_for(std::chrono::microseconds(i < 1000 ? 20 : 500));
    if (hangs_on_purpose()) end = Clock::now() + patience;
    if (Clock::now() > end) return report_deadlock(what);
  }
}

bool takes_multiprocessor(Kind kind) {
  if (!settings().multiprocessors) return false;
  return kind == Kind::kKernel || kind == Kind::kPollingKernel || kind == Kind::kLocalCopy;
}

}  // namespace

thread_local SimStream* served = nullptr;

SimStream* served_here() { return served; }

Settings& settings() {
  static Settings* it = new Settings;
  return *it;
}

bool faulty(Faulty what, Fault how) { return settings().faults[what] == how; }

SimStream::SimStream(int device, bool own_thread)
    : device(device), random_(std::random_device{}()) {
  {
    std::lock_guard<std::mutex> lock(machine().mutex);
    machine().streams.insert(this);
  }
  if (own_thread) std::thread([this] { serve(); }).detach();
}

void SimStream::push(Command command) {
  {
    // Both at once, so that the order in a stream is that of the tickets.
    std::lock_guard<std::mutex> all(machine().mutex);
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ended_) {
      command.ticket = machine().tickets;
      if (command.kind != Kind::kHost) ++machine().tickets;
      if (!settings().one_queue) machine().turn = machine().tickets;
      queue_.push_back(std::move(command));
      ++pushed_;
      changed_.notify_all();
      return;
    }
  }
  if (command.kind != Kind::kHost) {
    std::fprintf(stderr, "simulated driver: %s on a stream that was destroyed\n", command.name);
    std::abort();
  }
  command.run();
}

void SimStream::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  const int64_t all = pushed_;
  changed_.wait(lock, [&] { return done_ >= all; });
}

bool SimStream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= pushed_;
}

void SimStream::destroy() {
  std::lock_guard<std::mutex> lock(mutex_);
  destroyed_ = true;
  changed_.notify_all();
}

void SimStream::serve() {
  served = this;
  while (true) {
    Command command;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !queue_.empty() || destroyed_; });
      if (queue_.empty()) {
        ended_ = true;
        break;
      }
      command = std::move(queue_.front());
      queue_.pop_front();
    }
    execute(command);
    command = {};  // what it holds is let go before others hear that it has ended
    std::lock_guard<std::mutex> lock(mutex_);
    ++done_;
    if (queue_.empty() || !queue_.front().for_signal) done_ += std::exchange(ahead_, 0);
    changed_.notify_all();
  }
  std::lock_guard<std::mutex> lock(machine().mutex);
  machine().streams.erase(this);  // and not freed: somebody may be about to drain it
}

void SimStream::run_ahead() {
  auto passes = [](const Command& command) {
    return command.for_signal || command.writes_signal ||
           (command.edge && (!command.ready || command.ready()));
  };
  // A signal releases: it stays behind all that was issued before it.
  auto may_run = [](const Command& command) {
    return command.kind == Kind::kLocalCopy || command.carried > kSignalBytes;
  };
  while (true) {
    Command command;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto next = std::find_if_not(queue_.begin(), queue_.end(), passes);
      if (next == queue_.end() || !may_run(*next)) return;
      command = std::move(*next);
      queue_.erase(next);
      ++ahead_;  // it counts as done when the wait has ended
    }
    command.run();
  }
}

void SimStream::await(const std::function<bool()>& ready, std::string what, const char* name) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_for_ = std::move(what);
  }
  spin_until(ready, name);
  std::lock_guard<std::mutex> lock(mutex_);
  waiting_for_.clear();
}

void SimStream::execute(Command& command) {
  auto waits = [&](const std::function<bool()>& ready, std::string what) {
    await(ready, std::move(what), command.name);
  };
  if (command.kind == Kind::kHost) return command.run();
  const bool one_queue = settings().one_queue;
  std::atomic<uint64_t>& turn = machine().turn;
  if (one_queue && turn < command.ticket)
    waits([&] { return turn >= command.ticket; }, "its turn in the queue of all streams");
  if (const int most = settings().delay_us; most > 0 && !command.at_once)
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % most));
  if (command.kind == Kind::kWait) {
    if (!command.ready()) waits(command.ready, command.about());
    if (one_queue) ++turn;
    return;
  }
  std::atomic<int>& polling = machine().polling;
  if (takes_multiprocessor(command.kind) && polling > 0)
    waits([&] { return polling == 0; }, "a multiprocessor");
  // Whoever is next in the queue may begin while this runs.
  if (one_queue) ++turn;
  const bool fills = command.kind == Kind::kPollingKernel;
  polling += fills;
  command.run();
  polling -= fills;
}

std::string SimStream::head() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (waiting_for_.empty()) return {};
  return waiting_for_ + ", before " + std::to_string(queue_.size()) + " other commands";
}

std::vector<SimStream*> all_streams() {
  std::lock_guard<std::mutex> lock(machine().mutex);
  return {machine().streams.begin(), machine().streams.end()};
}

void drain_all() {
  for (SimStream* stream : all_streams()) stream->drain();
}

std::atomic<int> deadlocks{0};

void report_deadlock(const char* what) {
  ++deadlocks;
  if (settings().counts_deadlocks) return;
  std::string report;
  for (SimStream* stream : all_streams()) {
    const std::string head = stream->head();
    if (!head.empty()) report += "\n  a stream waits for " + head;
  }
  std::fprintf(stderr, "simulated driver: %s was not there after %d ms%s\n", what,
               settings().patience_ms.load(), report.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace simulated
