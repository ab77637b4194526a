#include "exchange/trace.h"

#include <cstring>
#include <ctime>
#include <utility>

namespace symm_cp {

namespace {

thread_local bool in_engine = false;

}  // namespace

Recorder& Recorder::instance() {
  static Recorder recorder;
  return recorder;
}

void Recorder::record(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (on) events_.clear();
  on_.store(on, std::memory_order_relaxed);
}

void Recorder::add(const Command& command, int64_t start, int64_t end, uint32_t epoch,
                   const char* call_name) {
  TraceEvent event{command, start, end, epoch, in_engine ? 1 : 0, {}};
  std::strncpy(event.call_name, call_name, sizeof(event.call_name) - 1);
  std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back(event);
}

std::vector<TraceEvent> Recorder::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(events_, {});
}

int64_t Recorder::now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1000000000} + time.tv_nsec;
}

void Recorder::enter_engine() { in_engine = true; }

}  // namespace symm_cp
