// Ranks as threads of one process, so that sanitizers see all that ranks do to each other's memory.
//
// threads.cpp stands in for symmetric_memory.cpp, which needs torch, and for the system's mappings.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "channel/group.h"
#include "helpers.h"
#include "memory/mapping.h"
#include "memory/segment.h"

namespace native_test {

constexpr size_t kSharedBytes = 1 << 16;

class Rank {
 public:
  Rank(Notes& notes, int rank, int world_size, std::chrono::milliseconds timeout);
  ~Rank();

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  symm_cp::Segment shared;
  std::shared_ptr<symm_cp::Group> group;

  std::shared_ptr<symm_cp::Peers> peers();
  // Collective: a rendezvous of all ranks' segments.
  std::shared_ptr<symm_cp::Mapping> map(const symm_cp::Segment& segment);

 private:
  int rank_;
  int world_size_;
  std::string name_;
  int64_t sequence_ = 0;
};

// From now on each rank divides its work among this many threads, whatever the cores.
void set_threads_of_ranks(int threads);

// Runs `body` in a thread for each rank, and waits for their ends.
void on_all_ranks(int world_size, std::chrono::milliseconds timeout,
                  const std::function<void(Rank&)>& body);

// So many more mappings of this thread succeed; -1: all do.
extern thread_local int mappings_left;

// Whether any segment is mapped.
bool has_mappings();

}  // namespace native_test
