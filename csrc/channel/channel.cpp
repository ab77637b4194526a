#include "channel/channel.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/probe.h"
#include "channel/group.h"

namespace symm_cp {

namespace {

template <class T>
T* at(void* base, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

}  // namespace

Channel::Channel(Group& group, int index, std::shared_ptr<Mapping> mapping, WorkspaceLayout layout)
    : group_(group),
      index_(index),
      mapping_(std::move(mapping)),
      layout_(layout),
      spins_(spin_rounds(mapping_->world_size())) {}

Word* Channel::flag_word(int owner, int writer, int flag) const {
  return at<Word>(mapping_->data()[owner],
                  layout_.flags + flag_offset(flag, writer, mapping_->world_size()));
}

Record& Channel::record(int rank, uint32_t epoch) const {
  return *at<Record>(mapping_->data()[rank], layout_.record_offset(epoch));
}

Failure& Channel::failure(int rank, uint32_t epoch) const {
  return *at<Failure>(mapping_->data()[rank], layout_.failure_offset(epoch));
}

void* Channel::slot(int rank, uint32_t epoch) const {
  return at<void>(mapping_->data()[rank], layout_.slot_offset(epoch));
}

bool Channel::entered(int peer, uint32_t epoch) const {
  for (int flag = 0; flag < layout_.flag_count; ++flag)
    if (reached(flag_word(mapping_->rank(), peer, flag)->load(), ticket(epoch, 0))) return true;
  return false;
}

bool Channel::begin(Call& call, bool movable) {
  bool next = true;
  if (failed_epoch_ == 0) {
    failed_ = {};
    reach_ = -1;
  } else {
    wait_for_failed_call(call);
    forget_failures_before(call);
    next = agree_on_call(call, movable);
  }
  begun_epoch_ = call.epoch;
  digest_ = next ? call.digest : 0;
  in_step_ = call.in_step;
  return next;
}

void Channel::forget_failures_before(const Call& call) {
  for (size_t i = 0; i < failed_.size(); ++i)
    if (failed_in_step_[i] < call.in_step) failed_[i] = 0;
}

void Channel::wait_for_failed_call(Call& call) {
  for (int peer = 0; peer < mapping_->world_size(); ++peer) {
    if (peer == mapping_->rank()) continue;
    // Any flag will do: a peer that also failed the call has raised all its flags.
    wait_for(
        flag_word(mapping_->rank(), peer, 0), peer, call,
        [&](uint32_t) { return entered(peer, failed_epoch_); },
        [&] {
          return "rank " + std::to_string(peer) + " to come to call " +
                 std::to_string(call.number - (call.epoch - failed_epoch_)) +
                 ", which failed here (" + failure(mapping_->rank(), failed_epoch_).cause + ")";
        });
  }
  failed_epoch_ = 0;
}

// The standing of each rank that comes to this call after a failure; nullopt for ranks without one.
// All ranks get the same result.
std::vector<std::optional<Standing>> Channel::standings(Call& call) {
  const int rank = mapping_->rank(), size = mapping_->world_size();
  std::vector<std::optional<Standing>> found(static_cast<size_t>(size));
  const WithoutGil without_gil;
  const Waiting waiting(call.budget);
  Clock::time_point looked = Clock::now();
  std::optional<Blocked> blocked;
  for (int peer = 0; peer < size; ++peer) {
    const Board& board = mapping_->peers()->board(peer);
    while (true) {
      // In this order: a rank publishes its standing before it enters the call.
      const bool is_in_call = peer != rank && entered(peer, call.epoch);
      found[peer] = board.standing(index_, call.number);
      if (found[peer] || is_in_call) break;
      sched_yield();
      if (Clock::now() - looked < kSlice && !waiting.expired()) continue;
      looked = Clock::now();
      if (!blocked) blocked.emplace(group_);
      throw_if_interrupted();
      check_wait(peer, call, "rank " + std::to_string(peer) + " to come to its next call",
                 waiting.expired());
    }
  }
  return found;
}

bool Channel::agree_on_call(Call& call, bool movable) {
  const int rank = mapping_->rank(), size = mapping_->world_size();
  mapping_->peers()->board(rank).set_standing(index_, call.number,
                                              {call.digest, movable, reach_, failed_});
  const auto all = standings(call);
  const int64_t reach = std::exchange(reach_, -1);
  for (const auto& standing : all)
    if (!standing || !standing->movable) return true;
  // Returns how far back the next call of `behind` is among the failures of `ahead`; -1 if it is
  // not there or is beyond `reach`, or if both ranks have the same next call. Unless `ahead` has
  // taken another number already, the call before must be there, too, since each rank may just have
  // made a mistake in one call. Failures before a call that both have made are of no account: there
  // the ranks were in step.
  const auto distance = [&](const Standing& ahead, const Standing& behind) -> int64_t {
    const auto &theirs = ahead.failed, &own = behind.failed;
    if (ahead.digest == behind.digest) return -1;
    const auto most = ahead.reach < 0 ? static_cast<int64_t>(theirs.size()) - 2 : ahead.reach;
    for (int64_t back = 0; back <= most; ++back) {
      if (own[back] != 0 && theirs[back] == own[back]) return -1;
      const bool also_before = own[0] != 0 && theirs[back + 1] == own[0];
      if (theirs[back] == behind.digest && (ahead.reach >= 0 || also_before)) return back;
    }
    return -1;
  };
  int count = 0;
  std::optional<int> ahead_of_mine;
  for (int peer = 0; peer < size; ++peer) {
    bool is_behind = false;
    for (int other = 0; other < size; ++other) {
      if (distance(*all[other], *all[peer]) < 0) continue;
      is_behind = true;
      if (peer == rank) ahead_of_mine = other;
      if (other == rank) reach_ = std::max(reach_, distance(*all[rank], *all[peer]));
    }
    count += is_behind ? 1 : 0;
  }
  if (reach >= 0) reach_ = reach;
  // The ranks agree, or nothing shows which of them are right.
  const bool undecided = count == 0 || count == size;
  if (undecided || ahead_of_mine) reach_ = -1;
  if (undecided) return true;
  if (ahead_of_mine) {
    const std::string who = "rank " + std::to_string(*ahead_of_mine);
    throw PeerError("ranks disagree: " + call.call_name + ": " + who +
                        " has failed this call before, since rank " + std::to_string(rank) +
                        " made a call that " + who + " did not make",
                    "ranks disagree: " + call.call_name + " has failed on " + who + " before");
  }
  return false;
}

void Channel::fail(uint32_t epoch, const std::string& cause, const CallSite* other) {
  const int rank = mapping_->rank();
  Failure& own = failure(rank, epoch);
  own.epoch.store(0);
  own.other_channel = other == nullptr ? 0 : other->channel;
  own.other_number = other == nullptr ? 0 : other->number;
  const size_t length = std::min(cause.size(), sizeof(own.cause) - 1);
  std::memcpy(own.cause, cause.data(), length);
  own.cause[length] = 0;
  own.epoch.store(epoch);
  Record& written = record(rank, epoch);
  if (written.epoch.load() == epoch) written.failed.store(1);
  if (failed_epoch_ != epoch) {  // the same failure is noted once
    std::rotate(failed_.begin(), failed_.end() - 1, failed_.end());
    failed_.front() = epoch == begun_epoch_ ? digest_ : 0;
    std::rotate(failed_in_step_.begin(), failed_in_step_.end() - 1, failed_in_step_.end());
    failed_in_step_.front() = in_step_;
  }
  failed_epoch_ = epoch;
  Probe& probe = Probe::instance();
  for (int peer = 0; peer < mapping_->world_size(); ++peer) {
    if (peer == rank) continue;
    if (probe.on()) probe.step();
    for (int flag = 0; flag < layout_.flag_count; ++flag)
      raise(peer, flag, ticket(epoch, kMaxPieces - 1));
  }
}

void Channel::raise(int peer, int flag, uint32_t value) {
  publish(flag_word(peer, mapping_->rank(), flag), &mapping_->control(peer).sleepers, value);
}

int64_t* Channel::sizes_of(int rank, const Call& call) const {
  return at<int64_t>(mapping_->data()[rank],
                     layout_.sizes_offset(call.epoch, mapping_->world_size()));
}

void Channel::check_wait(int peer, Call& call, const std::string& awaited, bool expired) {
  const int rank = mapping_->rank();
  const std::string context = call.call_name + ": rank " + std::to_string(rank) + " waiting for " +
                              awaited + " (call " + std::to_string(call.number) +
                              (entered(peer, call.epoch) ? ")" : ", which it did not make yet)");
  mapping_->throw_if_peer_lost(peer, expired, call.budget, context);
  for (int other = 0; other < mapping_->world_size(); ++other) {
    if (other == rank) continue;
    // A rank in a different call may never raise the awaited flag, and this call cannot end if a
    // rank that has not entered it is lost.
    if (entered(other, call.epoch))
      verify(other, call);
    else if (other != peer)
      mapping_->throw_if_peer_lost(other, false, call.budget, context);
  }
  group_.check_agreement({index_, call.number, call.call_name}, peer, true);
}

bool Channel::shares_processor(int peer) const {
  return mapping_->peers()->board(peer).processor() == sched_getcpu();
}

template <class Ready, class Awaited>
void Channel::wait_for(Word* word, int peer, Call& call, Ready ready, Awaited awaited) {
  std::optional<Blocked> blocked;  // only once it sleeps: most waits end while they spin
  const bool at_once = shares_processor(peer);
  wait_until(
      word, &mapping_->control(mapping_->rank()).sleepers, spins_, call.budget, ready,
      [&](bool expired) {
        if (!blocked) blocked.emplace(group_);
        check_wait(peer, call, awaited(), expired);
      },
      at_once);
  // It may have been woken on another processor.
  if (at_once) mapping_->peers()->board(mapping_->rank()).set_processor(sched_getcpu());
}

void Channel::wait(int peer, int flag, Call& call, uint32_t piece) {
  const uint32_t needed = ticket(call.epoch, piece);
  wait_for(
      flag_word(mapping_->rank(), peer, flag), peer, call,
      [needed](uint32_t seen) { return reached(seen, needed); },
      [&] {
        return std::string("flag '") + kFlagNames[flag] + "' of rank " + std::to_string(peer);
      });
  verify(peer, call);
}

void Channel::announce(Call& call, const void* shard) {
  Record& own = record(mapping_->rank(), call.epoch);
  if (shard != nullptr) {
    const auto mapping = find_mapping(shard, *mapping_->peers());
    if (mapping == nullptr)
      throw PeerError(call.call_name + ": the shard is not symmetric memory of this group");
    call.place = DataPlace::kInPlace;
    own.sequence = mapping->sequence();
    own.offset = static_cast<const char*>(shard) -
                 static_cast<const char*>(mapping->data()[mapping->rank()]);
  }
  own.place = call.place;
  own.pieces = call.pieces;
  own.bytes = call.bytes;
  if (own.digest != call.digest) {
    own.digest = call.digest;
    std::strncpy(own.call_name, call.call_name.c_str(), kMaxCallName);
    own.call_name[kMaxCallName] = 0;
  }
  own.failed.store(0, std::memory_order_relaxed);
  mapping_->peers()->board(mapping_->rank()).set_processor(sched_getcpu());
  own.epoch.store(call.epoch, std::memory_order_release);
}

void Channel::throw_failure(int peer, const Call& call) {
  const Failure& theirs = failure(peer, call.epoch);
  const std::string who = call.call_name + ": rank " + std::to_string(peer);
  if (theirs.epoch.load() != call.epoch)
    throw PeerError(who + " has left call " + std::to_string(call.number));
  const std::string cause = theirs.cause;
  std::optional<CallSite> other;
  if (theirs.other_number != 0) other = CallSite{theirs.other_channel, theirs.other_number, {}};
  throw GaveUp(who + " failed: " + cause, cause, other);
}

void Channel::throw_if_failed(int peer, const Call& call) {
  if (failure(peer, call.epoch).epoch.load() == call.epoch) throw_failure(peer, call);
}

void Channel::verify(int peer, const Call& call) {
  static const char* const kPlaces[] = {"", " with a tensor in symmetric memory",
                                        " in a workspace that must grow"};
  const Record& theirs = record(peer, call.epoch);
  if (theirs.epoch.load(std::memory_order_acquire) != call.epoch || theirs.failed.load() != 0)
    throw_failure(peer, call);
  // Until this rank has announced the call, the place of its data is undecided: it may still wait
  // for peers that must enter a failed call, while the others go on to larger memory.
  const bool announced = record(mapping_->rank(), call.epoch).epoch.load() == call.epoch;
  if (theirs.digest == call.digest && (!announced || theirs.place == call.place)) return;
  const auto place = [&](DataPlace of) {
    return theirs.place == call.place ? "" : kPlaces[static_cast<uint32_t>(of) % 3];
  };
  const int rank = mapping_->rank();
  const std::string text = "ranks disagree: rank " + std::to_string(rank) + " calls " +
                           call.call_name + place(call.place) + ", rank " + std::to_string(peer) +
                           " calls " + theirs.call_name + place(theirs.place);
  // Threads of two ranks that call in another order.
  for (const int each : {rank, peer}) {
    if (!mapping_->peers()->board(each).several_threads()) continue;
    const auto advice = [](const std::string& who) {
      return ": another thread of " + who + " uses the group: give it one of its own";
    };
    const std::string cause = text + advice("rank " + std::to_string(each));
    throw PeerError(each == rank ? text + advice("this rank") : cause, cause);
  }
  throw PeerError(text);
}

void Channel::verify_all(const Call& call) {
  for (int peer = 0; peer < mapping_->world_size(); ++peer)
    if (peer != mapping_->rank()) verify(peer, call);
}

void Channel::agree_to_replace(Call& call) {
  call.place = DataPlace::kReplaced;
  announce(call, nullptr);
  const int rank = mapping_->rank(), size = mapping_->world_size();
  for (int step = 1; step < size; ++step) signal((rank + step) % size, kReadyFlag, call);
  for (int step = 1; step < size; ++step) wait((rank + step) % size, kReadyFlag, call);
}

void* Channel::shard_of(int peer, const Call& call) {
  const Record& theirs = record(peer, call.epoch);
  if (theirs.place != DataPlace::kInPlace) return slot(peer, call.epoch);
  auto mapping = in_place_[theirs.sequence].lock();
  if (mapping == nullptr) {
    mapping = find_mapping(*mapping_->peers(), theirs.sequence);
    if (mapping == nullptr)
      throw PeerError(call.call_name + ": rank " + std::to_string(peer) +
                      " gave a symmetric tensor that rank " + std::to_string(mapping_->rank()) +
                      " has freed");
    if (in_place_.size() > 256) in_place_.clear();  // only a cache: entries of freed memory pile up
    in_place_[theirs.sequence] = mapping;
  }
  return at<void>(mapping->data()[peer], theirs.offset);
}

}  // namespace symm_cp
