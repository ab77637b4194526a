// Threads for what must not hold up the caller: callbacks of futures, which may wait for other
// collectives, and stores, which may never answer.
#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <utility>

#include "pauses.h"

namespace symm_cp {

// Runs a task in another thread, at once: none waits for one that blocks. It must not throw.
void run_elsewhere(std::function<void()> task);

// Returns or throws what a task does, which another thread runs; nothing after `limit`. The thread
// may then go on for good, with what the task holds. `on_slice` runs meanwhile, and may throw.
template <class Result>
std::optional<Result> run_for(
    std::chrono::milliseconds limit, std::function<Result()> task,
    const std::function<void()>& on_slice = [] {}) {
  constexpr std::chrono::milliseconds kSlice{50};
  auto promise = std::make_shared<std::promise<Result>>();
  auto result = promise->get_future();
  run_elsewhere([promise, task = std::move(task)]() mutable {
    // The task lets go of what it holds before the caller goes on, who may be the last to hold it.
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
