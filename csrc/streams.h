// A workspace of a group on a device with streams, and how the lanes of a schedule are put on them:
// copies go to copy engines, signals and waits are operations of the stream, so none takes a
// multiprocessor.
#pragma once

#include <string>
#include <vector>

#include "driver.h"
#include "watch.h"
#include "wire.h"

namespace symm_cp {

class Streams {
 public:
  // `bases[r]` is where the workspace of rank r is mapped here. With `reset_flags` a signal is 1
  // and the waiter resets it to 0, so that the same commands serve every call (CUDA graphs);
  // otherwise it is the epoch, and only grows. The device's context must be current in the calling
  // thread, here and in all other methods. With a `timeout`, waits that cannot end abort the
  // process (watch.h); `processes` are pidfds of the ranks. Waits in graphs are not watched.
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
  // Tells the peers that this rank completes no further call, and stops watching its own waits.
  void give_up();
  // From now on, or no longer, copies are issued one after the other.
  void set_single_copies(bool single) { single_copies_ = single; }

 private:
  driver::Address flag(int owner, int writer, int flag) const;
  driver::Address resolve(const Reference& reference, void* const* operands, uint32_t epoch) const;
  void add_mem_ops(const StreamCommand& command, uint32_t epoch, const char* call_name);
  void flush_mem_ops(driver::Stream lane);
  void add_copy(const StreamCommand& command, void* const* operands, driver::Stream lane,
                uint32_t epoch);
  void flush_copies(driver::Stream lane, bool capturing);

  const driver::Api& api_;
  std::vector<char*> bases_;
  int rank_;
  WorkspaceLayout layout_;
  bool reset_flags_;
  bool single_copies_ = false;
  std::vector<driver::Event> events_;
  std::shared_ptr<StreamWaits> waits_;  // null when nobody looks at them
  // What is gathered for the next call of the driver.
  std::vector<driver::MemOp> mem_ops_;
  std::vector<driver::Address> to_, from_;
  std::vector<size_t> sizes_;
};

}  // namespace symm_cp
