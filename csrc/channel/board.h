// The status of each rank of a group, in a page of shared memory for each rank.
//
// Only the rank that owns a board writes it. Peers read it when they have waited for a while, to
// tell a slow peer from one that will never make the call.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "channel/wire.h"

namespace symm_cp {

// A call as peers see it.
struct CallSite {
  int channel;
  int64_t number;  // 1, 2, ... in each channel, identically on all ranks
  std::string call_name;
  int64_t ordinal = 0;  // of the calls of all channels
};

// A rank's next call after a failure, and the failed calls directly before it, latest first.
// Digests of names identify calls; 0: the call was refused before it had a name.
struct Standing {
  static constexpr size_t kFailed = 8;
  uint64_t digest = 0;
  bool movable = false;  // whether the call may take another number
  // For a call that has taken another number: the farthest index in `failed` at which a peer was
  // behind. Peers behind for the same reason are at most that far back. -1: none.
  int64_t reach = -1;
  std::array<uint64_t, kFailed> failed{};
};

class Board {
 public:
  // The number of the last call that was made or refused on a channel.
  int64_t made(int channel) const { return made_[channel].load(); }
  void set_made(int channel, int64_t number) { made_[channel].store(number); }
  // The number of the last call that began or failed; an engine may lag behind `made`.
  int64_t entered(int channel) const { return entered_[channel].load(); }
  void set_entered(int channel, int64_t number) { entered_[channel].store(number); }
  // The number of the call for which a channel's memory was made; 0 without memory; negative while
  // the memory is being made.
  int64_t generation(int channel) const { return generation_[channel].load(); }
  void set_generation(int channel, int64_t number) { generation_[channel].store(number); }
  // Sets the generation unless it is already set.
  void begin_generation(int channel, int64_t number) {
    int64_t none = 0;
    generation_[channel].compare_exchange_strong(none, number);
  }
  // Whether a single thread made all calls. If so, only the call in which it is blocked can
  // proceed.
  bool single_threaded() const { return threads_.load() == 1; }
  bool several_threads() const { return threads_.load() > 1; }
  void set_threads(uint32_t count) { threads_.store(count); }

  // Returns the call in which the only calling thread is blocked; nullopt if it is not blocked.
  std::optional<CallSite> blocked() const {
    const uint32_t before = version_.load();
    CallSite site{blocked_channel_.load(), blocked_number_.load(), {}, blocked_ordinal_.load()};
    char text[sizeof(blocked_name_) + 1] = {};
    for (size_t i = 0; i < blocked_name_.size(); ++i) {
      const uint64_t word = blocked_name_[i].load();
      std::memcpy(text + i * sizeof(word), &word, sizeof(word));
    }
    if (before % 2 != 0 || version_.load() != before || site.number == 0) return std::nullopt;
    site.call_name = text;
    return site;
  }
  void set_blocked(int channel, int64_t number, int64_t ordinal, const char* call_name) {
    ++version_;
    blocked_channel_.store(channel);
    blocked_number_.store(number);
    blocked_ordinal_.store(ordinal);
    char text[sizeof(blocked_name_)] = {};
    std::strncpy(text, call_name, sizeof(text) - 1);
    for (size_t i = 0; i < blocked_name_.size(); ++i) {
      uint64_t word = 0;
      std::memcpy(&word, text + i * sizeof(word), sizeof(word));
      blocked_name_[i].store(word);
    }
    ++version_;
  }
  void clear_blocked() { set_blocked(0, 0, 0, ""); }

  // Returns the rank's standing before call `number`; nullopt if no call failed before it, or if
  // the rank has not reached it. Only the last kStandings are kept: ranks that agree are at most
  // one call apart.
  std::optional<Standing> standing(int channel, int64_t number) const {
    const Entry& entry = standings_[channel][static_cast<size_t>(number) % kStandings];
    if (entry.number.load() != number) return std::nullopt;
    Standing found{entry.digest.load(), entry.movable.load() != 0, entry.reach.load(), {}};
    for (size_t i = 0; i < Standing::kFailed; ++i) found.failed[i] = entry.failed[i].load();
    return found;
  }
  void set_standing(int channel, int64_t number, const Standing& standing) {
    Entry& entry = standings_[channel][static_cast<size_t>(number) % kStandings];
    entry.digest.store(standing.digest);
    entry.movable.store(standing.movable ? 1 : 0);
    entry.reach.store(standing.reach);
    for (size_t i = 0; i < Standing::kFailed; ++i) entry.failed[i].store(standing.failed[i]);
    entry.number.store(number);
  }

  // The processor on which the rank began its last call; -1 before its first.
  int processor() const { return static_cast<int>(processor_.load(std::memory_order_relaxed)) - 1; }
  void set_processor(int number) {
    // Most calls begin where the last one did: peers then keep the line in their caches.
    const auto value = static_cast<uint32_t>(number + 1);
    if (processor_.load(std::memory_order_relaxed) != value)
      processor_.store(value, std::memory_order_relaxed);
  }

  // Whether a call of the rank has timed out: it makes no more calls in this group.
  bool timed_out() const { return timed_out_.load() != 0; }
  void set_timed_out() { timed_out_.store(1); }

  // A lost rank that a failed message has reported to this rank, which may then make no more calls.
  std::optional<int> missed() const {
    const uint32_t found = missed_.load();
    return found == 0 ? std::nullopt : std::optional<int>(static_cast<int>(found) - 1);
  }
  void set_missed(int rank) { missed_.store(static_cast<uint32_t>(rank) + 1); }

 private:
  static constexpr size_t kStandings = 4;
  struct Entry {
    std::atomic<int64_t> number;
    std::atomic<uint64_t> digest;
    std::atomic<uint32_t> movable;
    std::atomic<int64_t> reach;
    std::array<std::atomic<uint64_t>, Standing::kFailed> failed;
  };

  std::atomic<int64_t> made_[kChannels];
  std::atomic<int64_t> entered_[kChannels];
  std::atomic<int64_t> generation_[kChannels];
  std::atomic<uint32_t> threads_;
  std::atomic<uint32_t> missed_;  // the rank, plus 1
  std::atomic<uint32_t> timed_out_;
  std::atomic<uint32_t> processor_;  // plus 1
  std::atomic<uint32_t> version_;    // odd while the rest is being written
  std::atomic<int32_t> blocked_channel_;
  std::atomic<int64_t> blocked_number_;
  std::atomic<int64_t> blocked_ordinal_;
  std::array<std::atomic<uint64_t>, 13> blocked_name_;
  Entry standings_[kChannels][kStandings];
};
static_assert(sizeof(Board) <= 4096 && std::atomic<int64_t>::is_always_lock_free);

}  // namespace symm_cp
