// Threads for tasks that must not hold up the caller: callbacks of futures, which may wait for
// other collectives, and requests to stores, which may never answer.
#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <utility>

#include "base/pauses.h"

namespace symm_cp {

// Runs a task in another thread, at once, even if other tasks block. It must not throw.
void run_in_helper_thread(std::function<void()> task);

// Runs a task in another thread; returns its result, throws its exception, or returns nullopt after
// `limit`. In that case the task may run forever and keep its captures. `on_slice` runs in the
// calling thread every 50 ms, and may throw.
template <class Result>
std::optional<Result> run_for(
    std::chrono::milliseconds limit, std::function<Result()> task,
    const std::function<void()>& on_slice = [] {}) {
  constexpr std::chrono::milliseconds kSlice{50};
  auto promise = std::make_shared<std::promise<Result>>();
  auto result = promise->get_future();
  run_in_helper_thread([promise, task = std::move(task)]() mutable {
    // Destroys the task's captures before the caller continues, so that the caller is the last
    // owner of shared objects.
    pause_at_random();
    try {
      Result made = task();
      task = nullptr;
      promise->set_value(std::move(made));
    } catch (...) {
      task = nullptr;
      promise->set_exception(std::current_exception());
    }
  });
  const auto end = std::chrono::steady_clock::now() + limit;
  while (result.wait_until(std::min(end, std::chrono::steady_clock::now() + kSlice)) !=
         std::future_status::ready) {
    if (std::chrono::steady_clock::now() >= end) return std::nullopt;
    on_slice();
  }
  return result.get();
}

}  // namespace symm_cp
