// Exchanges that ranks as threads of one process carry out, and what goes wrong with them.
//
//   ranks faults                       ranks that give up, with work in flight, and strangers
//   ranks exchanges FILE SEED [FLAG]   see exchanges.cpp
//   ranks messages SEED                see send_receive.cpp
//   ranks signals                      one-sided puts, and signals of both kinds, in a ring
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <thread>

#include "base/error.h"
#include "channel/group.h"
#include "memory/segment.h"
#include "threads.h"

namespace {

using namespace symm_cp;
using namespace native_test;

// --- faults --------------------------------------------------------------------------------------

// A call in which each rank signals each peer and waits for it.
void meet(Rank& rank, const std::string& what) {
  Workspace& workspace = rank.group->workspace(kSync);
  const int64_t number = rank.group->next(kSync);
  try {
    Call call = workspace.begin(number, 0, what);
    Channel& channel = *workspace.channel();
    channel.announce(call, nullptr);
    for (const bool waits : {false, true}) {
      for (int peer = 0; peer < rank.world_size(); ++peer) {
        if (peer == rank.rank()) continue;
        waits ? channel.wait(peer, kReadyFlag, call) : channel.signal(peer, kReadyFlag, call);
      }
    }
    channel.verify_all(call);
  } catch (const std::exception& error) {
    rank.group->failed(kSync, number, error);
    throw;
  }
}

// The last rank does not make a call, the first ones included; the others hear why, and all go on.
void refuse(Rank& rank) {
  const int last = rank.world_size() - 1;
  for (int i = 0; i < 20; ++i) {
    if (rank.rank() == last) {
      for (int times = 0; times <= i % 3; ++times) rank.group->refuse(kSync, "no luck");
    } else {
      for (int times = 0; times <= i % 3; ++times)
        expect_failure([&] { meet(rank, "op"); }, "failed: no luck");
    }
    meet(rank, "good");
  }
}

// Ranks that make different calls are all told, and go on.
void disagree(Rank& rank) {
  for (int i = 0; i < 10; ++i) {
    expect_failure([&] { meet(rank, "op " + std::to_string(rank.rank())); }, "ranks disagree");
    meet(rank, "good");
  }
}

// Calls that will never end, since the last rank does not make them: their engine and who waits for
// them do.
void close_in_flight(Rank& rank) {
  if (rank.rank() == rank.world_size() - 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    return;
  }
  Lane& lane = rank.group->lane();
  const int64_t first = rank.group->next(kAsync), second = rank.group->next(kAsync);
  lane.submit({first, "op", 0}, true);
  lane.submit({second, "op", 0}, rank.rank() == 0);
  if (rank.rank() == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    return;
  }
  const std::string message = failure_of([&] { lane.wait(second); });
  expect(!message.empty() && lane.finished(first), "who waits for them hears that they failed");
}

// One rank cannot map the first, second, ... of the segments: no rank has the memory then.
void no_memory(Rank& rank) {
  const int last = rank.world_size() - 1, mappings = 1 + 2 * last;
  const std::string what =
      rank.rank() == last ? "cannot map" : "(on rank " + std::to_string(last) + ")";
  const Segment more = Segment::create(4096, "more");
  for (int allowed = 0; allowed <= mappings; ++allowed) {
    mappings_left = rank.rank() == last ? allowed : -1;
    const auto map = [&] { rank.map(more); };
    if (allowed < mappings)
      expect_failure(map, what);
    else
      expect(failure_of(map).empty(), "there is memory again");
  }
  mappings_left = -1;
}

void time_is_over(Rank& rank) {
  const int peer = (rank.rank() + 1) % rank.world_size();
  meet(rank, "good");
  rank.group->set_timeout(std::chrono::milliseconds(120));
  const int64_t number = rank.group->next(kSync);
  Call call = rank.group->workspace(kSync).begin(number, 0, "op");
  const auto wait = [&] { rank.group->workspace(kSync).channel()->wait(peer, kPartialFlag, call); };
  expect_failure(wait, "op: rank ");
}

void segments() {
  expect_failure([] { Segment::map(Descriptor(memfd_create("open", MFD_ALLOW_SEALING)), 4096); },
                 "needs 4096 sealed bytes, got 0");
  const Segment made = Segment::create(8192, "made");
  expect_failure([&] { Segment::map(Descriptor(dup(made.fd())), 4096); }, "got 8192");
  expect(ftruncate(made.fd(), 4096) != 0, "sealed memory cannot shrink");
  expect_failure([] { Segment::map(Descriptor(open("/dev/zero", O_RDWR)), 4096); }, "sealed");
  expect_failure([] { Segment::create(size_t{1} << 50, "huge"); }, "1125899906842624 bytes");
}

// Someone who found the socket without the token is no rank; the ranks meet all the same.
void strangers() {
  Notes notes;
  std::atomic<bool> over{false};
  int refused = 0;
  std::thread stranger([&] {
    while (!over) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const auto token = notes.get("symm_cp/peer/0");
      if (!token) continue;
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      const std::string name = "symm_cp-" + token->substr(0, 32);
      std::memcpy(address.sun_path + 1, name.data(), name.size());
      const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
      const Descriptor fd(socket(AF_UNIX, SOCK_SEQPACKET, 0));
      if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) continue;
      // The layout of a greeting: magic, rank, world size, token.
      struct {
        uint32_t magic = 0x53434d32;
        int32_t rank = 1, world_size = 2;
        char token[32] = "not the token";
      } handshake;
      char answer = 0;
      send(fd.get(), &handshake, sizeof(handshake), MSG_NOSIGNAL);
      refused += recv(fd.get(), &answer, 1, 0) <= 0;  // the other end was closed
    }
  });
  std::thread first([&] { Rank rank(notes, 0, 2, std::chrono::seconds(30)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  std::thread second([&] { Rank rank(notes, 1, 2, std::chrono::seconds(30)); });
  first.join();
  second.join();
  over = true;
  stranger.join();
  expect(refused > 0, "the stranger was not heard at all");
}

void faults() {
  const std::chrono::seconds long_time(30);
  for (int world_size = 2; world_size <= 4; ++world_size) {
    on_all_ranks(world_size, long_time, refuse);
    on_all_ranks(world_size, long_time, disagree);
    on_all_ranks(world_size, long_time, close_in_flight);
    on_all_ranks(world_size, long_time, no_memory);
    on_all_ranks(world_size, long_time, time_is_over);
  }
  segments();
  strangers();
}

// --- one-sided signals ---------------------------------------------------------------------------

constexpr int kTurns = 200;
constexpr size_t kFloats = 64;  // of a put

// Each rank writes to the next one and signals; that one reads, and signals back that it has.
void pass_around(Rank& rank) {
  const int W = rank.world_size(), me = rank.rank();
  const int after = (me + 1) % W, before = (me + W - 1) % W;
  const auto mapping = rank.map(rank.shared);
  const auto place = [&](int owner, int source) {
    return static_cast<float*>(mapping->data()[static_cast<size_t>(owner)]) +
           static_cast<size_t>(source) * kFloats;
  };
  for (int turn = 1; turn <= kTurns; ++turn) {
    std::fill_n(place(after, me), kFloats, static_cast<float>(turn * 10 + me));
    mapping->put_number(after, mapping->number_of(after), turn);
    mapping->await_number(mapping->number_of(me), before, "signals",
                          [&](int64_t seen) { return seen == turn; });
    const float* got = place(me, before);
    for (size_t i = 0; i < kFloats; ++i)
      expect(got[i] == static_cast<float>(turn * 10 + before), "wrong: a put before a signal");
    mapping->count_signal(before);
    mapping->take_signal(after, "signals");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (const char* threads = std::getenv("RANK_THREADS")) set_threads_of_ranks(std::atoi(threads));
  const auto flag = [&](int at) { return argc > at ? std::atoi(argv[at]) : -1; };
  if (mode == "faults" && argc == 2) {
    faults();
  } else if (mode == "messages" && argc == 3) {
    check_messages(static_cast<unsigned>(std::atoi(argv[2])));
  } else if (mode == "signals" && argc == 2) {
    for (int ranks = 1; ranks <= 4; ++ranks)
      on_all_ranks(ranks, std::chrono::seconds(60), pass_around);
  } else if (mode == "exchanges" && argc >= 4) {
    check_exchanges(argv[2], static_cast<unsigned>(std::atoi(argv[3])), flag(4));
  } else {
    expect(false, "see the head of ranks.cpp");
  }
  expect(!has_mappings(), "segments are still mapped");
  std::puts("ok");
}
