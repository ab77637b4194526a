// What goes wrong with exchanges: all ranks hear why, and the next exchange is right.
#include <atomic>
#include <future>
#include <memory>
#include <thread>

#include "exchanges.h"

namespace {

using namespace symm_cp;
using namespace native_test;
using std::chrono::seconds;

// An all-to-all in which each rank gives as much to each; its memory is the caller's.
Exchange all_to_all(Rank& rank, std::vector<char>& input, std::vector<char>& output) {
  Exchange exchange = named(ExchangeKind::kAllToAll, "all_to_all");
  const auto world_size = static_cast<size_t>(rank.world_size());
  const auto bytes = static_cast<int64_t>(input.size() / world_size);
  for (size_t peer = 0; peer < world_size; ++peer) {
    for (const bool gives : {true, false}) {
      Extent extent;
      extent.data = (gives ? input : output).data() + peer * static_cast<size_t>(bytes);
      extent.bytes = bytes;
      (gives ? exchange.input : exchange.output).push_back(extent);
    }
  }
  return exchange;
}

// Carries an exchange out on a channel. Whoever waits for it is told as its caller is.
void carry_out(Rank& rank, Exchange exchange, int channel) {
  if (channel == kSync) return run(*rank.group, std::move(exchange));
  // It may be told after those who wait.
  const auto told = std::make_shared<std::promise<std::string>>();
  const auto done = [told](const std::string& failure) { told->set_value(failure); };
  const Started started = start(*rank.group, std::move(exchange), false, done);
  const std::string heard = failure_of([&] { rank.group->lane().wait(started.number); });
  const std::string ended = told->get_future().get();
  expect(ended == heard, "'" + ended + "' was told, '" + heard + "' was thrown");
  if (!heard.empty()) throw PeerError(heard);
}

// The exchange after a fault is right.
void expect_good(Rank& rank, int channel) {
  const auto world_size = static_cast<size_t>(rank.world_size());
  const auto own = static_cast<size_t>(rank.rank());
  std::vector<char> input(100 * world_size), output(input.size());
  for (size_t i = 0; i < input.size(); ++i) input[i] = static_cast<char>(own * 16 + i / 100);
  carry_out(rank, all_to_all(rank, input, output), channel);
  for (size_t i = 0; i < output.size(); ++i)
    expect(output[i] == static_cast<char>(i / 100 * 16 + own), "wrong after a fault");
}

using Fault = std::function<void(Rank&, Exchange&)>;

// Each fault with one piece and with several, on both channels: all ranks hear the cause.
void expect_told(Rank& rank, const Fault& fault, const std::string& cause) {
  for (int i = 0; i < 6; ++i) {
    const auto parts = static_cast<size_t>(rank.world_size());
    std::vector<char> input(i < 2 ? 400 * parts : kLargest / 4 * 4), output(input.size());
    Exchange exchange = all_to_all(rank, input, output);
    fault(rank, exchange);
    expect_failure([&] { carry_out(rank, std::move(exchange), i % 2); }, cause);
    expect_good(rank, i % 2);
  }
}

void different_sizes(Rank& rank) {
  const int last = rank.world_size() - 1;
  const auto fault = [last](Rank& on, Exchange& exchange) {
    if (on.rank() == last) exchange.output[0].bytes -= 4;
  };
  // Who gives, and ranks that have nothing to do with the two, may have ended the only piece.
  for (int i = 0; i < 4; ++i) {
    std::vector<char> input(kLargest), output(kLargest);
    Exchange exchange = all_to_all(rank, input, output);
    fault(rank, exchange);
    expect_failure([&] { carry_out(rank, std::move(exchange), i % 2); },
                   "bytes to rank " + std::to_string(last) + ", which takes ");
    expect_good(rank, i % 2);
  }
}

// Floats have no such reduction; that is noticed when the data of the peers is there.
void throws(Rank& rank) {
  const int last = rank.world_size() - 1;
  for (int i = 0; i < 6; ++i) {
    std::vector<char> input(kLargest), output(kLargest / static_cast<size_t>(last + 1) / 4 * 4);
    Exchange exchange = all_to_all(rank, input, output);
    exchange.kind = ExchangeKind::kReduceScatter;
    for (Extent& extent : exchange.input) extent.bytes = static_cast<int64_t>(output.size());
    exchange.output.resize(1);
    exchange.output[0].data = output.data();
    exchange.output[0].bytes = static_cast<int64_t>(output.size());
    exchange.dtype = DType::kFloat32;
    if (rank.rank() == last) exchange.reduce_op = ReduceOp::kBxor;
    expect_failure(
        [&] { carry_out(rank, std::move(exchange), i % 2); },
        rank.rank() == last ? "has no reduction" : "(on rank " + std::to_string(last) + ")");
    expect_good(rank, i % 2);
  }
}

void too_large(Rank& rank) {
  const int last = rank.world_size() - 1;
  const auto fault = [last](Rank& on, Exchange& exchange) {
    if (on.rank() == last) exchange.piece_bytes = 64 * on.world_size();
  };
  expect_told(rank, fault, "there must be at most ");
}

void other_kinds(Rank& rank) {
  const int last = rank.world_size() - 1;
  const auto fault = [last](Rank& on, Exchange& exchange) {
    if (on.rank() == last) exchange.call_name = "another";
  };
  expect_told(rank, fault, "ranks disagree: rank ");
}

void refuses(Rank& rank) {
  const int last = rank.world_size() - 1;
  for (int i = 0; i < 8; ++i) {
    std::vector<char> input(kLargest), output(kLargest);
    if (rank.rank() == last)
      refuse(*rank.group, i % 2, "no luck");
    else
      expect_failure([&] { carry_out(rank, all_to_all(rank, input, output), i % 2); },
                     "failed: no luck");
    expect_good(rank, i % 2);
  }
}

// Rank 0 leaves while exchanges are in flight that the last rank does not make.
void leaves(const std::vector<Loops>& loops, int world_size) {
  std::vector<std::vector<char>> memory(static_cast<size_t>(2 * world_size),
                                        std::vector<char>(kLargest));
  std::vector<std::atomic<int>> failed(static_cast<size_t>(world_size));
  on_all_ranks(world_size, seconds(30), [&](Rank& rank) {
    install(rank, loops, -1);
    const auto own = static_cast<size_t>(rank.rank());
    const auto exchange = [&] { return all_to_all(rank, memory[2 * own], memory[2 * own + 1]); };
    const auto done = [&failed, own](const std::string& failure) {
      failed[own] += !failure.empty();
    };
    expect_good(rank, kAsync);
    if (rank.rank() == world_size - 1) {
      // Rank 0 has left, or another rank waits in the call of the other channel.
      expect(!failure_of([&] { run(*rank.group, exchange()); }).empty(), "it cannot end");
      return;
    }
    start(*rank.group, exchange(), true, done);
    const int64_t second = start(*rank.group, exchange(), false, done).number;
    if (rank.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      return;
    }
    expect(!failure_of([&] { rank.group->lane().wait(second); }).empty(), "it cannot end");
  });
  for (int rank = 0; rank < world_size - 1; ++rank)
    expect(failed[static_cast<size_t>(rank)] == 2, "each has ended once");
}

}  // namespace

namespace native_test {

void check_exchange_faults(const std::vector<Loops>& loops, int world_size) {
  for (const auto& fault : {different_sizes, throws, too_large, other_kinds, refuses})
    on_all_ranks(world_size, seconds(30), [&](Rank& rank) {
      install(rank, loops, -1);
      fault(rank);
    });
  leaves(loops, world_size);
}

}  // namespace native_test
