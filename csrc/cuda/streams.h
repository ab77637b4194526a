// A workspace of a group on a device with streams, and how the lanes of a schedule are put on them:
// copies between devices go to copy engines, signals are such copies of 4 bytes, and waits are
// operations of the stream, so none takes a multiprocessor.
//
// A signal copies a word of this rank (wire.h, sent_offset) to the peer's flag, behind the data: on
// the same stream, or on that of lane "signal" behind an event, since a copy engine may keep a
// signal waiting behind a large copy, and no kernel should wait with it. In a call a lane that
// signals first sets its word to the epoch, on its own stream. That is free of races because all
// uses of a word are in the order of one stream: the word is its lane's alone; the calls of a
// workspace are issued one after the other, and streams of a lane that follow one another wait for
// each other (Launch.run); and a flag has one writer lane, so it grows.
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
  // `bases[r]` is where the workspace of rank r is mapped here. With `reset_flags` a signal is 1
  // and the waiter resets it to 0, so that the same commands serve every call (CUDA graphs);
  // otherwise it is the epoch, and only grows. The device's context must be current in the calling
  // thread; the other methods make it current by themselves. The memory's word of kConstantOne
  // must hold 1 before the first call. With a `timeout`, waits that cannot end abort the process
  // (watch.h); `processes` are pidfds of the ranks. Waits in graphs are not watched.
  Streams(const std::string& driver, std::vector<char*> bases, int rank, WorkspaceLayout layout,
          bool reset_flags, int events, std::string group, std::chrono::milliseconds timeout,
          std::vector<Descriptor> processes);
  ~Streams();
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  // Puts commands of op `what` on the streams `lanes`, in order. Nothing here waits for the device.
  // While the streams are `capturing`, copies are single ones: batches cannot be captured. Throws
  // driver::Error.
  void run(const StreamCommand* commands, int count, void* const* operands,
           driver::Stream const* lanes, uint32_t epoch, bool capturing, const char* call_name);
  // Announces a wait of a stream that is not issued by `run`.
  void expect(int peer, int flag, uint32_t needed, uint32_t epoch, const char* call_name);
  // Tells the peers that this rank completes no further call; its streams come to their ends as
  // watch.h says. Throws driver::Error when the peers cannot be told.
  void give_up();
  // Whether the streams of the last call have come past the point of `give_up`.
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
  // From now on, or no longer, copies are issued one after the other.
  void set_single_copies(bool single) { single_copies_ = single; }

 private:
  enum class Gathered { kNothing, kMemOps, kCopies, kSignals };

  driver::Address flag(int owner, int writer, int flag) const;
  driver::Address sent(int word) const;
  driver::Address resolve(const Reference& reference, void* const* operands, uint32_t epoch) const;
  void gather(Gathered kind, driver::Stream lane);
  void add_signal(const StreamCommand& command, driver::Stream lane, uint32_t epoch);
  void add_mem_op(const StreamCommand& command, driver::Stream lane, uint32_t epoch,
                  const char* call_name);
  void add_copy(const StreamCommand& command, void* const* operands, driver::Stream lane,
                uint32_t epoch);
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
  bool endless_ = false;                        // it cannot be known when the streams have ended
  std::shared_ptr<StreamWaits> waits_;          // null when nobody looks at them
  std::array<uint32_t, kLanes> sent_epochs_{};  // that the lanes' words were set to
  bool capturing_ = false;
  // The operations gathered for the next call of the driver.
  Gathered gathered_ = Gathered::kNothing;
  std::vector<driver::MemOp> mem_ops_;
  std::vector<driver::Address> to_, from_;
  std::vector<size_t> sizes_;
};

}  // namespace symm_cp
