#include "watch.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "wire.h"

namespace symm_cp {

namespace {

using std::chrono::milliseconds;

constexpr size_t kLine = kFlagBytes / sizeof(uint32_t);
constexpr size_t kWaits = 4096;
constexpr size_t kNames = 512;
constexpr auto kExitGrace = std::chrono::seconds(1);  // for a copy of a few lines

std::string text(int64_t value) { return std::to_string(value); }

}  // namespace

StreamWaits::StreamWaits(const driver::Api& api, WatchedFlags about)
    : api_(api),
      about_(std::move(about)),
      lost_(about_.world_size),
      gave_up_(about_.world_size),
      pairs_(size_t{kDeviceFlags} * about_.world_size),
      names_(kNames) {
  waits_.reserve(kWaits);
  api_.expect(api_.context_get(&context_), "cuCtxGetCurrent");
  api_.expect(api_.stream_create(&stream_, driver::kNonBlocking), "cuStreamCreate");
  void* host = nullptr;
  api_.expect(api_.host_alloc(&host, pairs_.size() * kLine * sizeof(uint32_t)), "cuMemAllocHost");
  read_ = static_cast<uint32_t*>(host);
}

StreamWaits::~StreamWaits() {
  // At exit the driver may be unloaded: it then returns errors, and nothing is left to free.
  driver::Context before = nullptr;
  api_.context_get(&before);
  api_.context_set(context_);
  api_.stream_destroy(stream_);
  api_.host_free(read_);
  api_.context_set(before);
}

void StreamWaits::expect(int peer, int flag, uint32_t needed, uint32_t epoch,
                         const char* call_name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t pair = static_cast<size_t>(flag) * about_.world_size + peer;
  pairs_[pair].needed = needed;
  if (waits_.size() < kWaits) {
    waits_.push_back({pair, needed, epoch});
  } else {
    waits_[next_] = {pair, needed, epoch};
  }
  next_ = (next_ + 1) % kWaits;
  std::string& name = names_[epoch % kNames];
  if (name != call_name) name = call_name;
}

void StreamWaits::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  if (reading_) drain();
}

// Afterwards the memory may be freed: what is copied or written here takes microseconds.
void StreamWaits::drain() {
  const auto end = Clock::now() + kExitGrace;
  while (api_.stream_query(stream_) == driver::kNotReady && Clock::now() < end)
    std::this_thread::sleep_for(milliseconds(1));
}

void StreamWaits::give_up(const std::function<void(driver::Stream)>& tell) {
  close();
  tell(stream_);
  drain();
}

milliseconds StreamWaits::interval() const {
  return std::clamp(about_.timeout / 8, milliseconds(10), milliseconds(200));
}

std::optional<std::string> StreamWaits::check() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return std::nullopt;
  api_.context_set(context_);
  int mode = driver::kRelaxed;
  api_.capture_mode(&mode);  // does not disturb graphs that other threads capture
  const bool fresh = finish_reading();
  if (closed_) return std::nullopt;
  const auto reason = find_failure(fresh);
  const bool waiting =
      std::any_of(pairs_.begin(), pairs_.end(), [](const Pair& p) { return p.since.has_value(); });
  if (waiting && !reading_) begin_reading();
  return reason;
}

// Returns whether the last reading has ended.
bool StreamWaits::finish_reading() {
  if (!reading_) return false;
  const driver::Result result = api_.stream_query(stream_);
  if (result == driver::kNotReady) return false;
  reading_ = false;
  // A failed device reports its error to the threads that use it.
  closed_ = result != 0;
  for (size_t i = 0; i < pairs_.size(); ++i) {
    const uint32_t now = read_[i * kLine];
    if (now != pairs_[i].seen) pairs_[i].since.reset();
    pairs_[i].seen = now;
  }
  return true;
}

void StreamWaits::begin_reading() {
  // A rank that is lost now has raised all the flags that it ever will.
  const size_t gave_up = size_t{kGaveUpFlag} * about_.world_size;
  for (int peer = 0; peer < about_.world_size; ++peer) {
    lost_[peer] = dead(peer);
    gave_up_[peer] = pairs_[gave_up + peer].seen != 0;
  }
  const size_t bytes = pairs_.size() * kLine * sizeof(uint32_t);
  reading_ = api_.copy_to_host(read_, about_.flags, bytes, stream_) == 0;
  closed_ = !reading_;
}

bool StreamWaits::dead(int rank) const {
  const Descriptor& process = about_.processes[rank];
  pollfd entry{process.get(), POLLIN, 0};
  return process.valid() && poll(&entry, 1, 0) > 0;
}

std::optional<std::string> StreamWaits::find_failure(bool fresh) {
  const auto now = Clock::now();
  for (size_t i = 0; i < pairs_.size(); ++i) {
    Pair& pair = pairs_[i];
    if (reached(pair.seen, pair.needed)) {
      pair.since.reset();
      continue;
    }
    if (!pair.since) pair.since = now;
    const int peer = static_cast<int>(i % about_.world_size);
    const std::string who = ": rank " + text(peer);
    if (fresh && lost_[peer]) return describe(i) + who + " died";
    if (fresh && gave_up_[peer]) return describe(i) + who + " aborted the call; see its stderr";
    if (now - *pair.since > about_.timeout)
      return describe(i) + ": timed out after " + text(about_.timeout.count()) + " ms";
  }
  return std::nullopt;
}

std::string StreamWaits::describe(size_t pair) const {
  Wait first{pair, pairs_[pair].needed, 0};
  for (size_t i = 0; i < waits_.size(); ++i) {
    const Wait& wait = waits_[(next_ + kWaits - waits_.size() + i) % kWaits];
    if (wait.pair != pair || reached(pairs_[pair].seen, wait.needed)) continue;
    first = wait;
    break;
  }
  const std::string& name = names_[first.epoch % kNames];
  return (name.empty() ? std::string("an op") : name) + " in group '" + about_.group + "': rank " +
         text(about_.rank) + " waiting for flag '" + kFlagNames[pair / about_.world_size] +
         "' of rank " + text(static_cast<int64_t>(pair % about_.world_size)) + " (call " +
         text(first.needed) + ", seen " + text(pairs_[pair].seen) + ")";
}

Watcher& Watcher::instance() {
  // Never destroyed: the thread may outlive static destructors where nobody stops it.
  static Watcher* watch = new Watcher;
  return *watch;
}

void Watcher::add(const std::shared_ptr<StreamWaits>& waits) {
  std::lock_guard<std::mutex> lock(mutex_);
  all_.push_back(waits);
  if (process_ == getpid()) {
    changed_.notify_all();
    return;
  }
  // After a fork the parent's thread does not exist here.
  if (thread_.joinable()) thread_.detach();
  process_ = getpid();
  stopping_ = false;
  thread_ = std::thread([this] { serve(); });
}

void Watcher::stop() {
  if (process_ != getpid()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    process_ = 0;
    changed_.notify_all();
  }
  thread_.join();
}

void Watcher::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    std::vector<std::shared_ptr<StreamWaits>> held;
    for (const auto& weak : all_)
      if (auto waits = weak.lock()) held.push_back(std::move(waits));
    std::erase_if(all_, [](const auto& weak) { return weak.expired(); });
    auto interval = milliseconds(1000);
    for (const auto& waits : held) interval = std::min(interval, waits->interval());
    lock.unlock();
    for (const auto& waits : held) {
      const auto reason = waits->check();
      if (!reason) continue;
      std::fprintf(stderr,
                   "symm_cp: %s. A stream wait has no time-out, so the process is aborted.\n",
                   reason->c_str());
      std::fflush(stderr);
      std::abort();
    }
    held.clear();
    lock.lock();
    changed_.wait_for(lock, interval, [this] { return stopping_; });
  }
}

}  // namespace symm_cp
