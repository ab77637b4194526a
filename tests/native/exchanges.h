// What exchanges.cpp and exchange_faults.cpp share.
#pragma once

#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "threads.h"

namespace native_test {

constexpr int64_t kLargest = 3 * symm_cp::kPieceBytes;

// The steps of one kind of exchange, on one channel.
struct Loops {
  int64_t kind, channel, loop_kind;
  std::vector<symm_cp::Loop> by_rank;
};

// Gives the group of a rank all loops, without the waits for a flag (-1: with all).
void install(Rank& rank, const std::vector<Loops>& all, int skip);
symm_cp::Exchange named(symm_cp::ExchangeKind kind, const std::string& call_name);

// exchange_faults.cpp
void check_exchange_faults(const std::vector<Loops>& loops, int world_size);

}  // namespace native_test
