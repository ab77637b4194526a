// Events of torch's profiler for calls that may end in another thread.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <future>
#include <memory>

namespace symm_cp {

// If `end` is never called, the event ends when this is destroyed.
class ProfilerEvent {
 public:
  // Begins the event "symm_cp:" and `op` of the profiler that observes this thread; returns null if
  // no one observes.
  static std::shared_ptr<ProfilerEvent> begin(const char* op, at::TensorList inputs);

  // In any thread.
  void end();
  // Returns when another thread has called `end`: a profiler that stops afterwards has all of it.
  void await() const { ended_.wait(); }

 private:
  std::function<void()> end_;
  std::promise<void> end_called_;
  std::shared_future<void> ended_ = end_called_.get_future().share();
};

}  // namespace symm_cp
