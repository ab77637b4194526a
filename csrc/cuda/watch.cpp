#include "cuda/watch.h"

#include <poll.h>

#include <algorithm>
#include <thread>

#include "channel/wire.h"

namespace symm_cp {

namespace {

using std::chrono::milliseconds;

constexpr size_t kLine = kFlagBytes / sizeof(uint32_t);
constexpr size_t kWaits = 4096;
constexpr size_t kNames = 512;
constexpr auto kExitGrace = std::chrono::seconds(1);  // for a copy of a few lines
// How long to wait for a reading after a peer died: only a reading shows whether the peer had
// raised all its flags, and the driver may take this long for it while it loads kernels.
constexpr auto kReadingGrace = milliseconds(10000);

// The values of a rank's mark at its peers.
constexpr uint32_t kGaveUp = 1;
constexpr uint32_t kDrained = 2;  // its later signals are worthless

std::string text(int64_t value) { return std::to_string(value); }

std::mutex free_mutex;
std::vector<HostFlags> free_host_flags;

HostFlags take_host_flags(const driver::Api& api, size_t count) {
  HostFlags made;
  api.expect(api.context_get(&made.context), "cuCtxGetCurrent");
  {
    std::lock_guard<std::mutex> lock(free_mutex);
    for (HostFlags& known : free_host_flags) {
      if (known.context != made.context || known.count < count) continue;
      std::swap(known, free_host_flags.back());
      made = free_host_flags.back();
      free_host_flags.pop_back();
      return made;
    }
  }
  api.expect(api.stream_create(&made.reading, driver::kNonBlocking), "cuStreamCreate");
  api.expect(api.stream_create(&made.writing, driver::kNonBlocking), "cuStreamCreate");
  void* memory = nullptr;
  api.expect(api.host_alloc(&memory, count * sizeof(uint32_t)), "cuMemAllocHost");
  made.words = static_cast<uint32_t*>(memory);
  made.count = count;
  return made;
}

}  // namespace

StreamWaits::StreamWaits(const driver::Api& api, WatchedFlags about)
    : api_(api),
      about_(std::move(about)),
      peers_(about_.world_size),
      pairs_(size_t{kDeviceFlags} * about_.world_size),
      names_(kNames) {
  waits_.reserve(kWaits);
  // Room for the flags as read, and for a value to write to each flag and each mark.
  host_ = take_host_flags(api_, pairs_.size() * (kLine + 1) + kDrained + 1);
}

StreamWaits::~StreamWaits() {
  std::lock_guard<std::mutex> lock(free_mutex);
  if (!lost_ && !given_up_) free_host_flags.push_back(host_);
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
  {
    std::unique_lock<std::mutex> lock(mutex_);
    closed_ = true;
    if (!closing_) closing_ = Clock::now();
    idle_.wait_for(lock, kExitGrace, [this] { return !reading_; });
  }
  for (const auto end = Clock::now() + kExitGrace; !written() && Clock::now() < end;)
    std::this_thread::sleep_for(milliseconds(1));
}

bool StreamWaits::written() {
  // Only a rank that has given up writes, and giving up is final.
  return !given_up_ || api_.stream_query(host_.writing) != driver::kNotReady;
}

void StreamWaits::give_up() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_ || given_up_) return;
    given_up_ = Clock::now();
  }
  api_.expect(mark_peers(kGaveUp), "cuMemcpyAsync");
}

milliseconds StreamWaits::interval() const {
  return std::clamp(about_.timeout / 8, milliseconds(10), milliseconds(200));
}

// --- the reader

void StreamWaits::read() {
  const auto begun = Clock::now();
  std::vector<Write> writes;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // While draining, read on: a late signal may overwrite an awaited value before the stream
    // reaches that wait.
    if (closed_ || (!waiting() && unsure_.empty() && !draining_)) return;
    reading_ = begun;
    for (size_t i = 0; draining_ && i < pairs_.size(); ++i)
      if (!reached(pairs_[i].seen, pairs_[i].needed)) writes.push_back({i, pairs_[i].needed});
  }
  const bool done = end_waits(writes) && copy_flags();
  if (done) deliver(begun);
  std::lock_guard<std::mutex> lock(mutex_);
  reading_.reset();
  // A failed device reports its error to the threads that use it.
  closed_ = closed_ || !done;
  idle_.notify_all();
}

bool StreamWaits::copy_flags() {
  const size_t bytes = pairs_.size() * kLine * sizeof(uint32_t);
  if (api_.copy_to_host(host_.words, about_.flags, bytes, host_.reading) != 0) return false;
  auto pause = std::chrono::microseconds(50);
  driver::Result result = 0;
  while ((result = api_.stream_query(host_.reading)) == driver::kNotReady) {
    if (abandoned()) return false;
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(10000));
  }
  return result == 0;
}

bool StreamWaits::abandoned() {
  std::lock_guard<std::mutex> lock(mutex_);
  lost_ = closing_ && Clock::now() > *closing_ + kExitGrace;
  return lost_;
}

void StreamWaits::deliver(Clock::time_point begun) {
  std::lock_guard<std::mutex> lock(mutex_);
  read_ = begun;
  std::vector<size_t> ended;
  for (size_t i = 0; i < pairs_.size(); ++i) {
    Pair& pair = pairs_[i];
    const uint32_t now = host_.words[i * kLine];
    if (!reached(pair.seen, pair.needed) && reached(now, pair.needed)) ended.push_back(i);
    if (now != pair.seen) pair.since.reset();
    pair.seen = now;
  }
  for (int peer = 0; peer < about_.world_size; ++peer)
    if (mark_of(peer) != 0 && !peers_[peer].marked) peers_[peer].marked = Clock::now();
  // The flags are not copied atomically: the mark may have been read before the flag. So a wait
  // that ended under a mark is checked again.
  const auto mark = [this](size_t pair) { return mark_of(pair % about_.world_size); };
  unsure_.insert(unsure_.end(), ended.begin(), ended.end());
  for (size_t pair : unsure_)
    if (mark(pair) == kDrained && !given_up_) deceived_ = pair;
  std::erase_if(ended, [&](size_t pair) { return mark(pair) == 0; });
  unsure_ = std::move(ended);
}

bool StreamWaits::end_waits(const std::vector<Write>& writes) {
  if (writes.empty()) return true;
  driver::Result result = mark_peers(kDrained);
  uint32_t* values = host_.words + pairs_.size() * kLine;
  for (const Write& write : writes) {
    values[write.pair] = write.value;
    const auto from = reinterpret_cast<driver::Address>(values + write.pair);
    const driver::Address to = about_.flags + write.pair * kFlagBytes;
    const driver::Result copied = api_.copy(to, from, sizeof(uint32_t), host_.writing);
    if (result == 0) result = copied;
  }
  return result == 0;
}

driver::Result StreamWaits::mark_peers(uint32_t mark) {
  uint32_t* value = host_.words + pairs_.size() * (kLine + 1) + mark;
  *value = mark;
  const auto from = reinterpret_cast<driver::Address>(value);
  driver::Result result = api_.copy(about_.mark, from, sizeof(uint32_t), host_.writing);
  for (driver::Address to : about_.marks) {
    const driver::Result copied = api_.copy(to, about_.mark, sizeof(uint32_t), host_.writing);
    if (result == 0) result = copied;
  }
  return result;
}

// --- the judge

std::optional<std::string> StreamWaits::judge() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return std::nullopt;
  const auto now = Clock::now();
  if (deceived_)
    return describe(*deceived_) + ": rank " +
           text(static_cast<int64_t>(*deceived_ % about_.world_size)) +
           " aborted the call; see its stderr";
  if (!waiting()) {
    if (draining_) draining_ = now;
    return std::nullopt;
  }
  look_for_the_dead(now);
  return given_up_ ? judge_given_up(now) : find_failure(now);
}

bool StreamWaits::waiting() const {
  return std::any_of(pairs_.begin(), pairs_.end(),
                     [](const Pair& pair) { return !reached(pair.seen, pair.needed); });
}

size_t StreamWaits::mark_of(size_t peer) const {
  return pairs_[size_t{kGaveUpFlag} * about_.world_size + peer].seen;
}

void StreamWaits::look_for_the_dead(Clock::time_point now) {
  for (int peer = 0; peer < about_.world_size; ++peer) {
    const Descriptor& process = about_.processes[peer];
    pollfd entry{process.get(), POLLIN, 0};
    if (!peers_[peer].died && process.valid() && poll(&entry, 1, 0) > 0) peers_[peer].died = now;
  }
}

std::optional<std::string> StreamWaits::find_failure(Clock::time_point now) {
  const auto grace = std::min(kReadingGrace, about_.timeout);
  for (size_t i = 0; i < pairs_.size(); ++i) {
    Pair& pair = pairs_[i];
    if (reached(pair.seen, pair.needed)) {
      pair.since.reset();
      continue;
    }
    if (!pair.since) pair.since = now;
    const size_t rank = i % about_.world_size;
    const std::string who = ": rank " + text(static_cast<int64_t>(rank));
    // A rank lost before a reading began has raised all the flags that it ever will.
    const auto lost = [&](const std::optional<Clock::time_point>& then) {
      return then && (read_ >= *then || now - *then > grace);
    };
    if (lost(peers_[rank].died)) return describe(i) + who + " died" + silence(now);
    if (lost(peers_[rank].marked))
      return describe(i) + who + " aborted the call; see its stderr" + silence(now);
    if (now - *pair.since > about_.timeout)
      return describe(earliest(i)) + ": timed out after " + text(about_.timeout.count()) + " ms" +
             silence(now);
  }
  return std::nullopt;
}

std::optional<std::string> StreamWaits::judge_given_up(Clock::time_point now) {
  bool alone = true;
  for (int peer = 0; peer < about_.world_size; ++peer)
    alone = alone && (peer == about_.rank || peers_[peer].died || mark_of(peer) != 0);
  if (!draining_ && (alone || now - *given_up_ > about_.timeout)) draining_ = now;
  if (!draining_ || now - *draining_ <= about_.timeout) return std::nullopt;
  // Either one queue serves all streams, with the writes behind the waits, or the driver hangs.
  for (size_t i = 0; i < pairs_.size(); ++i)
    if (!reached(pairs_[i].seen, pairs_[i].needed))
      return describe(i) + ": this rank aborted the call, but its streams do not end" +
             silence(now);
  return std::nullopt;
}

// Returns how long the driver has not answered, if that is unusual.
std::string StreamWaits::silence(Clock::time_point now) const {
  if (!reading_ || now - *reading_ < std::min(about_.timeout / 2, milliseconds(2000))) return "";
  const auto time = std::chrono::duration_cast<milliseconds>(now - *reading_);
  return " (the driver did not answer for " + text(time.count()) + " ms)";
}

// Returns the pair of the first wait that has not ended, else `pair`: later waits are for later
// signals.
size_t StreamWaits::earliest(size_t pair) const {
  for (size_t i = 0; i < waits_.size(); ++i) {
    const Wait& wait = waits_[(next_ + kWaits - waits_.size() + i) % kWaits];
    if (!reached(pairs_[wait.pair].seen, wait.needed)) return wait.pair;
  }
  return pair;
}

// Explains a wait between two ranks if only one reads its input in place: the two then raise
// different flags.
std::string StreamWaits::disagreement(size_t pair, uint32_t needed) const {
  const size_t ranks = about_.world_size, flag = pair / ranks, peer = pair % ranks;
  const bool in_place = flag == kReadyInPlaceFlag;
  if (!in_place && flag != kReadyFlag) return {};
  const size_t other = in_place ? kReadyFlag : kReadyInPlaceFlag;
  if (pairs_[other * ranks + peer].seen != needed) return {};
  return std::string("; of these two ranks only ") + (in_place ? "this" : "that") +
         " one passed a tensor of symm_cp.read_in_place";
}

std::string StreamWaits::describe(size_t pair) const {
  Wait first{pair, pairs_[pair].needed, 0};
  for (size_t i = 0; i < waits_.size(); ++i) {
    const Wait& wait = waits_[(next_ + kWaits - waits_.size() + i) % kWaits];
    if (wait.pair != pair) continue;
    first = wait;
    if (!reached(pairs_[pair].seen, wait.needed)) break;
  }
  const std::string& name = names_[first.epoch % kNames];
  return (name.empty() ? std::string("an op") : name) + " in group '" + about_.group + "': rank " +
         text(about_.rank) + " waiting for flag '" + kFlagNames[pair / about_.world_size] +
         "' of rank " + text(static_cast<int64_t>(pair % about_.world_size)) + " (call " +
         text(first.needed) + ", seen " + text(pairs_[pair].seen) + ")" +
         disagreement(pair, first.needed);
}

}  // namespace symm_cp
