// The cores that the threads of a group's ranks run on, as published by the ranks.
#pragma once

#include <vector>

#include "base/team.h"
#include "channel/wire.h"

namespace symm_cp {

// The record that a rank publishes in its control page.
struct CoreRecord {
  Word threads;  // 0: not yet published
  Word mask[kMostCores / 32];
};

// A rank publishes its cores before it first divides work, and when its number of threads has
// changed. Until all ranks have published theirs, each works with one thread.
class RankCores : public Cores {
 public:
  void add(CoreRecord* record, bool is_own);
  bool suffice(int threads) override;

 private:
  void tell(int threads);

  CoreRecord* own_ = nullptr;
  std::vector<CoreRecord*> peers_;
};

}  // namespace symm_cp
