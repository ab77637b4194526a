#include "channel/group.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/probe.h"

namespace symm_cp {

namespace {

// How long the boards may show different memory: a rank begins a call a moment before it publishes
// that it makes new memory for the call.
constexpr std::chrono::seconds kSettleTime{1};
// How long two ranks may be blocked in first calls on different channels. The calls may come from
// two threads that start in a different order on each rank, and the later thread may have made no
// call yet. A smaller value rejects correct programs on a busy machine; a larger one reports
// mistakes later.
constexpr std::chrono::seconds kSecondThreadTime{10};

int64_t pages(int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }
std::string text(int64_t value) { return std::to_string(value); }

// Whether `is_so` has held for `time`; `since` keeps its start between calls.
bool has_lasted(Clock::time_point& since, std::chrono::seconds time, bool is_so) {
  if (!is_so) {
    since = {};
  } else if (since == Clock::time_point{}) {
    since = Clock::now();
  } else if (Clock::now() - since > time) {
    since = {};
    return true;
  }
  return false;
}

thread_local bool engine = false;
thread_local int64_t calls_made = 0;
std::atomic<int64_t> next_number{1};
thread_local std::function<void()>* before_number = nullptr;

}  // namespace

WorkspaceLayout layout_of(int world_size, int64_t slot_bytes) {
  WorkspaceLayout layout{};
  layout.flag_count = kFlags;
  layout.slot_count = kSlots;
  layout.records = flag_offset(kFlags, 0, world_size);
  layout.slots = pages(layout.records + layout.slot_count * kRecordBytes +
                       kFailures * static_cast<int64_t>(sizeof(Failure)) +
                       layout.slot_count * sizes_bytes(world_size));
  layout.slot_bytes = pages(slot_bytes);
  return layout;
}

// --- Workspace -----------------------------------------------------------------------------------

Workspace::~Workspace() { close(); }

void Workspace::close() {
  if (channel_ != nullptr) channel_->close();
}

void Workspace::drop() {
  close();
  channel_.reset();
  memory_ = Segment();
  group_.set_generation(index_, 0);
}

bool Workspace::serves(int64_t number, int64_t slot_bytes) const {
  return channel_ != nullptr && channel_->layout().slot_bytes >= slot_bytes &&
         number - base_ <= kLastCpuEpoch;
}

bool Workspace::begins_at_once(int64_t slot_bytes) const {
  return serves(base_, slot_bytes) && !channel_->has_failed_call();
}

Call Workspace::begin(int64_t number, int64_t slot_bytes, const std::string& call_name,
                      std::chrono::milliseconds timeout) {
  group_.check_owned(call_name);
  group_.throw_if_timed_out(call_name);
  const int64_t in_step = group_.in_step(index_, number);
  number = group_.moved(index_, number);
  Call call{number, static_cast<uint32_t>(number - base_), call_name.substr(0, kMaxCallName),
            DataPlace::kSlot, group_.budget(timeout)};
  call.digest = digest_of(call.call_name);
  call.in_step = in_step;
  group_.set_entered(index_, number);
  last_ = number;
  if (channel_ != nullptr) agree_with_peers(call);
  if (index_ == kSync) group_.set_sync_failed(false);
  if (serves(call.number, slot_bytes)) return call;
  // Either all ranks need new memory for this call, or some rank is in a different call and this
  // throws.
  if (channel_ != nullptr) channel_->agree_to_replace(call);
  open(call, std::max({slot_bytes, reserved_, this->slot_bytes()}));
  call.epoch = 1;
  call.place = DataPlace::kSlot;
  return call;
}

// Takes the next number as long as peers are behind: they fail calls that have failed here before.
void Workspace::agree_with_peers(Call& call) {
  // The lane carries out later calls only after this one.
  const bool movable = index_ == kAsync || group_.made(index_) == call.number;
  while (!channel_->begin(call, movable)) {
    channel_->fail(call.epoch, "rank " + text(group_.rank()) + " has gone on to " + call.call_name);
    group_.move(index_, call.number);
    ++call.number;
    ++call.epoch;
    group_.set_entered(index_, call.number);
    last_ = call.number;
  }
}

// A peer may have failed the call in the old memory after this rank had left that memory.
void Workspace::check_peer(const CallSite& site, const Call& call, int peer) {
  if (channel_ != nullptr) channel_->throw_if_failed(peer, call);
  try {
    group_.check_agreement(site, peer, false);
  } catch (const OutOfStep&) {
    if (channel_ != nullptr) channel_->throw_if_failed(peer, call);
    throw;
  }
}

// Shows on the board, for its lifetime, that this rank is making the workspace of a call.
class Workspace::Opening {
 public:
  Opening(Workspace& workspace, int64_t number)
      : workspace_(workspace), at_the_end_(workspace.group_.generation(workspace.index_)) {
    say(-number);
  }
  ~Opening() { say(at_the_end_); }
  Opening(const Opening&) = delete;
  Opening& operator=(const Opening&) = delete;
  void made(int64_t number) { at_the_end_ = number; }

 private:
  void say(int64_t generation) { workspace_.group_.set_generation(workspace_.index_, generation); }

  Workspace& workspace_;
  int64_t at_the_end_;
};

void Workspace::open(Call& call, int64_t slot_bytes) {
  opening_ = call.number;
  Opening opening(*this, call.number);
  const CallSite site{index_, call.number, call.call_name};
  const Blocked blocked(group_);
  Clock::time_point looked = Clock::now();
  const Rendezvous rendezvous{key_of_call(index_, call.number), call.call_name, call.budget, [&] {
                                group_.throw_if_closing();
                                if (Clock::now() - looked < kSlice) return;
                                for (int peer = 0; peer < group_.world_size(); ++peer)
                                  if (peer != group_.rank()) check_peer(site, call, peer);
                                looked = Clock::now();
                              }};
  const auto peers = group_.peers(rendezvous);
  WorkspaceLayout layout = layout_of(group_.world_size(), slot_bytes);
  layout.slots += group_.offset();
  layout.slot_bytes += group_.offset();
  const int64_t bytes = layout.end();
  Segment memory = [&] {
    try {
      const std::string owner = "group " + group_.name() + ", rank " + text(group_.rank());
      return Segment::create(static_cast<size_t>(bytes), owned_label(owner));
    } catch (const std::exception& error) {
      peers->refuse(rendezvous.key, cause_of(error, group_.rank()));
      throw;
    }
  }();
  std::shared_ptr<Mapping> mapping =
      std::make_shared<Mapping>(peers, memory, memory.size(), 64, -1, rendezvous);
  if (Probe& probe = Probe::instance(); probe.on()) probe.step();
  auto fresh = std::make_shared<Channel>(group_, index_, mapping, layout);
  close();
  channel_ = std::move(fresh);
  std::swap(memory_, memory);
  base_ = call.number - 1;
  opening_ = 0;
  opening.made(call.number);
}

void Workspace::fail(int64_t number, const std::string& cause, const CallSite* other) {
  if (!group_.owned()) return;
  if (index_ == kSync) group_.set_sync_failed(true);
  number = std::max(group_.moved(index_, number), last_);
  group_.set_entered(index_, number);
  last_ = number;
  const std::string key = key_of_call(index_, number);
  const bool opening = opening_ == number;
  opening_ = 0;
  if (channel_ != nullptr) channel_->fail(static_cast<uint32_t>(number - base_), cause, other);
  if (channel_ != nullptr && !opening) return;
  // Peers may be on their way to make memory for this call.
  if (const auto peers = group_.known_peers())
    peers->refuse(key, cause, other);
  else if (group_.world_size() > 1)
    refuse_peers(group_.name(), key, cause, other);
}

// --- Group ---------------------------------------------------------------------------------------

Group::Group(std::string name, int rank, int world_size, std::chrono::milliseconds timeout,
             int64_t offset)
    : name_(std::move(name)),
      number_(next_number++),
      rank_(rank),
      world_size_(world_size),
      timeout_(timeout.count() > 0 ? timeout : timeout_of(name_)),
      offset_(offset),
      forks_(fork_count()),
      workspaces_{Workspace(*this, kSync), Workspace(*this, kAsync)},
      lane_(*this) {}

Group::~Group() {
  closing_ = true;
  lane_.close();
}

void Group::enter_engine() { engine = true; }
bool Group::in_engine() { return engine; }

BeforeNumber::BeforeNumber(std::function<void()> ask) : ask_(std::move(ask)) {
  before_number = &ask_;
}

BeforeNumber::~BeforeNumber() { before_number = nullptr; }

void BeforeNumber::ask() {
  if (auto* const first = std::exchange(before_number, nullptr)) (*first)();
}

int64_t Group::made_by_this_thread() { return calls_made; }

int64_t Group::next(int index, bool by_user) {
  ++calls_made;
  if (by_user) BeforeNumber::ask();
  std::lock_guard<std::mutex> lock(mutex_);
  if (by_user) {
    const auto self = std::this_thread::get_id();
    if (first_thread_ == std::thread::id()) first_thread_ = self;
    if (first_thread_ != self) several_threads_ = true;
    board().set_threads(several_threads_ ? 2 : 1);
  }
  const int64_t number = board().made(index) + 1;
  ordinal_of(index, number) = board().made(kSync) + board().made(kAsync) + 1;
  if (index == kAsync) {
    if (!sync_failed_) last_in_step_ = board().made(kSync);
    in_step_[static_cast<size_t>(number) % kOrdinals] = last_in_step_;
  }
  board().set_made(index, number);
  return number;
}

void Group::move(int index, int64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t made = board().made(index);
  const int64_t first = std::max(number, made + 1 - static_cast<int64_t>(kOrdinals));
  for (int64_t of = made; of >= first; --of)
    ordinal_of(index, of + 1) = ordinal_of(index, of).load() + 1;
  moves_[index].push_back(made);
  board().set_made(index, made + 1);
}

int64_t Group::moved(int index, int64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& moves = moves_[index];
  while (!moves.empty() && moves.front() < number) moves.pop_front();
  return number + static_cast<int64_t>(moves.size());
}

void Group::acquire(std::recursive_timed_mutex& mutex) {
  if (mutex.try_lock()) return;
  const WithoutGil without_gil;
  while (!mutex.try_lock_for(kSlice)) throw_if_interrupted();
}

const Loop& Group::loop(int index, ExchangeKind kind, LoopKind loop_kind) const {
  const auto& found = loops_[index][static_cast<int>(kind)][static_cast<int>(loop_kind)];
  if (!found) throw std::logic_error("group '" + name_ + "' has no steps for such an exchange");
  return *found;
}

void Group::set_loop(int index, ExchangeKind kind, LoopKind loop_kind, Loop loop) {
  loops_[index][static_cast<int>(kind)][static_cast<int>(loop_kind)] = std::move(loop);
}

std::shared_ptr<Peers> Group::peers(const Rendezvous& rendezvous) {
  auto known = known_peers();
  if (known != nullptr) return known;
  auto found = peers_of(name_, rendezvous);
  std::lock_guard<std::mutex> lock(mutex_);
  Board& shared = found->board(rank_);
  // Another thread in a call of the other channel may already have written newer values here.
  board_.store(&shared);
  for (int index = 0; index < kChannels; ++index) {
    shared.set_made(index, std::max(shared.made(index), own_board_.made(index)));
    shared.set_entered(index, std::max(shared.entered(index), own_board_.entered(index)));
    shared.begin_generation(index, own_board_.generation(index));
  }
  shared.set_threads(several_threads_ ? 2 : 1);
  if (own_board_.timed_out()) shared.set_timed_out();
  std::atomic_store(&peers_, found);
  return found;
}

void Group::refuse(int index, const std::string& reason) {
  if (owned() && on_one_host() != false) end(index, next(index), reason, nullptr);
}

void Group::give_up_at(int index, int64_t number, const std::string& cause, const CallSite* other) {
  // Ends all calls that the peer has started there, in order.
  while (owned() && board().made(index) < number) end(index, next(index, false), cause, other);
}

void Group::end(int index, int64_t number, const std::string& cause, const CallSite* other) {
  if (index == kAsync)
    lane_.refuse(number, cause, other);  // behind calls in flight
  else
    workspaces_[index].fail(number, cause, other);
}

void Group::failed(int index, int64_t number, const std::exception& error) {
  const std::string cause = cause_of(error, rank_);
  const CallSite* other = other_of(error);
  note_time_out(error);
  if (other != nullptr && other->channel != index) {
    const CallSite own{index, moved(index, number), {}};
    give_up_at(other->channel, other->number, cause, &own);
  }
  workspaces_[index].fail(number, cause, other);
  number = workspaces_[index].last();
  if (dynamic_cast<const OutOfStep*>(&error) == nullptr || !owned()) return;
  if (const auto peers = known_peers()) peers->refuse(key_of_call(index, number), cause);
  workspaces_[index].drop();
}

// The peers' boards tell why they failed the call; a rank that waits for them reads the boards,
// too.
void Group::note_time_out(const std::exception& error) {
  if (timed_out_ || !owned()) return;
  bool timed_out = dynamic_cast<const TimedOut*>(&error) != nullptr;
  if (const auto peers = known_peers())
    for (int rank = 0; rank < world_size_; ++rank) timed_out |= peers->board(rank).timed_out();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!timed_out || timed_out_) return;
  time_out_ = error.what();
  timed_out_ = true;
  board().set_timed_out();
}

void Group::throw_if_timed_out(const std::string& call_name) const {
  if (timed_out_)
    throw PeerError(call_name + ": a call of group '" + name_ + "' has timed out (" + time_out_ +
                    "), so its ranks may not agree on which call is next. Make the group anew");
}

void Group::throw_if_closing() const {
  if (closing_.load()) throw PeerError(closed_text());
}

std::string Group::closed_text() const {
  return "group '" + name_ + "' was closed with work in flight";
}

void Group::check_agreement(const CallSite& call, int peer, bool on_memory) {
  throw_if_closing();
  const auto peers = known_peers();
  if (peers == nullptr) return;
  if (!in_engine()) block(call);
  const Board& mine = board();
  const Board& theirs = peers->board(peer);
  const std::string who = "rank " + text(peer);
  if (theirs.timed_out())
    throw PeerError(call.call_name + ": an earlier call has timed out on " + who);
  if (theirs.entered(call.channel) > call.number) {
    if (!on_memory) {
      // The peer has made memory for this call together with this rank, has failed the call there,
      // and waits in its next call for this rank to enter the failed one.
      if (theirs.generation(call.channel) == call.number) return;
      // The peer's refusal is in a message, or in the store if it had no mesh then.
      const std::string key = key_of_call(call.channel, call.number);
      peers->check_refused(key, call.call_name, peer);
      WaitBudget none(std::chrono::milliseconds(0));
      check_refused_peers(name_, {key, call.call_name, none}, peer);
    }
    throw OutOfStep(call.call_name + ": " + who + " has gone on without call " + text(call.number) +
                    " of channel '" + kChannelNames[call.channel] + "'");
  }
  throw_if_missed(call, peer);
  if (on_memory) check_generation(call, peer);
  const auto blocked = theirs.blocked(), own = mine.blocked();
  if (!blocked || !own || blocked->channel == call.channel) return;
  if (!mine.single_threaded() || !theirs.single_threaded()) return;
  if (theirs.made(call.channel) >= call.number) return;  // the peer will reach this call
  if (mine.made(blocked->channel) >= blocked->number) return;
  if (call.number == 1 && blocked->number == 1 &&
      !has_lasted(apart_since_[call.channel], kSecondThreadTime, true))
    return;
  compare(call, peer, *blocked);
}

// A dead rank may have done its part in this call before it died, so its death alone is no reason
// to abort it. But a rank that has not come to the call, and has missed a message of the dead rank,
// may never come: a short send ends before it leaves the sender's memory.
void Group::throw_if_missed(const CallSite& call, int peer) const {
  const auto peers = known_peers();
  const Board& theirs = peers->board(peer);
  const auto missed = theirs.missed();
  if (!missed || !peers->dead(*missed) || theirs.made(call.channel) >= call.number) return;
  const std::string cause = "rank " + text(*missed) + " died (noticed by rank " + text(peer) + ")";
  throw PeerError(call.call_name + ": " + cause, cause);
}

// Two ranks are blocked in different calls, and neither has made the other's. The rank whose call
// has the smaller ordinal fails: the other rank has refused or failed its own call of that ordinal,
// and gone on. Each rank skips the calls that the other has made.
void Group::compare(const CallSite& call, int peer, const CallSite& theirs) {
  const int64_t mine = ordinal_of(call.channel, call.number);
  const std::string me = "rank " + text(rank_), who = "rank " + text(peer);
  if (mine > theirs.ordinal) {
    const CallSite before{call.channel, call.number - 1, {}};
    const std::string cause = "ranks disagree: " + who + " calls " + theirs.call_name + ", " + me +
                              " has gone on to " + call.call_name;
    give_up_at(theirs.channel, theirs.number, cause, &before);
    return;
  }
  CallSite all{theirs.channel, theirs.number - 1, {}};
  std::string call_name = "ranks disagree: " + me + " calls " + call.call_name + ", " + who;
  if (mine == theirs.ordinal) {
    all.number = known_peers()->board(peer).made(theirs.channel);
    call_name += " calls " + theirs.call_name;
  } else {
    call_name += " has gone on to " + theirs.call_name;
  }
  throw GaveUp(call_name, call_name, all);
}

void Group::check_generation(const CallSite& call, int peer) {
  const Board& theirs = known_peers()->board(peer);
  Clock::time_point& since = mismatch_since_[call.channel];
  const int64_t mine = board().generation(call.channel), its = theirs.generation(call.channel);
  // A peer that is still making this rank's workspace may just be slow, on a busy machine.
  const bool apart = theirs.entered(call.channel) == call.number && its != mine && its != -mine;
  if (!has_lasted(since, kSettleTime, apart)) return;
  throw OutOfStep(call.call_name + ": rank " + text(peer) + " and rank " + text(rank_) +
                  " use different workspaces after a failure; the next call makes a new one");
}

void Group::block(const CallSite& call) {
  const auto known = board().blocked();
  if (known && known->channel == call.channel && known->number == call.number) return;
  board().set_blocked(call.channel, call.number, ordinal_of(call.channel, call.number),
                      call.call_name.c_str());
}

void Group::unblock() {
  if (board().blocked()) board().clear_blocked();
}

int64_t Group::generation(int index) const { return board().generation(index); }
void Group::set_generation(int index, int64_t number) { board().set_generation(index, number); }
void Group::set_entered(int index, int64_t number) { board().set_entered(index, number); }

void Group::check_owned(const std::string& call_name) const {
  if (!owned())
    throw PeerError(call_name + ": this process was forked from rank " + text(rank_) +
                    " of group '" + name_ +
                    "' and is no rank of it: call it in the parent process only");
}

}  // namespace symm_cp
