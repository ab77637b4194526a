// Which cores the threads of the ranks of a group run on, as the ranks tell each other.
#pragma once

#include <vector>

#include "base/team.h"
#include "channel/wire.h"

namespace symm_cp {

// In the control page of a rank.
struct CoreRecord {
  Word threads;  // 0: not yet told
  Word mask[kMostCores / 32];
};

// A rank tells its cores when it would divide work for the first time, and when the number of its
// threads has changed. Until all have, they work alone.
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
