#include "memory/blocks.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <fstream>
#include <iterator>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace symm_cp {

namespace {

constexpr size_t kBlockUnit = size_t{2} << 20;
constexpr size_t kMostKept = size_t{1} << 30;

size_t block_size(size_t bytes) {
  const size_t step = std::max(kBlockUnit, std::bit_floor(bytes) / 8);
  return (bytes + step - 1) / step * step;
}

size_t default_limit() {
  size_t memory =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t container = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> container) memory = std::min(memory, container);
  return std::min(kMostKept, memory / 32);
}

}  // namespace

Blocks& Blocks::instance() {
  static Blocks& blocks = *new Blocks;
  return blocks;
}

Blocks::Blocks() : limit_(default_limit()) {
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

Block Blocks::take(size_t bytes) {
  const size_t size = block_size(bytes);
  {
    const std::lock_guard lock(mutex_);
    if (limit_ == 0) return {};
    if (const Block kept = find_kept(size); kept.address != nullptr) return kept;
  }
  char* address = map(size);
  if (address == nullptr && empty() > 0) address = map(size);
  if (address == nullptr) return {};
  const std::lock_guard lock(mutex_);
  const Block block{address, size, forks_};
  in_use_.emplace(address, block);
  in_use_bytes_ += size;
  return block;
}

// Finds the block of this size that was freed last, as the caches may still hold it; if there is
// none, the smallest block that is at most a quarter larger.
Block Blocks::find_kept(size_t size) {
  auto best = kept_.rend();
  for (auto block = kept_.rbegin(); block != kept_.rend(); ++block) {
    if (block->size < size || block->size > size + size / 4) continue;
    if (best == kept_.rend() || block->size < best->size) best = block;
    if (best->size == size) break;
  }
  if (best == kept_.rend()) return {};
  const Block block = *best;
  kept_.erase(std::next(best).base());
  kept_bytes_ -= block.size;
  in_use_bytes_ += block.size;
  in_use_.emplace(block.address, block);
  return block;
}

size_t Blocks::give(void* address) {
  std::vector<Block> surplus;
  size_t size = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = in_use_.find(address);
    const Block block = found->second;
    in_use_.erase(found);
    size = block.size;
    in_use_bytes_ -= size;
    if (block.forks != forks_ || size > limit_) {
      surplus.push_back(block);
    } else {
      kept_.push_back(block);
      kept_bytes_ += size;
      surplus = shrink(limit_);
    }
  }
  unmap(surplus);
  return size;
}

// Removes blocks from the list, the first freed first, until at most `limit` bytes are kept.
std::vector<Block> Blocks::shrink(size_t limit) {
  auto end = kept_.begin();
  for (; kept_bytes_ > limit; ++end) kept_bytes_ -= end->size;
  std::vector<Block> surplus(kept_.begin(), end);
  kept_.erase(kept_.begin(), end);
  return surplus;
}

size_t Blocks::empty() {
  std::vector<Block> all;
  {
    const std::lock_guard lock(mutex_);
    all = shrink(0);
  }
  unmap(all);
  size_t total = 0;
  for (const Block& block : all) total += block.size;
  return total;
}

void Blocks::set_limit(int64_t bytes) {
  std::vector<Block> surplus;
  {
    const std::lock_guard lock(mutex_);
    limit_ = bytes < 0 ? default_limit() : static_cast<size_t>(bytes);
    surplus = shrink(limit_);
  }
  unmap(surplus);
}

BlockUsage Blocks::usage() {
  const std::lock_guard lock(mutex_);
  return {static_cast<int64_t>(in_use_bytes_), static_cast<int64_t>(kept_bytes_),
          static_cast<int64_t>(limit_)};
}

char* Blocks::map(size_t size) {
  // Maps one unit more, so that the block can begin at a multiple of a unit.
  void* const mapped =
      mmap(nullptr, size + kBlockUnit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const size_t before = -reinterpret_cast<uintptr_t>(mapped) % kBlockUnit;
  char* const address = static_cast<char*>(mapped) + before;
  if (before > 0) munmap(mapped, before);
  if (before < kBlockUnit) munmap(address + size, kBlockUnit - before);
  madvise(address, size, MADV_HUGEPAGE);  // only advice: the system may have no huge pages
  if (madvise(address, size, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
    munmap(address, size);
    return nullptr;
  }
  return address;  // EINVAL: Linux before 5.14, which adds pages at the first write
}

void Blocks::unmap(const std::vector<Block>& blocks) {
  for (const Block& block : blocks) munmap(block.address, block.size);
}

void Blocks::before_fork() {
  Blocks& blocks = instance();
  blocks.mutex_.lock();
  for (const Block& block : blocks.kept_) madvise(block.address, block.size, MADV_DONTFORK);
}

void Blocks::after_fork_in_parent() {
  Blocks& blocks = instance();
  for (const Block& block : blocks.kept_) madvise(block.address, block.size, MADV_DOFORK);
  ++blocks.forks_;
  // Free blocks were not shared with the child: they can be used again.
  for (Block& block : blocks.kept_) block.forks = blocks.forks_;
  blocks.mutex_.unlock();
}

void Blocks::after_fork_in_child() {
  Blocks& blocks = instance();
  blocks.kept_.clear();
  blocks.kept_bytes_ = 0;
  ++blocks.forks_;
  blocks.mutex_.unlock();
}

}  // namespace symm_cp
