// The watch over stream waits (csrc/cuda/watch.h) on a driver that can be made to answer nothing:
// flags are words of this process, and reader and judge are called by hand. Prints "ok".
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <thread>

#include "channel/wire.h"
#include "cuda/watch.h"

using namespace symm_cp;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

#define CHECK(condition)                                          \
  if (!(condition)) {                                             \
    std::printf("line %d: %s is not so\n", __LINE__, #condition); \
    std::exit(1);                                                 \
  }

namespace {

constexpr size_t kLine = kFlagBytes / sizeof(uint32_t);
constexpr int kPeers = 2, kSelf = 2, kRanks = 3;  // this rank is the last
constexpr auto kTimeout = 400ms;

// The driver: copies are carried out at once, unless it is held up.
std::atomic<bool> held_up{false};
std::atomic<int> written{0};

driver::Result copy_words(void* to, const void* from, size_t bytes) {
  while (held_up) std::this_thread::sleep_for(1ms);
  for (size_t i = 0; i < bytes / sizeof(uint32_t); ++i) {
    std::atomic_ref<uint32_t> source(static_cast<uint32_t*>(const_cast<void*>(from))[i]);
    std::atomic_ref<uint32_t>(static_cast<uint32_t*>(to)[i]) = source.load();
  }
  return 0;
}

driver::Api make_driver() {
  driver::Api api{};
  api.context_get = [](driver::Context* context) { return *context = nullptr, 0; };
  api.stream_create = [](driver::Stream*, unsigned) { return 0; };
  api.host_alloc = [](void** memory, size_t bytes) {
    *memory = std::calloc(bytes, 1);
    return 0;
  };
  api.stream_query = [](driver::Stream) { return 0; };
  api.copy_to_host = [](void* to, driver::Address from, size_t bytes, driver::Stream) {
    return copy_words(to, reinterpret_cast<void*>(from), bytes);
  };
  api.copy = [](driver::Address to, driver::Address from, size_t bytes, driver::Stream) {
    ++written;
    return copy_words(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  };
  return api;
}

const driver::Api api = make_driver();

// A rank that waits, its flags, and its marks at the peers.
struct Rank {
  explicit Rank(std::vector<Descriptor> processes = std::vector<Descriptor>(kRanks))
      : waits(api, {.group = "g",
                    .rank = kSelf,
                    .world_size = kRanks,
                    .flags = address(flags),
                    .timeout = kTimeout,
                    .processes = std::move(processes),
                    .marks = {address(marks), address(marks + 1)},
                    .mark = address(&mark)}) {
    written = 0;
  }

  static driver::Address address(uint32_t* word) { return reinterpret_cast<driver::Address>(word); }
  uint32_t& flag(int name, int peer) { return flags[(name * kRanks + peer) * kLine]; }
  void raise(int name, int peer, uint32_t value) {
    std::atomic_ref<uint32_t>(flag(name, peer)) = value;
  }
  uint32_t seen(uint32_t& word) { return std::atomic_ref<uint32_t>(word).load(); }
  // Rounds of both threads, until something is so, or for a while.
  bool rounds(const std::function<bool()>& until, std::chrono::milliseconds limit = 1000ms) {
    for (const auto end = Clock::now() + limit; Clock::now() < end;) {
      waits.read();
      reason = waits.judge().value_or("");
      if (until()) return true;
      std::this_thread::sleep_for(5ms);
    }
    return false;
  }
  bool aborts(const std::string& why, std::chrono::milliseconds limit = 1000ms) {
    return rounds([&] { return !reason.empty(); }, limit) && reason.find(why) != std::string::npos;
  }

  uint32_t flags[kDeviceFlags * kRanks * kLine] = {};
  uint32_t marks[kPeers] = {};
  uint32_t mark = 0;
  std::string reason;
  StreamWaits waits;
};

Descriptor process(pid_t pid) {
  return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

// A child, and a descriptor of it.
std::pair<pid_t, Descriptor> child() {
  const pid_t pid = fork();
  if (pid == 0) {
    pause();
    _exit(0);
  }
  return {pid, process(pid)};
}

void kill_and_wait(pid_t pid) {
  kill(pid, SIGKILL);
  siginfo_t info;
  waitid(P_PID, pid, &info, WEXITED | WNOWAIT);
}

void a_driver_that_hangs_holds_up_nobody_else() {
  Rank rank;
  rank.waits.expect(0, kReadyFlag, 1, 1, "op");
  held_up = true;
  std::thread reader([&] { rank.waits.read(); });
  std::this_thread::sleep_for(20ms);
  const auto begun = Clock::now();
  rank.waits.expect(0, kReadyFlag, 2, 2, "op");
  CHECK(!rank.waits.judge());
  CHECK(Clock::now() - begun < 300ms);
  std::optional<std::string> reason;
  while (!(reason = rank.waits.judge()) && Clock::now() - begun < 5s)
    std::this_thread::sleep_for(10ms);
  CHECK(reason &&
        reason->find("timed out after 400 ms (the driver did not answer for") != std::string::npos);
  const auto closing = Clock::now();
  rank.waits.close();
  CHECK(Clock::now() - closing < 3s);
  held_up = false;
  reader.join();
}

void a_dead_peer_that_had_signalled_is_no_failure() {
  auto [pid, descriptor] = child();
  std::vector<Descriptor> processes(kRanks);
  processes[0] = std::move(descriptor);
  Rank rank(std::move(processes));
  rank.waits.expect(0, kReadyFlag, 1, 1, "op");
  CHECK(!rank.aborts("", 50ms));
  rank.raise(kReadyFlag, 0, 1);
  kill_and_wait(pid);
  CHECK(!rank.waits.judge());  // not by what was read before its death
  CHECK(!rank.aborts("", 100ms));
  rank.waits.expect(0, kReadyFlag, 2, 2, "op");
  CHECK(rank.aborts("rank 0 died", 200ms));
}

void a_signal_from_a_drained_stream_is_no_signal() {
  for (const bool at_once : {true, false}) {
    Rank rank;
    rank.waits.expect(0, kReadyFlag, 1, 1, "op");
    if (!at_once) {
      rank.waits.read();
      rank.raise(kReadyFlag, 0, 1);  // read with a mark that is not yet that of a drained stream
      rank.raise(kGaveUpFlag, 0, 1);
      rank.waits.read();
      CHECK(!rank.waits.judge());
    }
    rank.raise(kGaveUpFlag, 0, 2);
    rank.raise(kReadyFlag, 0, 1);
    CHECK(rank.aborts("rank 0 aborted the call", 200ms));
  }
  Rank rank;  // one that was good before is
  rank.waits.expect(0, kReadyFlag, 1, 1, "op");
  rank.raise(kReadyFlag, 0, 1);
  rank.waits.read();
  rank.raise(kGaveUpFlag, 0, 2);
  rank.waits.expect(1, kReadyFlag, 1, 1, "op");
  rank.raise(kReadyFlag, 1, 1);
  CHECK(!rank.aborts("", 100ms));
}

void a_rank_that_gave_up_waits_for_what_comes_naturally() {
  Rank rank;
  rank.waits.expect(0, kReadyFlag, 1, 1, "op");
  rank.waits.expect(1, kReadyFlag, 1, 1, "op");
  rank.waits.give_up();
  CHECK(rank.marks[0] == 1 && rank.marks[1] == 1);
  const int before = written;
  CHECK(!rank.aborts("", kTimeout / 2));
  rank.raise(kReadyFlag, 0, 1);
  rank.raise(kReadyFlag, 1, 1);
  CHECK(!rank.aborts("", 2 * kTimeout));
  CHECK(written == before && rank.marks[0] == 1);  // nothing was made up
}

bool drained(Rank& rank) { return rank.seen(rank.flag(kReadyFlag, 0)) == 7; }

void a_rank_that_gave_up_is_drained_when_no_peer_is_left() {
  auto [pid, descriptor] = child();
  std::vector<Descriptor> processes(kRanks);
  processes[0] = std::move(descriptor);
  Rank rank(std::move(processes));
  rank.waits.expect(0, kReadyFlag, 7, 7, "op");
  rank.waits.give_up();
  kill_and_wait(pid);
  // Rank 1 lives and might take what is signalled.
  CHECK(!rank.rounds([&] { return drained(rank); }, kTimeout / 2));
  CHECK(rank.marks[1] == 1);
  rank.raise(kGaveUpFlag, 1, 1);  // it has given up, too
  CHECK(rank.rounds([&] { return drained(rank); }, kTimeout / 4));
  CHECK(rank.marks[0] == 2 && rank.marks[1] == 2 && rank.reason.empty());
}

void a_rank_that_gave_up_is_drained_after_the_time_out() {
  Rank rank;
  rank.waits.expect(0, kReadyFlag, 7, 7, "op");
  rank.waits.give_up();
  CHECK(!rank.rounds([&] { return drained(rank); }, kTimeout / 2));
  CHECK(rank.rounds([&] { return drained(rank); }, 2 * kTimeout));
  CHECK(rank.seen(rank.flag(kReadyFlag, 1)) == 0);  // what nobody waits for stays
  rank.raise(kReadyFlag, 0, 6);                     // a late signal of a call before
  CHECK(rank.rounds([&] { return drained(rank); }, kTimeout));
  CHECK(rank.reason.empty());
}

void threads_meet_without_races() {
  Rank rank;
  std::atomic<bool> going{true};
  std::thread reader([&] {
    while (going) rank.waits.read();
  });
  std::thread judge([&] {
    while (going) CHECK(!rank.waits.judge());
  });
  for (uint32_t epoch = 1; epoch < 3000; ++epoch) {
    rank.waits.expect(epoch % kPeers, kReadyFlag, epoch, epoch, "op");
    rank.raise(kReadyFlag, epoch % kPeers, epoch);
  }
  rank.waits.close();
  going = false;
  reader.join();
  judge.join();
}

}  // namespace

int main() {
  a_driver_that_hangs_holds_up_nobody_else();
  a_dead_peer_that_had_signalled_is_no_failure();
  a_signal_from_a_drained_stream_is_no_signal();
  a_rank_that_gave_up_waits_for_what_comes_naturally();
  a_rank_that_gave_up_is_drained_when_no_peer_is_left();
  a_rank_that_gave_up_is_drained_after_the_time_out();
  threads_meet_without_races();
  std::printf("ok\n");
}
