#include "cuda/streams.h"

#include <algorithm>
#include <stdexcept>
#include <string_view>

namespace symm_cp {

namespace {

constexpr unsigned kNoTiming = 2;  // CU_EVENT_DISABLE_TIMING

// The flag that a rank's own kernel raises or polls: no peer is watched for it.
constexpr int kArrivedFlag = 5;
static_assert(std::string_view(kFlagNames[kArrivedFlag]) == "arrived");

// Makes a context current in this thread for a scope: autograd's threads may have none, or another
// device's, and the null stream belongs to the current context.
class InContext {
 public:
  InContext(const driver::Api& api, driver::Context context) : api_(api) {
    api_.expect(api_.context_get(&before_), "cuCtxGetCurrent");
    changed_ = before_ != context;
    if (changed_) api_.expect(api_.context_set(context), "cuCtxSetCurrent");
  }
  ~InContext() {
    if (changed_) api_.context_set(before_);
  }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;

 private:
  const driver::Api& api_;
  driver::Context before_ = nullptr;
  bool changed_ = false;
};

}  // namespace

Streams::Streams(const std::string& driver, std::vector<char*> bases, int rank,
                 WorkspaceLayout layout, bool reset_flags, int events, std::string group,
                 std::chrono::milliseconds timeout, std::vector<Descriptor> processes)
    : api_(driver::load(driver)),
      bases_(std::move(bases)),
      rank_(rank),
      layout_(layout),
      reset_flags_(reset_flags) {
  api_.expect(api_.context_get(&context_), "cuCtxGetCurrent");
  for (int i = 0; i < events + kLanes; ++i) {
    driver::Event event = nullptr;
    api_.expect(api_.event_create(&event, kNoTiming), "cuEventCreate");
    events_.push_back(event);
  }
  const int ranks = static_cast<int>(bases_.size());
  if (reset_flags_ || timeout.count() <= 0 || ranks == 1) return;
  WatchedFlags about{.group = std::move(group),
                     .rank = rank_,
                     .world_size = ranks,
                     .flags = flag(rank_, 0, 0),
                     .timeout = timeout,
                     .processes = std::move(processes),
                     .marks = {},
                     .mark = sent(kMark)};
  // Failures cannot be reported to a peer whose memory is not mapped here; its time-out ends its
  // waits.
  for (int peer = 0; peer < ranks; ++peer)
    if (peer != rank_ && bases_[peer] != nullptr)
      about.marks.push_back(flag(peer, rank_, kGaveUpFlag));
  waits_ = std::make_shared<StreamWaits>(api_, std::move(about));
  Watcher::instance().add(api_, waits_);
}

Streams::~Streams() {
  // At exit the driver may be unloaded: then it returns errors, and there is nothing left to free.
  driver::Context before = nullptr;
  api_.context_get(&before);
  api_.context_set(context_);
  if (waits_ != nullptr) waits_->close();
  for (driver::Event event : events_) api_.event_destroy(event);
  api_.context_set(before);
}

driver::Address Streams::flag(int owner, int writer, int flag) const {
  const int64_t offset = flag_offset(flag, writer, static_cast<int>(bases_.size()));
  return reinterpret_cast<driver::Address>(bases_[owner] + layout_.flags + offset);
}

driver::Address Streams::sent(int word) const {
  const int64_t offset = sent_offset(word, rank_, static_cast<int>(bases_.size()));
  return reinterpret_cast<driver::Address>(bases_[rank_] + layout_.flags + offset);
}

driver::Address Streams::resolve(const Place& place, void* const* operands, uint32_t epoch) const {
  char* base = nullptr;
  if (place.buffer == Buffer::kOperand) {
    base = static_cast<char*>(operands[place.index]);
  } else {
    base = bases_[place.index] + layout_.slot_offset(epoch);
  }
  return reinterpret_cast<driver::Address>(base + place.offset);
}

void Streams::expect(int peer, int flag, uint32_t needed, uint32_t epoch, const char* call_name) {
  if (waits_ != nullptr) waits_->expect(peer, flag, needed, epoch, call_name);
}

void Streams::give_up() {
  if (given_up_) return;
  given_up_ = true;
  InContext scope(api_, context_);
  // The last kLanes events mark this point. If recording one fails, `ended` never returns true.
  for (size_t lane = 0; lane < last_lanes_.size(); ++lane)
    endless_ |= api_.event_record(events_[events_.size() - kLanes + lane], last_lanes_[lane]) != 0;
  // Kernels of the second lane use memory that the caller frees, for its own stream to take again.
  if (!last_lanes_.empty())
    endless_ |= api_.stream_wait_event(last_lanes_.front(),
                                       events_[events_.size() - kLanes + kSecondLane], 0) != 0;
  if (waits_ != nullptr) waits_->give_up();
}

bool Streams::ended() {
  if (endless_) return false;
  InContext scope(api_, context_);
  for (size_t lane = 0; lane < last_lanes_.size(); ++lane)
    if (api_.event_query(events_[events_.size() - kLanes + lane]) != 0) return false;
  return waits_ == nullptr || waits_->written();
}

void Streams::gather(Gathered kind, driver::Stream lane) {
  if (gathered_ != kind) flush(lane);
  gathered_ = kind;
}

void Streams::add_signal(const Command& command, driver::Stream lane, uint32_t epoch) {
  int word = kConstantOne;
  if (!reset_flags_) {
    word = command.lane;
    if (sent_epochs_[word] != epoch) {
      gather(Gathered::kMemOps, lane);
      mem_ops_.push_back({driver::kWriteValue32, sent(word), epoch, 0, 0, 0});
      sent_epochs_[word] = epoch;
    }
  }
  // A signal publishes all earlier work of the stream, so it must not share a batch with data.
  gather(Gathered::kSignals, lane);
  to_.push_back(flag(command.peer, rank_, command.flag));
  from_.push_back(sent(word));
  sizes_.push_back(sizeof(Word));
}

void Streams::add_mem_op(const Command& command, driver::Stream lane, uint32_t epoch,
                         const char* call_name) {
  gather(Gathered::kMemOps, lane);
  driver::Address mine = flag(rank_, command.peer, command.flag);
  if (command.kind == Kind::kArrived) {
    mem_ops_.push_back({driver::kWriteValue32, mine, epoch, 0, 0, 0});
    return;
  }
  if (!reset_flags_) {
    uint32_t needed = epoch - static_cast<uint32_t>(command.lag);
    if (command.flag != kArrivedFlag) expect(command.peer, command.flag, needed, epoch, call_name);
    mem_ops_.push_back({driver::kWaitValue32, mine, needed, driver::kWaitGeq, 0, 0});
    return;
  }
  mem_ops_.push_back({driver::kWaitValue32, mine, 1, driver::kWaitEq, 0, 0});
  mem_ops_.push_back({driver::kWriteValue32, mine, 0, 0, 0, 0});
}

void Streams::add_copy(const Command& command, void* const* operands, driver::Stream lane,
                       uint32_t epoch) {
  driver::Address to = resolve(command.to, operands, epoch);
  driver::Address from = resolve(command.source, operands, epoch);
  bool dense = command.rows == 1 ||
               (command.to_pitch == command.bytes && command.from_pitch == command.bytes);
  if (gathered_ != Gathered::kCopies || command.alone != 0) flush(lane);
  // A rank's own shard may already be at its place in the output.
  if (command.bytes * command.rows == 0 || to == from) return;
  if (!dense) {
    driver::Copy2D copy{};
    copy.from_type = copy.to_type = driver::kDeviceMemory;
    copy.from_device = from;
    copy.from_pitch = static_cast<size_t>(command.from_pitch);
    copy.to_device = to;
    copy.to_pitch = static_cast<size_t>(command.to_pitch);
    copy.width = static_cast<size_t>(command.bytes);
    copy.height = static_cast<size_t>(command.rows);
    api_.expect(api_.copy_2d(&copy, lane), "cuMemcpy2DAsync");
    return;
  }
  const auto bytes = static_cast<size_t>(command.bytes * command.rows);
  if (command.remote == 0) {
    // Within a device, kernels copy at memory speed and copy engines at a fraction of it: a batch,
    // which asks for the engines (flush_copies), would slow the copy down.
    api_.expect(api_.copy(to, from, bytes, lane), "cuMemcpyAsync");
    return;
  }
  gathered_ = Gathered::kCopies;
  to_.push_back(to);
  from_.push_back(from);
  sizes_.push_back(bytes);
}

void Streams::flush(driver::Stream lane) {
  if (gathered_ == Gathered::kMemOps) {
    for (size_t first = 0; first < mem_ops_.size(); first += driver::kMostMemOps) {
      const size_t count = std::min(mem_ops_.size() - first, driver::kMostMemOps);
      api_.expect(api_.mem_ops(lane, static_cast<unsigned>(count), mem_ops_.data() + first, 0),
                  "cuStreamBatchMemOp");
    }
  } else if (gathered_ != Gathered::kNothing) {
    flush_copies(lane);
  }
  forget();
}

void Streams::forget() {
  gathered_ = Gathered::kNothing;
  mem_ops_.clear();
  to_.clear(), from_.clear(), sizes_.clear();
}

void Streams::flush_copies(driver::Stream lane) {
  // The null stream takes no batches.
  if (!api_.batches() || single_copies_ || capturing_ || lane == nullptr) {
    for (size_t i = 0; i < sizes_.size(); ++i)
      api_.expect(api_.copy(to_[i], from_[i], sizes_[i], lane), "cuMemcpyAsync");
    return;
  }
  driver::CopyAttributes attributes{};
  attributes.source_order = driver::kSourceInStreamOrder;
  attributes.flags = driver::kOverlapWithCompute;
  size_t first = 0, failed = 0;
  driver::Result result =
      api_.copy_batch != nullptr
          ? api_.copy_batch(to_.data(), from_.data(), sizes_.data(), sizes_.size(), &attributes,
                            &first, 1, lane)
          : api_.copy_batch_12(to_.data(), from_.data(), sizes_.data(), sizes_.size(), &attributes,
                               &first, 1, &failed, lane);
  api_.expect(result, "cuMemcpyBatchAsync");
}

void Streams::run(const Command* commands, int count, void* const* operands,
                  driver::Stream const* lanes, uint32_t epoch, bool capturing,
                  const char* call_name) {
  InContext scope(api_, context_);
  forget();  // drops operations left by a failed call
  capturing_ = capturing;
  last_lanes_.assign(lanes, lanes + kLanes);
  int32_t lane = count > 0 ? commands[0].lane : 0;
  for (int i = 0; i < count; ++i) {
    const Command& command = commands[i];
    if (command.lane != lane) flush(lanes[lane]);
    lane = command.lane;
    driver::Stream stream = lanes[lane];
    switch (command.kind) {
      case Kind::kCopy: add_copy(command, operands, stream, epoch); break;
      case Kind::kSignal: add_signal(command, stream, epoch); break;
      case Kind::kWait:
      case Kind::kArrived: add_mem_op(command, stream, epoch, call_name); break;
      case Kind::kRecord:
        flush(stream);
        api_.expect(api_.event_record(events_.at(command.event), stream), "cuEventRecord");
        break;
      case Kind::kWaitEvent:
        flush(stream);
        api_.expect(api_.stream_wait_event(stream, events_.at(command.event), 0),
                    "cuStreamWaitEvent");
        break;
      default: throw std::logic_error("streams reduce nothing, and have no records");
    }
  }
  flush(lanes[lane]);
}

}  // namespace symm_cp
