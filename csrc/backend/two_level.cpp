#include "backend/two_level.h"

#include <algorithm>
#include <regex>
#include <string_view>

#include "backend/backend_call.h"
#include "backend/backend_tensors.h"
#include "base/error.h"
#include "base/python.h"
#include "base/team.h"
#include "channel/group.h"
#include "channel/groups.h"
#include "exchange/reduce.h"

namespace symm_cp {

namespace {

using c10d::OpType;
using std::chrono::milliseconds;

// How long the end of a process group waits for calls in flight.
constexpr std::chrono::seconds kLastCallsGrace{10};

// Prefix of errors whose rank numbers are those of the whole group; a host's ranks pass them on
// unchanged.
constexpr std::string_view kAcross = "across hosts: ";

std::string across(std::string text) {
  return text.starts_with(kAcross) ? text : std::string(kAcross) + text;
}

// Replaces the rank numbers in an error of this host's group by those of the whole group.
std::string across(std::string text, const std::vector<int>& here) {
  static const std::regex number("\\brank (\\d{1,6})\\b");
  if (text.starts_with(kAcross)) return text;
  std::string result(kAcross);
  auto rest = text.cbegin();
  for (std::sregex_iterator it(text.cbegin(), text.cend(), number), end; it != end; ++it) {
    const size_t place = std::stoul((*it)[1]);
    result.append(rest, (*it)[1].first);
    result += std::to_string(place < here.size() ? here[place] : static_cast<int>(place));
    rest = (*it)[0].second;
  }
  return result.append(rest, text.cend());
}

}  // namespace

Spread::Spread(int rank, int size, const int32_t* by_host, int hosts) {
  const int places = size / hosts;
  for (int i = 0; i < size; ++i) {
    if (i % places == 0) ranks.emplace_back();
    ranks.back().push_back(by_host[i]);
    if (by_host[i] == rank) {
      host = i / places;
      place = i % places;
    }
  }
}

// --- Carrying them out ---------------------------------------------------------------------------

TwoLevelBackend::TwoLevelBackend(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank,
                                 int size, milliseconds timeout, Spread spread,
                                 c10::intrusive_ptr<c10d::ProcessGroup> local,
                                 std::shared_ptr<void> local_object,
                                 c10::intrusive_ptr<c10d::Backend> transport)
    : Backend(store, std::move(name), rank, size, timeout, nullptr),
      spread_(std::move(spread)),
      local_object_(std::move(local_object)),
      local_(std::move(local)),
      links_(std::move(transport), std::move(store), rank),
      thread_([this] { carry_out_all(); }) {}

TwoLevelBackend::~TwoLevelBackend() {
  if (forks_ != fork_count()) {
    thread_.detach();  // the thread is not in this process
    return;
  }
  const WithoutGil without_gil;
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    closing_ = true;
  }
  queue_changed_.notify_all();
  thread_.join();
}

Group& TwoLevelBackend::local_group() {
  if (local_group_ == nullptr) local_group_ = group_of(local_->getGroupName());
  return *local_group_;
}

void TwoLevelBackend::run_here(Exchange exchange) {
  if (places() == 1)
    run_alone(exchange);
  else
    run(local_group(), std::move(exchange));
}

void TwoLevelBackend::refuse_here(const std::string& reason) {
  if (places() > 1) symm_cp::refuse(local_group(), kSync, reason);
}

void TwoLevelBackend::run_stages(Stages stages, std::string failure, milliseconds timeout) {
  if (!failure.empty()) failure = across(failure);
  const auto attempt = [&](const auto& step, bool within_host = false) {
    try {
      step();
    } catch (const PeerError& error) {
      if (failure.empty())
        failure = within_host ? across(error.cause(), here()) : across(error.cause());
    } catch (const std::exception& error) {
      if (failure.empty()) failure = across(refusal_of(error, rank_));
    }
  };
  const auto run_all = [&](std::vector<Exchange>& exchanges) {
    for (Exchange& exchange : exchanges) {
      exchange.timeout = timeout * 3 / 2;  // a rank that loses a link reports it on its host
      if (failure.empty())
        attempt([&] { run_here(std::move(exchange)); }, true);
      else
        attempt([&] { refuse_here(failure); });
    }
  };
  run_all(stages.first);
  attempt(
      [&] { links_.exchange(stages.call_name, failure, stages.sends, stages.receives, timeout); });
  if (failure.empty() && stages.then) attempt(stages.then);
  run_all(stages.last);
  links_.note(failure.empty() ? failure : failure.substr(kAcross.size()));
  if (!failure.empty()) throw PeerError(failure);
}

void TwoLevelBackend::prepare(const char* op) {
  const char* reason = aborted_ ? "' was aborted" : "' was made before this process was forked";
  if (aborted_ || forks_ != fork_count())
    throw PeerError(std::string(op) + ": group '" + name_ + reason + ": make a new one");
}

c10::intrusive_ptr<c10d::Work> TwoLevelBackend::carry_out(const Manner& manner,
                                                          Collective collective) {
  const milliseconds timeout = manner.timeout == kGroupTimeout ? timeout_.load() : manner.timeout;
  auto exchanges = std::make_shared<std::vector<Exchange>>(std::move(collective.exchanges));
  auto ending = std::make_shared<Ending>(std::move(collective), 1);
  const Routing routing{manner.type, static_cast<int>(manner.root)};
  enqueue([=, this] {
    std::string failure;
    try {
      for (Exchange& exchange : *exchanges) {
        if (exchange.complete) exchange.complete(exchange);
        run_stages(stages(routing, exchange, timeout), "", timeout);
      }
    } catch (const std::exception& error) {
      failure = error.what();
    }
    ending->exchange_ended(failure);
  });
  auto work = c10::make_intrusive<CollectiveWork>(manner.type, nullptr, std::move(ending), 0,
                                                  sequence_number_.load());
  if (manner.async) return work;
  work->wait();
  return {};
}

void TwoLevelBackend::refuse_call(const Manner& manner, const std::string& reason) {
  const milliseconds timeout = manner.timeout == kGroupTimeout ? timeout_.load() : manner.timeout;
  const Routing routing{manner.type, static_cast<int>(manner.root)};
  const std::string call_name = manner.op;
  enqueue([=, this] {
    try {
      run_stages(refused(routing, call_name), reason, timeout);
    } catch (const std::exception&) {  // the caller has the error already
    }
  });
}

void TwoLevelBackend::enqueue(std::function<void()> call) {
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    queue_.push_back(std::move(call));
  }
  queue_changed_.notify_all();
}

void TwoLevelBackend::carry_out_all() {
  Team::leave_callers_pool();
  std::unique_lock<std::mutex> lock(queue_mutex_);
  while (true) {
    queue_changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    {
      std::function<void()> call = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      call();
    }
    lock.lock();
    busy_ = false;
    queue_changed_.notify_all();
  }
}

void TwoLevelBackend::setTimeout(milliseconds timeout) {
  Backend::setTimeout(timeout);
  links_.transport()->setTimeout(timeout);
}

void TwoLevelBackend::abort() {
  Backend::abort();
  if (local_group_ != nullptr) local_group_->abort();
  links_.transport()->abort();
}

void TwoLevelBackend::shutdown() {
  if (forks_ != fork_count()) return;
  const WithoutGil without_gil;
  {
    std::unique_lock<std::mutex> lock(queue_mutex_);
    queue_changed_.wait_for(lock, kLastCallsGrace, [this] { return queue_.empty() && !busy_; });
  }
  links_.transport()->shutdown();
}

// --- Calls of the transport alone ----------------------------------------------------------------

namespace {

void check_tag(const char* op, int tag) {
  TORCH_CHECK_VALUE(tag >= 0 && tag < HostLinks::kFirstTag, op, ": tag ", tag, " must be in 0 to ",
                    HostLinks::kFirstTag - 1, " in a group that spans hosts");
}

}  // namespace

c10::intrusive_ptr<c10d::Work> TwoLevelBackend::send(std::vector<at::Tensor>& tensors, int peer,
                                                     int tag) {
  check_tag("send", tag);
  std::vector<at::Tensor> dense{single("send", "tensor", tensors).contiguous()};
  return links_.transport()->send(dense, peer, tag);
}

c10::intrusive_ptr<c10d::Work> TwoLevelBackend::recv(std::vector<at::Tensor>& tensors, int peer,
                                                     int tag) {
  check_tag("recv", tag);
  return links_.transport()->recv(tensors, peer, tag);
}

c10::intrusive_ptr<c10d::Work> TwoLevelBackend::recvAnysource(std::vector<at::Tensor>& tensors,
                                                              int tag) {
  check_tag("recv", tag);
  return links_.transport()->recvAnysource(tensors, tag);
}

void TwoLevelBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  links_.transport()->monitoredBarrier(opts, wait_all_ranks);
}

}  // namespace symm_cp
