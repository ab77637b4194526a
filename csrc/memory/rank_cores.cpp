#include "memory/rank_cores.h"

#include <atomic>

namespace symm_cp {

void RankCores::add(CoreRecord* record, bool is_own) {
  if (is_own)
    own_ = record;
  else
    peers_.push_back(record);
}

void RankCores::tell(int threads) {
  if (own_->threads.load(std::memory_order_relaxed) == static_cast<uint32_t>(threads)) return;
  const CoreMask mask = cores_of(caller_pool(), threads);
  for (size_t i = 0; i < mask.size(); ++i) own_->mask[i].store(mask[i], std::memory_order_relaxed);
  own_->threads.store(static_cast<uint32_t>(threads), std::memory_order_release);
}

// The ranks that may run on this rank's cores must together have a core for each of their threads.
bool RankCores::suffice(int threads) {
  tell(threads);
  if (threads == 1) return true;
  CoreMask own, all;
  for (size_t i = 0; i < own.size(); ++i) own[i] = own_->mask[i].load(std::memory_order_relaxed);
  all = own;
  int64_t all_threads = threads;
  for (const CoreRecord* peer : peers_) {
    const uint32_t theirs = peer->threads.load(std::memory_order_acquire);
    if (theirs == 0) return false;
    CoreMask mask;
    bool shared = false;
    for (size_t i = 0; i < mask.size(); ++i) {
      mask[i] = peer->mask[i].load(std::memory_order_relaxed);
      shared = shared || (mask[i] & own[i]) != 0;
    }
    if (!shared) continue;
    all_threads += theirs;
    for (size_t i = 0; i < mask.size(); ++i) all[i] |= mask[i];
  }
  return all_threads <= count_cores(all);
}

}  // namespace symm_cp
