#include "backend/backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

#include "backend/backend_call.h"
#include "base/error.h"
#include "base/python.h"
#include "channel/group.h"
#include "channel/groups.h"
#include "messages/messages.h"
#include "rendezvous/store_bootstrap.h"

namespace symm_cp {

namespace {

using std::chrono::milliseconds;

// How long `shutdown` waits for works in flight.
constexpr std::chrono::seconds kShutdownGrace{10};

// The peers of the backends of this process by the names of their groups.
struct Backends {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Peers>> peers;
};

// Never destroyed: backends may be freed after static destructors have run.
Backends& backends() {
  static Backends* instance = new Backends;
  return *instance;
}

}  // namespace

std::shared_ptr<Peers> peers_of_backend(const std::string& name) {
  std::lock_guard<std::mutex> lock(backends().mutex);
  const auto it = backends().peers.find(name);
  return it == backends().peers.end() ? nullptr : it->second.lock();
}

Backend::Backend(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, int size,
                 milliseconds timeout)
    : c10d::Backend(rank, size),
      name_(std::move(name)),
      timeout_(timeout),
      forks_(fork_count()),
      store_(std::move(store)) {
  setGroupUid(name_);
  translated([this] { find_peers(); });
}

void Backend::find_peers() {
  const WithoutGil without_gil;
  StoreBootstrap store(store_, timeout_.load());
  WaitBudget budget(timeout_.load());
  const std::string call_name = "making group '" + name_ + "'";
  peers_ = std::make_shared<Peers>(name_, rank_, size_, timeout_.load());
  peers_->meet(store, {"backend/0", call_name, budget});
  std::lock_guard<std::mutex> lock(backends().mutex);
  backends().peers[name_] = peers_;
}

Backend::~Backend() {
  try {
    const WithoutGil without_gil;  // the engine may be about to take Python's lock
    {
      std::lock_guard<std::mutex> lock(backends().mutex);
      const auto it = backends().peers.find(name_);
      if (it != backends().peers.end() && it->second.lock() == peers_) backends().peers.erase(it);
    }
    messages_.reset();
    known_group_ = nullptr;
    group_.reset();
    peers_.reset();
  } catch (...) {  // the interpreter is ending
  }
}

c10::intrusive_ptr<c10d::Backend::Options> Backend::getBackendOptions() {
  auto options = c10::make_intrusive<Options>(getBackendName(), timeout_.load());
  options->group_name = name_;
  return options;
}

void Backend::setTimeout(milliseconds timeout) {
  timeout_ = timeout;
  std::lock_guard<std::mutex> lock(mutex_);
  if (group_ != nullptr) group_->set_timeout(wait_limit());
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<Options>& opts) {
  const auto own = std::find(ranks.begin(), ranks.end(), rank_);
  if (own == ranks.end()) return {};
  return c10::make_intrusive<Backend>(copy_of(store), opts->group_name,
                                      static_cast<int>(own - ranks.begin()),
                                      static_cast<int>(ranks.size()), opts->timeout);
}

c10::intrusive_ptr<c10d::Backend> Backend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const c10::intrusive_ptr<Options>& opts,
                                                 const int& rank, const int& size) {
  return c10::make_intrusive<Backend>(copy_of(store), opts->group_name, rank, size, opts->timeout);
}

void Backend::throw_if_aborted(const char* op) const {
  if (aborted_)
    C10_THROW_ERROR(DistBackendError,
                    std::string(op) + ": group '" + name_ + "' was aborted: make a new one");
}

Group& Backend::group(const char* op) {
  throw_if_aborted(op);
  if (Group* known = known_group_.load(std::memory_order_acquire)) return *known;
  // Without the lock: this runs Python.
  auto resolved = group_of(name_);
  std::lock_guard<std::mutex> lock(mutex_);
  if (group_ == nullptr) {
    group_ = std::move(resolved);
    known_group_.store(group_.get(), std::memory_order_release);
  }
  return *group_;
}

milliseconds Backend::wait_limit() const {
  const char* chosen = std::getenv("SYMM_CP_TIMEOUT_MS");
  const int64_t limit = chosen != nullptr ? std::atoll(chosen) : 0;
  return limit > 0 ? milliseconds(limit) : timeout_.load();
}

Messages& Backend::messages(const char* op) {
  throw_if_aborted(op);
  std::lock_guard<std::mutex> lock(mutex_);
  if (messages_ == nullptr)
    messages_ = std::make_shared<Messages>(
        std::make_shared<StoreBootstrap>(copy_of(store_), wait_limit(),
                                         [peers = peers_](int rank) { return peers->dead(rank); }),
        name_, rank_, size_, wait_limit(),
        [peers = peers_](int rank) { peers->board(peers->rank()).set_missed(rank); });
  return *messages_;
}

void Backend::abort() {
  aborted_ = true;
  std::lock_guard<std::mutex> lock(mutex_);
  if (group_ != nullptr) group_->abort();
  if (messages_ != nullptr) messages_->abort("group '" + name_ + "' was aborted");
}

void Backend::shutdown() {
  if (forks_ != fork_count()) return;
  std::shared_ptr<Group> group;
  std::shared_ptr<Messages> messages;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    group = group_;
    messages = messages_;
  }
  const WithoutGil without_gil;
  if (messages != nullptr) messages->close(kShutdownGrace);
  if (group == nullptr) return;
  group->lane().wake();
  const auto until = Clock::now() + kShutdownGrace;
  while (!group->lane().idle() && Clock::now() < until)
    std::this_thread::sleep_for(milliseconds(1));
}

void Backend::prepare(const char* op) {
  if (size_ > 1) group(op);
}

void Backend::refuse_call(const Manner& manner, const std::string& reason) {
  if (size_ == 1) return;
  // A peer's synchronous call ends at its first exchange; its asynchronous call has numbered all
  // its exchanges already.
  for (int i = 0; i < (manner.async ? manner.exchanges : 1); ++i)
    refuse(group(manner.op), kAsync, reason);
}

c10::intrusive_ptr<c10d::Work> Backend::carry_out(const Manner& manner, Collective collective) {
  Group* all = size_ == 1 ? nullptr : &group(manner.op);
  if (all == nullptr) {
    for (Exchange& exchange : collective.exchanges) {
      if (exchange.complete) exchange.complete(exchange);
      run_alone(exchange);
    }
    collective.exchanges.clear();
    collective.deliver();
    collective.event.reset();
  } else if (manner.async) {
    return start_all(*all, manner, std::move(collective));
  } else {
    for (Exchange& exchange : collective.exchanges) {
      exchange.timeout = manner.timeout;
      run_in_turn(*all, std::move(exchange));
    }
    collective.deliver();
  }
  if (!manner.async) return {};
  return c10::make_intrusive<CollectiveWork>(manner.type, nullptr,
                                             std::make_shared<Ending>(std::move(collective)), 0,
                                             sequence_number_.load());
}

c10::intrusive_ptr<c10d::Work> Backend::start_all(Group& group, const Manner& manner,
                                                  Collective collective) {
  std::vector<Exchange> exchanges = std::move(collective.exchanges);
  auto ending = std::make_shared<Ending>(std::move(collective), exchanges.size());
  int64_t last = 0;
  for (size_t i = 0; i < exchanges.size(); ++i) {
    const bool background = wants_engine(exchanges[i]);
    exchanges[i].timeout = manner.timeout;
    try {
      last = start(group, std::move(exchanges[i]), background,
                   [ending, i](const std::string& failure) { ending->exchange_ended(failure, i); })
                 .number;
    } catch (const std::exception& error) {
      // This exchange has reported its failure; the peers have numbered the later exchanges, too.
      for (size_t rest = i + 1; rest < exchanges.size(); ++rest)
        refuse(group, kAsync, cause_of(error, rank_));
      throw;
    }
  }
  return c10::make_intrusive<CollectiveWork>(manner.type, group_, std::move(ending), last,
                                             sequence_number_.load());
}

}  // namespace symm_cp

extern "C" {

// Returns a new reference to a torch backend; on failure returns null and writes the text to
// `error`. The store is borrowed. Called by the glue, which handles Python's objects.
void* symm_cp_backend_open(void* store, const char* name, int rank, int size, int64_t timeout_ms,
                           std::string* error) {
  try {
    auto own_store =
        c10::intrusive_ptr<c10d::Store>::reclaim_copy(static_cast<c10d::Store*>(store));
    return c10::make_intrusive<symm_cp::Backend>(std::move(own_store), name, rank, size,
                                                 std::chrono::milliseconds(timeout_ms))
        .release();
  } catch (const c10::Error& failure) {
    *error = failure.what_without_backtrace();
  } catch (const std::exception& failure) {
    *error = failure.what();
  }
  return nullptr;
}

}  // extern "C"
