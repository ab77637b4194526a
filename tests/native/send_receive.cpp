// Messages between ranks as threads of one process: random sizes, tags, orders and threads; and
// what goes wrong with them.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "helpers.h"
#include "messages/messages.h"

namespace {

using namespace symm_cp;
using namespace native_test;
using std::chrono::milliseconds;

constexpr int kThreads = 2;            // of a rank
constexpr uint64_t kAnyTag = 1 << 20;  // of messages that are received from any source
constexpr int64_t kLong = kEagerBytes + 1;

using Body = std::function<void(Messages&, int)>;

void on_all_ranks(int world_size, milliseconds timeout, const Body& body) {
  const auto notes = std::make_shared<Notes>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank)
    threads.emplace_back([&, rank] {
      Messages messages(notes, "threads", rank, world_size, timeout);
      body(messages, rank);
    });
  for (std::thread& thread : threads) thread.join();
}

MessageBytes bytes_of(std::vector<char>& data, const std::string& name = "bytes") {
  return {data.data(), static_cast<int64_t>(data.size()), name, nullptr};
}

// --- random messages -----------------------------------------------------------------------------

// A message of the n-th thread of a rank to the n-th thread of another one.
struct Planned {
  uint64_t tag;
  int64_t bytes;
  unsigned seed;
};

int64_t size_of(std::mt19937& random) {
  switch (random() % 6) {
    case 0: return 0;
    case 1: return random() % 64;
    case 2: return kEagerBytes - 1 + random() % 3;
    case 3: return random() % 300000;
    default: return random() % 10000;
  }
}

std::vector<Planned> plan_of(unsigned seed, int from, int to, int thread, int count) {
  std::mt19937 random(seed + static_cast<unsigned>(from * 64 + to * 8 + thread));
  std::vector<Planned> plan;
  for (int i = 0; i < count; ++i) {
    const auto tag = static_cast<uint64_t>(thread) << 8 | random() % 3;
    plan.push_back({tag, size_of(random), static_cast<unsigned>(random())});
  }
  return plan;
}

void fill(std::vector<char>& data, unsigned seed) {
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(seed + i + (i >> 8) * 7);
}

struct Flying {
  Delivery delivery;
  std::unique_ptr<std::vector<char>> data;
  unsigned seed = 0;
  bool sends = false;
};

void finish(Flying& flying) {
  flying.delivery.wait();
  if (flying.sends) {
    std::fill(flying.data->begin(), flying.data->end(), -1);  // the caller's again
    return;
  }
  std::vector<char> wanted(flying.data->size());
  fill(wanted, flying.seed);
  expect(*flying.data == wanted, "another message was received");
}

// All that a thread sends to a rank and receives from it, in flight together, in the order of each
// tag but otherwise in any.
struct Stream {
  int peer;
  bool sends;
  std::deque<Planned> left;
};

void exchange_random(Messages& messages, int rank, int world_size, int thread, unsigned seed,
                     int count) {
  std::mt19937 random(seed * 31 + static_cast<unsigned>(rank * 8 + thread));
  std::vector<Stream> streams;
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == rank) continue;
    const auto sent = plan_of(seed, rank, peer, thread, count);
    const auto received = plan_of(seed, peer, rank, thread, count);
    for (uint64_t tag = 0; tag < 3; ++tag)
      for (const bool sends : {true, false}) {
        Stream stream{peer, sends, {}};
        for (const Planned& each : sends ? sent : received)
          if ((each.tag & 255) == tag) stream.left.push_back(each);
        if (sends && tag > 0) continue;
        if (sends) stream.left = {sent.begin(), sent.end()};
        if (!stream.left.empty()) streams.push_back(std::move(stream));
      }
  }
  std::vector<Flying> in_flight;
  while (!streams.empty()) {
    const size_t at = random() % streams.size();
    Stream& stream = streams[at];
    const Planned next = stream.left.front();
    stream.left.pop_front();
    auto data = std::make_unique<std::vector<char>>(next.bytes);
    if (stream.sends) fill(*data, next.seed);
    Delivery delivery = stream.sends
                            ? messages.start_send(stream.peer, next.tag, bytes_of(*data))
                            : messages.start_receive(stream.peer, next.tag, bytes_of(*data));
    in_flight.push_back({std::move(delivery), std::move(data), next.seed, stream.sends});
    if (stream.left.empty()) streams.erase(streams.begin() + static_cast<std::ptrdiff_t>(at));
    // A wait for one that its peer starts later could keep this rank from what the peer waits for.
    for (size_t i = in_flight.size(); i-- > 0;)
      if (random() % 4 == 0 && in_flight[i].delivery.done()) {
        finish(in_flight[i]);
        in_flight.erase(in_flight.begin() + static_cast<std::ptrdiff_t>(i));
      }
    if (random() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  }
  std::shuffle(in_flight.begin(), in_flight.end(), random);
  for (Flying& flying : in_flight) finish(flying);
}

// Every rank receives from any other as often as each of them sends.
void receive_from_any(Messages& messages, int rank, int world_size, int count) {
  const auto value = [](int source, int number) { return source * 1000 + number; };
  std::vector<int> sent(static_cast<size_t>(count * world_size));
  std::vector<Delivery> sends;
  for (int i = 0; i < count; ++i)
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer == rank) continue;
      int& word = sent[static_cast<size_t>(i * world_size + peer)] = value(rank, i);
      sends.push_back(messages.start_send(peer, kAnyTag, {&word, sizeof(word), "int", nullptr}));
    }
  std::vector<int> from(static_cast<size_t>(world_size), 0);
  for (int i = 0; i < count * (world_size - 1); ++i) {
    int word = -1;
    const int source = messages.receive(kAnySource, kAnyTag, {&word, sizeof(word), "", nullptr});
    expect(word == value(source, from[static_cast<size_t>(source)]++), "not in order");
  }
  for (Delivery& send : sends) send.wait();
}

void ping_pong(Messages& messages, int rank, int count) {
  std::vector<char> data(100);
  for (int i = 0; i < count; ++i) {
    if (rank == i % 2) messages.send(1 - rank, 9, bytes_of(data));
    if (rank != i % 2) messages.receive(1 - rank, 9, bytes_of(data));
  }
}

void random_messages(unsigned seed) {
  for (int world_size = 2; world_size <= 4; ++world_size)
    on_all_ranks(world_size, std::chrono::seconds(60), [&](Messages& messages, int rank) {
      std::vector<std::thread> threads;
      for (int thread = 0; thread < kThreads; ++thread)
        threads.emplace_back(
            [&, thread] { exchange_random(messages, rank, world_size, thread, seed, 60); });
      for (std::thread& thread : threads) thread.join();
      receive_from_any(messages, rank, world_size, 50);
      if (rank < 2) ping_pong(messages, rank, 300);
    });
}

// --- faults --------------------------------------------------------------------------------------

void different_sizes(Messages& messages, int rank) {
  std::vector<char> few(24), many(kLong);
  for (std::vector<char>* sent : {&few, &many}) {
    std::vector<char> taken(16);
    const std::string sizes = "rank 1 sends float32[2, 3] (" + std::to_string(sent->size()) +
                              " bytes), rank 0 receives float32[4] (16 bytes)";
    if (rank == 0) {
      expect_failure([&] { messages.receive(1, 7, bytes_of(taken, "float32[4]")); },
                     "recv from rank 1 (tag 7) on rank 0: " + sizes);
    } else {
      // A short message has left: its sender hears with the next receive.
      expect_failure(
          [&] {
            messages.send(0, 7, bytes_of(*sent, "float32[2, 3]"));
            messages.receive(0, 8, bytes_of(taken));
          },
          "send to rank 0 (tag 7) on rank 1: " + sizes);
    }
    ping_pong(messages, rank, 4);
  }
}

// What comes after a time-out finds another receive, not the buffer of the one that has failed.
void late_message(Messages& messages, int rank) {
  for (const int64_t size : {int64_t{100}, kLong}) {
    std::vector<char> data(static_cast<size_t>(size), 1), again(static_cast<size_t>(size), 0);
    if (rank == 0) {
      data.assign(data.size(), 5);
      expect_failure([&] { messages.receive(1, 3, bytes_of(data), milliseconds(20)); },
                     "recv from rank 1 (tag 3) on rank 0: timed out after 20 ms");
      ping_pong(messages, rank, 1);
      messages.receive(1, 3, bytes_of(again));
      expect(again == std::vector<char>(again.size(), 1), "the message is lost");
      expect(data == std::vector<char>(data.size(), 5), "it came to the old buffer");
    } else {
      ping_pong(messages, rank, 1);
      messages.send(0, 3, bytes_of(data));
    }
    ping_pong(messages, rank, 4);
  }
}

// A long send that nobody receives is taken back, and what follows it is received instead.
void send_times_out(Messages& messages, int rank) {
  std::vector<char> first(kLong, 1), second(kLong, 2), found(kLong, 0);
  if (rank == 0) {
    expect_failure([&] { messages.send(1, 4, bytes_of(first), milliseconds(20)); },
                   "send to rank 1 (tag 4) on rank 0: timed out");
    ping_pong(messages, rank, 2);
    messages.send(1, 4, bytes_of(second));
  } else {
    ping_pong(messages, rank, 2);
    messages.receive(0, 4, bytes_of(found));
    expect(found == second, "the send that was given up was received");
  }
}

// A long message that its sender takes back while the receiver reads it: none is received in part.
void withdrawn_while_read(Messages& messages, int rank) {
  std::mt19937 random(17);
  for (uint64_t turn = 0; turn < 30; ++turn) {
    const auto value = static_cast<char>(turn + 1);
    const auto late = std::chrono::microseconds(random() % 1500);
    std::vector<char> data(size_t{3} << 20, rank == 0 ? value : 0);
    if (rank == 0) {
      Delivery send = messages.start_send(1, 100 + turn, bytes_of(data));
      std::this_thread::sleep_for(late);
      try {
        send.wait(milliseconds(1));
      } catch (const PeerError&) {
      }
      data.assign(data.size(), 0);
    } else {
      try {
        messages.receive(0, 100 + turn, bytes_of(data), milliseconds(100));
        expect(data == std::vector<char>(data.size(), value), "half of it is something else");
      } catch (const PeerError&) {
      }
    }
    ping_pong(messages, rank, 1);
  }
}

void bad_arguments(Messages& messages, int rank) {
  std::vector<char> data(1);
  expect_failure([&] { messages.start_send(rank, 0, bytes_of(data)); }, "another rank");
  expect_failure([&] { messages.start_send(-1, 0, bytes_of(data)); }, "another rank");
  expect_failure([&] { messages.start_receive(2, 0, bytes_of(data)); }, "another rank");
}

// More than the ring and the queue hold, to a rank that comes late; it may have left by then.
std::atomic<bool> all_started;

void many_before_the_receiver(Messages& messages, int rank) {
  constexpr int kCount = 400;
  std::vector<std::vector<char>> data(kCount, std::vector<char>(60000));
  if (rank == 0) {
    std::vector<Delivery> sends;
    for (int i = 0; i < kCount; ++i) {
      fill(data[static_cast<size_t>(i)], static_cast<unsigned>(i));
      sends.push_back(messages.start_send(1, 1, bytes_of(data[static_cast<size_t>(i)])));
    }
    expect(sends.front().done() && !sends.back().done(), "the queue has no end");
    all_started = true;
    for (Delivery& send : sends) send.wait();
    return;
  }
  while (!all_started) std::this_thread::sleep_for(milliseconds(1));
  for (int i = 0; i < kCount; ++i) {
    std::vector<char> found(60000), wanted(60000);
    messages.receive(0, 1, bytes_of(found));
    fill(wanted, static_cast<unsigned>(i));
    expect(found == wanted, "another message was received");
  }
}

void leaves(Messages& messages, int rank) {
  std::vector<char> data(100, 3), large(kLong), found(100);
  if (rank == 0) {
    messages.send(1, 1, bytes_of(data));
    return;  // closes
  }
  expect_failure([&] { messages.receive(0, 2, bytes_of(found)); },
                 "recv from rank 0 (tag 2) on rank 1: rank 0 has left the group");
  messages.receive(0, 1, bytes_of(found));
  expect(found == data, "what was sent before is received");
  expect_failure([&] { messages.receive(0, 1, bytes_of(found)); }, "rank 0 has left the group");
  expect_failure([&] { messages.receive(kAnySource, 1, bytes_of(found)); }, "left the group");
  expect_failure([&] { messages.send(0, 1, bytes_of(large)); }, "rank 0 has left the group");
}

void aborted(Messages& messages, int rank) {
  std::vector<char> data(100), large(kLong);
  if (rank == 0) {
    std::atomic<int> told{0};
    std::vector<Delivery> all{messages.start_receive(1, 1, bytes_of(data)),
                              messages.start_receive(kAnySource, 2, bytes_of(data)),
                              messages.start_send(1, 3, bytes_of(large))};
    for (Delivery& each : all) each.when_done([&] { ++told; });
    std::thread other([&] {
      std::this_thread::sleep_for(milliseconds(50));
      messages.abort("enough");
    });
    for (Delivery& each : all) expect_failure([&] { each.wait(); }, "enough");
    other.join();
    expect(told == 3, "each has ended once");
    expect_failure([&] { messages.start_receive(1, 1, bytes_of(data)); }, "enough");
  } else {
    expect_failure([&] { messages.receive(0, 5, bytes_of(data)); }, "rank 0 has left the group");
  }
}

// The last reference to what holds a buffer goes when the transmission has ended, not before.
void owners(Messages& messages, int rank) {
  auto data = std::make_shared<std::vector<char>>(kLong);
  const std::weak_ptr<void> watched = data;
  MessageBytes bytes{data->data(), kLong, "", std::move(data)};
  const Delivery delivery = rank == 0 ? messages.start_send(1, 1, std::move(bytes))
                                      : messages.start_receive(0, 1, std::move(bytes));
  while (!delivery.done()) {
    std::this_thread::sleep_for(milliseconds(1));  // the engine does it
  }
  for (int i = 0; i < 1000 && !watched.expired(); ++i) std::this_thread::sleep_for(milliseconds(1));
  expect(watched.expired(), "the buffer is still held");
}

}  // namespace

namespace native_test {

void check_messages(unsigned seed) {
  random_messages(seed);
  const std::chrono::seconds long_time(30);
  for (const bool reads : {true, false}) {
    setenv("SYMM_CP_READ_MESSAGES", reads ? "1" : "0", 1);
    all_started = false;
    for (const auto& body : {different_sizes, late_message, send_times_out, withdrawn_while_read,
                             bad_arguments, many_before_the_receiver, leaves, aborted, owners})
      on_all_ranks(2, long_time, body);
  }
  unsetenv("SYMM_CP_READ_MESSAGES");
}

}  // namespace native_test
