#include "cuda/watcher.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace symm_cp {

namespace {

using std::chrono::milliseconds;

constexpr auto kIdle = milliseconds(1000);
constexpr auto kEndGrace = std::chrono::seconds(1);

void abort_if_hopeless(StreamWaits& waits) {
  const auto reason = waits.judge();
  if (!reason) return;
  std::fprintf(stderr, "symm_cp: %s. A stream wait has no time-out, so the process is aborted.\n",
               reason->c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace

Rounds::Rounds(std::function<void()> begin, std::function<void(StreamWaits&)> visit)
    : begin_(std::move(begin)), visit_(std::move(visit)), thread_([this] { serve(); }) {}

void Rounds::add(const std::shared_ptr<StreamWaits>& waits) {
  std::lock_guard<std::mutex> lock(mutex_);
  all_.push_back(waits);
  changed_.notify_all();
}

void Rounds::stop() {
  std::unique_lock<std::mutex> lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  const bool ended = changed_.wait_for(lock, kEndGrace, [this] { return ended_; });
  lock.unlock();
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void Rounds::serve() {
  begin_();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    std::vector<std::shared_ptr<StreamWaits>> held;
    for (const auto& weak : all_)
      if (auto waits = weak.lock()) held.push_back(std::move(waits));
    std::erase_if(all_, [](const auto& weak) { return weak.expired(); });
    auto interval = kIdle;
    for (const auto& waits : held) interval = std::min(interval, waits->interval());
    lock.unlock();
    for (const auto& waits : held) visit_(*waits);
    held.clear();
    lock.lock();
    const size_t known = all_.size();
    changed_.wait_for(lock, interval, [&] { return stopping_ || all_.size() != known; });
  }
  ended_ = true;
  changed_.notify_all();
}

Watcher& Watcher::instance() {
  // Never destroyed: threads that nobody stops may outlive static destructors.
  static Watcher* watch = new Watcher;
  return *watch;
}

void Watcher::add(const driver::Api& api, const std::shared_ptr<StreamWaits>& waits) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (process_ != getpid()) {
    process_ = getpid();
    judge_ = new Rounds([] {}, abort_if_hopeless);
    readers_.clear();
  }
  Rounds*& reader = readers_[waits->context()];
  if (reader == nullptr) {
    const auto begin = [&api, context = waits->context()] {
      api.context_set(context);
      int mode = driver::kRelaxed;
      api.capture_mode(&mode);  // leaves other threads' captures of graphs alone
    };
    reader = new Rounds(begin, [](StreamWaits& those) { those.read(); });
  }
  judge_->add(waits);
  reader->add(waits);
}

void Watcher::stop() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (process_ != getpid()) return;
  process_ = 0;
  judge_->stop();
  for (const auto& [context, reader] : readers_) reader->stop();
}

}  // namespace symm_cp
