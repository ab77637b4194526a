// Puts the lanes of a schedule on streams, for one workspace of a group. Copies between devices go
// to copy engines, signals are such copies of 4 bytes, and waits are stream operations, so none
// takes a multiprocessor.
//
// A signal copies a word of this rank (wire.h, sent_offset) to the peer's flag, after the data: on
// the same stream, or behind an event on the stream of lane "signal", since a copy engine may queue
// a signal behind a large copy, and no kernel should wait with it. In each call a lane first sets
// its word to the epoch, on its own stream, and then signals. There are no races, because one
// stream orders all uses of a word: only its lane uses the word; the calls of a workspace are
// issued one after the other, and when a lane changes streams the new stream waits for the old one
// (Launch.run); and a flag has one writer lane, so it only grows.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "channel/wire.h"
#include "cuda/driver.h"
#include "cuda/watch.h"
#include "cuda/watcher.h"

namespace symm_cp {

class Streams {
 public:
  // `bases[r]` is the address of rank r's workspace in this process. With `reset_flags` a signal is
  // 1 and the waiter resets it to 0, so that the same commands serve every call (CUDA graphs);
  // otherwise a signal is the epoch, and only grows. The device's context must be current in the
  // calling thread; the other methods make it current by themselves. The word kConstantOne must
  // hold 1 before the first call. With a `timeout`, waits that cannot end abort the process
  // (watch.h); `processes` are the ranks' pidfds. Waits in graphs are not watched.
  Streams(const std::string& driver, std::vector<char*> bases, int rank, WorkspaceLayout layout,
          bool reset_flags, int events, std::string group, std::chrono::milliseconds timeout,
          std::vector<Descriptor> processes);
  ~Streams();
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  // Puts the commands of call `call_name` on the streams `lanes`, in order. Does not wait for the
  // device. While the streams are `capturing`, copies are issued one by one: batches cannot be
  // captured. Throws driver::Error.
  void run(const Command* commands, int count, void* const* operands, driver::Stream const* lanes,
           uint32_t epoch, bool capturing, const char* call_name);
  // Announces a stream's wait that `run` does not issue.
  void expect(int peer, int flag, uint32_t needed, uint32_t epoch, const char* call_name);
  // Reports to the peers that this rank completes no further call; its streams end as watch.h says.
  // Throws driver::Error when the report fails.
  void give_up();
  // Whether the last call's streams have passed the point of `give_up`.
  bool ended();
  // Begins a call; the ranks begin theirs in the same order.
  uint32_t next_epoch() { return static_cast<uint32_t>(++epoch_); }
  int64_t epoch() const { return epoch_; }
  void set_epoch(int64_t epoch) { epoch_ = epoch; }
  // Whether another call can be made.
  bool serves() const { return !given_up_ && epoch_ < kLastEpoch; }
  // The caller's stream of the last call; nothing before the first.
  std::optional<driver::Stream> last_stream() const {
    return last_lanes_.empty() ? std::nullopt : std::optional(last_lanes_.front());
  }
  const driver::Api& api() const { return api_; }
  // Sets whether copies are issued one by one.
  void set_single_copies(bool single) { single_copies_ = single; }

 private:
  enum class Gathered { kNothing, kMemOps, kCopies, kSignals };

  driver::Address flag(int owner, int writer, int flag) const;
  driver::Address sent(int word) const;
  driver::Address resolve(const Place& place, void* const* operands, uint32_t epoch) const;
  void gather(Gathered kind, driver::Stream lane);
  void add_signal(const Command& command, driver::Stream lane, uint32_t epoch);
  void add_mem_op(const Command& command, driver::Stream lane, uint32_t epoch,
                  const char* call_name);
  void add_copy(const Command& command, void* const* operands, driver::Stream lane, uint32_t epoch);
  void flush(driver::Stream lane);
  void flush_copies(driver::Stream lane);
  void forget();

  const driver::Api& api_;
  std::vector<char*> bases_;
  int rank_;
  WorkspaceLayout layout_;
  bool reset_flags_;
  bool single_copies_ = false;
  driver::Context context_ = nullptr;
  std::vector<driver::Event> events_;
  std::vector<driver::Stream> last_lanes_;  // of the last call; empty before the first
  int64_t epoch_ = 0;                       // of the last call
  bool given_up_ = false;
  bool endless_ = false;                        // no event tells when the streams end
  std::shared_ptr<StreamWaits> waits_;          // null when waits are not watched
  std::array<uint32_t, kLanes> sent_epochs_{};  // the values of the lanes' words
  bool capturing_ = false;
  // The operations gathered for the next call of the driver.
  Gathered gathered_ = Gathered::kNothing;
  std::vector<driver::MemOp> mem_ops_;
  std::vector<driver::Address> to_, from_;
  std::vector<size_t> sizes_;
};

}  // namespace symm_cp
