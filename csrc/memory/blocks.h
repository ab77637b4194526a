// Memory for large results. Fresh memory costs more than writing the result: the kernel clears
// every page and maps it at the first access. So freed blocks are kept, with their pages, and
// reused for later results.
//
// Blocks are private anonymous memory at multiples of 2 MiB, of huge pages where the system has
// them, and their pages are populated when the blocks are handed out. Sizes are multiples of 2 MiB
// or of an eighth of the power of two below. No more than `limit` bytes are kept: the block that
// was freed first is unmapped first. Blocks in use are not limited.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace symm_cp {

// The blocks of this process, in bytes.
struct BlockUsage {
  int64_t in_use, kept, limit;
};

struct Block {
  char* address = nullptr;
  size_t size = 0;
  int forks = 0;  // number of forks of the process before the block was mapped
};

// Thread-safe, and usable in a forked process. The parent and the child of a fork share the pages
// of blocks in use; the first write to a page copies it. Such blocks are unmapped when they are
// freed. A child does not inherit the blocks that are kept.
class Blocks {
 public:
  // Never destroyed: tensors may be freed while the process ends.
  static Blocks& instance();

  // Returns at least `bytes` of uninitialised memory at a multiple of 2 MiB. Its address is null
  // when the limit is 0, or when the system has no memory left.
  Block take(size_t bytes);

  // Takes a block back, from any thread; returns its size.
  size_t give(void* address);

  // Unmaps the free blocks; returns their bytes.
  size_t empty();

  // Sets the bytes that may be kept; less than 0 for the default: 1 GiB or 1/32 of the memory of
  // the machine or container, whichever is less.
  void set_limit(int64_t bytes);

  BlockUsage usage();

 private:
  Blocks();
  Block find_kept(size_t size);
  static char* map(size_t size);
  static void unmap(const std::vector<Block>& blocks);
  std::vector<Block> shrink(size_t limit);
  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child();

  std::mutex mutex_;
  std::unordered_map<void*, Block> in_use_;
  std::vector<Block> kept_;  // in the order in which they were freed
  size_t in_use_bytes_ = 0, kept_bytes_ = 0, limit_;
  int forks_ = 0;
};

}  // namespace symm_cp
