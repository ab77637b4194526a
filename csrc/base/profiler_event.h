// Events of torch's profiler for calls that another thread may carry out.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <memory>

namespace symm_cp {

class ProfilerEvent {
 public:
  // Begins the event "symm_cp:<op>" in the profiler that observes this thread; returns null without
  // an observer.
  static std::shared_ptr<ProfilerEvent> begin(const char* op, at::TensorList inputs);

  ProfilerEvent(const ProfilerEvent&) = delete;
  ProfilerEvent& operator=(const ProfilerEvent&) = delete;
  // Ends the event if `end` has not.
  ~ProfilerEvent();

  // Ends the event if the profiler observes this thread. On other threads the profiler may have
  // been stopped, and a stopped profiler has freed its record of the event. So the thread that
  // waits for the call ends the event, not the thread that carries the call out.
  void end();

 private:
  struct Record;

  explicit ProfilerEvent(std::unique_ptr<Record> record);

  std::unique_ptr<Record> record_;
  std::atomic_flag ended_ = ATOMIC_FLAG_INIT;
};

}  // namespace symm_cp
