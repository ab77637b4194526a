#pragma once

#include <cstdint>
#include <vector>

namespace symm_cp {

// All of these divide large copies among the threads that the calling thread has (base/team.h).

// Copies between addresses of any alignment that do not overlap. `streaming` writes past the
// caches, for data that they cannot hold. Either way, other threads may read the data once this has
// returned and they have been signalled. `to_slot` says that peers have read the memory at `to`.
void copy_bytes(void* to, const void* from, int64_t bytes, bool streaming, bool to_slot = false);

// Copies a result, past the caches where that is faster (memory/slot_stores.h).
void copy_result(void* to, const void* from, int64_t bytes);

// Planes of rows of bytes: where the first begins, and how far apart planes and rows are.
struct Planes {
  char* data;
  int64_t plane;
  int64_t pitch;
};

// `planes` times `rows` rows of `row` bytes, which do not overlap.
struct PlaneCopy {
  Planes to;
  Planes from;
  int64_t planes;
  int64_t rows;
  int64_t row;
  bool streaming;

  int64_t bytes() const { return planes * rows * row; }
};

void copy_planes(PlaneCopy copy);

// Carries out several copies, in one pass if they read or write parts of the same rows.
void copy_all_planes(std::vector<PlaneCopy> copies);

}  // namespace symm_cp
