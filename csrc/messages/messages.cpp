// The threads that progress messages: waiting threads, and the engine.
#include "messages/messages.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <utility>

#include "base/error.h"
#include "messages/message_engine.h"

namespace symm_cp {

namespace {

using std::chrono::milliseconds;

// How often a waiting thread moves data before it checks whether it may go on waiting.
constexpr int kMovesInARow = 1 << 14;
constexpr milliseconds kLingerPause{1};

Reads reads_of_environment() {
  const char* const text = std::getenv("SYMM_CP_READ_MESSAGES");
  if (text == nullptr || *text == 0) return Reads::kUnattended;
  return std::string(text) == "0" ? Reads::kNever : Reads::kAlways;
}

}  // namespace

MessageEngine::MessageEngine(std::shared_ptr<Bootstrap> bootstrap, std::string group, int rank,
                             int world_size, milliseconds timeout,
                             std::function<void(int rank)> on_loss)
    : bootstrap_(std::move(bootstrap)),
      on_loss_(std::move(on_loss)),
      group_(std::move(group)),
      rank_(rank),
      world_size_(world_size),
      timeout_(timeout),
      forks_(fork_count()),
      spins_(spin_rounds(world_size)),
      reads_(reads_of_environment()) {
  for (int peer = 0; peer < world_size; ++peer) links_.push_back(std::make_unique<MessageLink>());
}

MessageEngine::Held::~Held() {
  std::vector<Ended> ended = std::exchange(engine_.ended_, {});
  lock_.unlock();
  for (Ended& each : ended) {
    each.owner.reset();
    if (each.then) each.then();
  }
}

void MessageEngine::check_owned(const std::string& what) const {
  if (!owned())
    throw PeerError(what + ": this process was forked from " + "rank " + std::to_string(rank_) +
                    " of group '" + group_ +
                    "' and is no rank of it: call it in the parent process only");
}

TransmissionPtr MessageEngine::start(bool sends, int peer, uint64_t tag, MessageBytes message) {
  const auto transmission = std::make_shared<Transmission>(sends, peer, tag, std::move(message));
  transmission->any_source = !sends && peer == kAnySource;
  const auto what = [&] { return describe(*transmission); };
  if (!transmission->any_source && (peer < 0 || peer >= world_size_ || peer == rank_))
    throw std::invalid_argument(what() + ": must be another rank of the group of " +
                                std::to_string(world_size_));
  if (!owned()) check_owned(what());
  const Held held(*this);
  if (!closed_.empty()) throw PeerError(what() + ": " + closed_);
  if (!bell_) bell_.emplace(Bell::create());
  if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->serve(); });
  if (!transmission->any_source) {
    MessageLink& link = *links_[peer];
    if (!link.complaint.empty()) throw PeerError(what() + ": " + std::exchange(link.complaint, {}));
    const std::string lost = "rank " + std::to_string(peer) + " " + link.gone;
    if (sends && !link.gone.empty()) {
      report_loss(peer);
      throw PeerError(what() + ": " + lost,
                      lost + " (noticed by rank " + std::to_string(rank_) + ")");
    }
    if (link.gone.empty()) reach(peer);
  }
  ++live_;
  if (sends)
    start_send(*links_[peer], transmission);
  else
    start_receive(transmission);
  if (!transmission->ended.load() || (sends && links_[peer]->backlog.load())) hand_over();
  return transmission;
}

void MessageEngine::when_done(Transmission& transmission, std::function<void()> then) {
  {
    const Held held(*this);
    if (!transmission.ended.load()) {
      transmission.then = std::move(then);
      return;
    }
  }
  then();
}

// --- waiting -------------------------------------------------------------------------------------

bool MessageEngine::stirring() const {
  for (const auto& link : links_) {
    if (link->incoming.load() && link->in.filled(link->taken.load())) return true;
    if (link->readable.load()) return true;
    if (link->backlog.load() && link->out.drained(link->seen_head.load())) return true;
  }
  return false;
}

// Wakes the sleeping threads of this process.
void MessageEngine::wake_waiters() {
  Doorbell& bell = bell_->doorbell();
  if (bell.sleepers.load(std::memory_order_seq_cst) == 0) return;
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(&bell.rings);
}

// A thread that stops progressing messages leaves the rest to the engine. Peers wake the engine,
// but not for data that came before they saw it sleep.
void MessageEngine::hand_over() {
  if (!bell_) return;
  const bool backlog = std::any_of(links_.begin(), links_.end(),
                                   [](const auto& link) { return link->backlog.load(); });
  const bool wanted = waiting_ == 0 && (live_ > 0 || backlog);
  Word& engine = bell_->doorbell().engine;
  if (wanted || engine.load(std::memory_order_relaxed) != 0)
    engine.store(wanted ? 1 : 0, std::memory_order_seq_cst);
  if (wanted && stirring()) bell_->kick();
}

// In its scope this thread waits, and the engine need not be woken.
class MessageEngine::Attending {
 public:
  explicit Attending(MessageEngine& engine) : engine_(engine) {
    const Held held(engine_);
    ++engine_.waiting_;
    engine_.bell_->doorbell().engine.store(0, std::memory_order_seq_cst);
  }
  ~Attending() {
    const Held held(engine_);
    --engine_.waiting_;
    engine_.hand_over();
  }
  Attending(const Attending&) = delete;
  Attending& operator=(const Attending&) = delete;

 private:
  MessageEngine& engine_;
};

bool MessageEngine::spin(const Transmission& transmission) {
  int moves = 0;
  for (int i = 0; i < spins_ && moves < kMovesInARow; ++i) {
    if (transmission.ended.load(std::memory_order_acquire)) return true;
    if (!stirring()) {
      cpu_relax();
      continue;
    }
    pause_at_random();
    const Held held(*this);
    progress();
    ++moves;
    i = 0;
  }
  return transmission.ended.load(std::memory_order_acquire);
}

// Yields the processor for a while: the peer may be waiting for it.
bool MessageEngine::yield(const Transmission& transmission) {
  const auto end = Clock::now() + kYieldTime;
  do {
    sched_yield();
    if (transmission.ended.load(std::memory_order_acquire)) return true;
    if (stirring()) return spin(transmission);
  } while (Clock::now() < end);
  return false;
}

// Sleeps until there is work, or for a slice. Throws when the wait cannot go on.
void MessageEngine::sleep(Transmission& transmission, const Waiting& waiting, WaitBudget& budget) {
  Doorbell& bell = bell_->doorbell();
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = bell.rings.load(std::memory_order_seq_cst);
  if (!transmission.ended.load(std::memory_order_seq_cst) && !stirring()) {
    const auto left = std::chrono::nanoseconds(waiting.left());
    pause_at_random();
    if (left.count() > 0) futex_sleep(&bell.rings, seen, std::min(left, kSlice));
  }
  bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  if (transmission.ended.load(std::memory_order_acquire)) return;
  const auto give_up_for = [&](const std::string& reason) {
    const Held held(*this);
    return give_up(transmission, reason);
  };
  try {
    throw_if_interrupted();
  } catch (const std::exception& error) {
    if (!give_up_for(error.what())) return;
    throw;
  }
  budget.say_if_long(group_, [&] {
    const Held held(*this);
    return describe(transmission);
  });
  if (waiting.expired())
    give_up_for("timed out after " + std::to_string(budget.limit.count()) + " ms");
}

void MessageEngine::wait(Transmission& transmission, milliseconds timeout) {
  if (!transmission.ended.load(std::memory_order_acquire)) {
    if (!owned()) check_owned(describe(transmission));
    const Attending attending(*this);
    if (!spin(transmission)) {
      const WithoutGil without_gil;
      WaitBudget budget(timeout.count() > 0 ? timeout : timeout_);
      const Waiting waiting(budget);
      while (!yield(transmission)) {
        sleep(transmission, waiting, budget);
        if (spin(transmission)) break;
      }
    }
  }
  if (const std::string failure = failure_of(transmission); !failure.empty())
    throw PeerError(failure);
}

std::string MessageEngine::failure_of(const Transmission& transmission) {
  if (!transmission.ended.load(std::memory_order_acquire)) return {};
  if (!transmission.failure.empty() && owned()) {
    const Held held(*this);
    report_loss(transmission.peer);
  }
  return transmission.failure;
}

// --- the engine ----------------------------------------------------------------------------------

void MessageEngine::apply(LinkEvent& event) {
  MessageLink& link = *links_[event.peer];
  if (link.bell == nullptr) link.bell = event.bell;
  switch (event.what) {
    case LinkEvent::kIncoming:
      link.in_memory = std::move(event.ring);
      link.in = Ring(link.in_memory.data());
      link.process = reads_ == Reads::kNever ? 0 : event.process;
      link.incoming.store(true);
      break;
    case LinkEvent::kConnected:
      link.connected = true;
      link.bell->ring();  // for frames written before the bell was known
      break;
    case LinkEvent::kGone: lose(event.peer, event.reason, event.in_order); break;
  }
}

void MessageEngine::serve() {
  try {
    serve_links();
  } catch (const std::exception& error) {
    end("messages of group '" + group_ + "' on rank " + std::to_string(rank_) +
        " failed: " + error.what());
  }
}

void MessageEngine::serve_links() {
  Connector connector(bootstrap_, group_, rank_, world_size_, *bell_);
  while (true) {
    std::vector<Connector::Wanted> wanted;
    bool all = false;
    {
      const Held held(*this);
      if (!closed_.empty()) return;
      all = watching_ = any_sources_ > 0;
      for (int peer = 0; peer < world_size_; ++peer) {
        const MessageLink& link = *links_[peer];
        if (link.out.there() && !link.connected && link.gone.empty())
          wanted.push_back({peer, link.out_memory.fd()});
      }
    }
    auto events = connector.step(wanted, all);
    bool moved = true;
    while (moved) {
      const Held held(*this);
      for (LinkEvent& event : events) apply(event);
      events.clear();
      moved = progress();
      if (!moved) hand_over();
    }
    connector.wait();
  }
}

// Whether some eager message has not reached its receiver's memory.
bool MessageEngine::undelivered() const {
  return std::any_of(links_.begin(), links_.end(), [](const auto& link) {
    if (!link->gone.empty() || !link->out.there()) return false;
    return link->queued_bytes > 0 || (!link->connected && link->out.position() > 0);
  });
}

void MessageEngine::close(milliseconds linger) {
  const WithoutGil without_gil;
  const auto until = Clock::now() + linger;
  while (true) {
    {
      const Held held(*this);
      if (!closed_.empty() || !undelivered()) break;
      progress();
      hand_over();
    }
    if (Clock::now() > until) break;
    std::this_thread::sleep_for(kLingerPause);
  }
  end("group '" + group_ + "' was closed");
}

void MessageEngine::end(const std::string& reason) {
  std::thread ending;
  {
    const Held held(*this);
    if (closed_.empty()) {
      closed_ = reason;
      if (bell_) {
        fail_all(reason);
        bell_->doorbell().closed.store(1);
        bell_->kick();
      }
    }
    if (thread_.joinable()) ending = std::move(thread_);
  }
  if (!ending.joinable()) return;
  if (ending.get_id() == std::this_thread::get_id())
    ending.detach();  // it ends by itself
  else
    ending.join();
}

// --- the interface -------------------------------------------------------------------------------

bool Delivery::done() const { return transmission_->ended.load(std::memory_order_acquire); }

void Delivery::wait(milliseconds timeout) { engine_->wait(*transmission_, timeout); }

int Delivery::peer() const {
  return transmission_->sends || done() ? transmission_->peer : kAnySource;
}

std::string Delivery::failure() const { return engine_->failure_of(*transmission_); }

void Delivery::when_done(std::function<void()> then) {
  engine_->when_done(*transmission_, std::move(then));
}

Messages::Messages(std::shared_ptr<Bootstrap> bootstrap, std::string group, int rank,
                   int world_size, milliseconds timeout, std::function<void(int rank)> on_loss)
    : engine_(std::make_shared<MessageEngine>(std::move(bootstrap), std::move(group), rank,
                                              world_size, timeout, std::move(on_loss))) {}

Messages::~Messages() { close(); }

Delivery Messages::start_send(int destination, uint64_t tag, MessageBytes message) {
  return {engine_, engine_->start(true, destination, tag, std::move(message))};
}

Delivery Messages::start_receive(int source, uint64_t tag, MessageBytes buffer) {
  return {engine_, engine_->start(false, source, tag, std::move(buffer))};
}

void Messages::send(int destination, uint64_t tag, MessageBytes message, milliseconds timeout) {
  start_send(destination, tag, std::move(message)).wait(timeout);
}

int Messages::receive(int source, uint64_t tag, MessageBytes buffer, milliseconds timeout) {
  Delivery delivery = start_receive(source, tag, std::move(buffer));
  delivery.wait(timeout);
  return delivery.peer();
}

void Messages::close(milliseconds linger) {
  if (engine_ == nullptr) return;
  if (engine_->owned()) {
    engine_->close(linger);
  } else {
    // The engine's thread belongs to the parent process, and a lock may be held there, so leak it.
    new std::shared_ptr<MessageEngine>(std::move(engine_));
  }
}

void Messages::abort(const std::string& reason) {
  if (engine_ != nullptr && engine_->owned()) engine_->end(reason);
}

}  // namespace symm_cp
