#include "lane.h"

#include <algorithm>

#include "error.h"
#include "trace.h"

namespace symm_cp {

Lane::~Lane() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    // Unfinished programs are given up, so that neither this thread's join nor a peer's wait hangs.
    if (running_ || !queue_.empty())
      channel_->abort("the workspace was closed with work in flight");
    queue_.clear();
  }
  work_.notify_all();
  if (engine_.joinable()) engine_.join();
}

int64_t Lane::submit(Program program, bool background) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.empty()) throw PeerError(failure_);
  queue_.push_back(std::move(program));
  const int64_t ticket = ++submitted_;
  if (background) {
    wake_ = true;
    if (!engine_.joinable()) engine_ = std::thread([this] { serve(); });
    work_.notify_one();
  }
  return ticket;
}

// Runs the oldest program without holding the lock.
void Lane::run_one(std::unique_lock<std::mutex>& lock) {
  running_ = true;
  Program program = std::move(queue_.front());
  queue_.pop_front();
  const bool skip = !failure_.empty();
  lock.unlock();
  std::string failure;
  if (!skip) {
    try {
      const Plan& plan = *program.plan;
      const auto& commands = program.whole ? plan.whole : plan.rest;
      channel_->run(commands.data(), static_cast<int>(commands.size()), plan.references.data(),
                    program.operands.data(), program.epoch, plan.what.c_str());
    } catch (const std::exception& error) {
      failure = error.what();
      channel_->abort(failure);
    }
  }
  lock.lock();
  running_ = false;
  ++completed_;
  if (!failure.empty()) {
    failure_ = failure;
    failed_ticket_ = completed_;
  }
  done_.notify_all();
}

void Lane::serve() {
  Recorder::enter_engine();
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return closing_ || (wake_ && !running_); });
    if (closing_) return;
    if (queue_.empty()) {
      wake_ = false;
      continue;
    }
    run_one(lock);
  }
}

void Lane::wait(int64_t ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  ticket = std::min(ticket, submitted_);
  while (completed_ < ticket) {
    if (!running_ && !queue_.empty()) {
      run_one(lock);
      work_.notify_one();  // the engine may have found the lane taken
    } else {
      done_.wait(lock);
    }
  }
  if (!failure_.empty() && ticket >= failed_ticket_) throw PeerError(failure_);
}

bool Lane::finished(int64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ >= ticket;
}

bool Lane::failed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return !failure_.empty();
}

bool Lane::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return !running_ && queue_.empty();
}

}  // namespace symm_cp
