#include "streams.h"

namespace symm_cp {

namespace {

constexpr unsigned kNoTiming = 2;  // CU_EVENT_DISABLE_TIMING

}  // namespace

Streams::Streams(const std::string& driver, std::vector<char*> bases, int rank,
                 WorkspaceLayout layout, bool reset_flags, int events, std::string group,
                 std::chrono::milliseconds timeout, std::vector<Descriptor> processes)
    : api_(driver::load(driver)),
      bases_(std::move(bases)),
      rank_(rank),
      layout_(layout),
      reset_flags_(reset_flags) {
  for (int i = 0; i < events; ++i) {
    driver::Event event = nullptr;
    api_.expect(api_.event_create(&event, kNoTiming), "cuEventCreate");
    events_.push_back(event);
  }
  const int ranks = static_cast<int>(bases_.size());
  if (reset_flags_ || timeout.count() <= 0 || ranks == 1) return;
  WatchedFlags about{std::move(group),  rank_,   ranks,
                     flag(rank_, 0, 0), timeout, std::move(processes)};
  waits_ = std::make_shared<StreamWaits>(api_, std::move(about));
  Watcher::instance().add(waits_);
}

Streams::~Streams() {
  if (waits_ != nullptr) waits_->close();
  // At exit the driver may be unloaded: it then returns errors, and nothing is left to free.
  for (driver::Event event : events_) api_.event_destroy(event);
}

driver::Address Streams::flag(int owner, int writer, int flag) const {
  const int64_t offset = flag_offset(flag, writer, static_cast<int>(bases_.size()));
  return reinterpret_cast<driver::Address>(bases_[owner] + layout_.flags + offset);
}

driver::Address Streams::resolve(const Reference& reference, void* const* operands,
                                 uint32_t epoch) const {
  char* base = nullptr;
  if (reference.space == Space::kOperand) {
    base = static_cast<char*>(operands[reference.index]);
  } else {
    base = bases_[reference.index] + layout_.slot_offset(epoch);
  }
  return reinterpret_cast<driver::Address>(base + reference.offset);
}

void Streams::expect(int peer, int flag, uint32_t needed, uint32_t epoch, const char* call_name) {
  if (waits_ != nullptr) waits_->expect(peer, flag, needed, epoch, call_name);
}

void Streams::give_up() {
  if (waits_ == nullptr) return;
  std::vector<driver::MemOp> marks;
  for (int peer = 0; peer < static_cast<int>(bases_.size()); ++peer) {
    // A peer whose memory is not mapped here cannot be told; its time-out ends its waits.
    if (peer != rank_ && bases_[peer] != nullptr)
      marks.push_back({driver::kWriteValue32, flag(peer, rank_, kGaveUpFlag), 1, 0, 0, 0});
  }
  waits_->give_up(std::move(marks));
}

void Streams::add_mem_ops(const StreamCommand& command, uint32_t epoch, const char* call_name) {
  if (command.kind == StreamKind::kArrived) {
    mem_ops_.push_back(
        {driver::kWriteValue32, flag(rank_, command.peer, command.flag), epoch, 0, 0, 0});
    return;
  }
  if (command.kind == StreamKind::kSignal) {
    // Publishes all that came before it in the stream: a write is ordered after it, system-wide.
    mem_ops_.push_back({driver::kWriteValue32, flag(command.peer, rank_, command.flag),
                        reset_flags_ ? 1U : epoch, 0, 0, 0});
    return;
  }
  driver::Address mine = flag(rank_, command.peer, command.flag);
  if (!reset_flags_) {
    uint32_t needed = epoch - static_cast<uint32_t>(command.lag);
    expect(command.peer, command.flag, needed, epoch, call_name);
    mem_ops_.push_back({driver::kWaitValue32, mine, needed, driver::kWaitGeq, 0, 0});
    return;
  }
  mem_ops_.push_back({driver::kWaitValue32, mine, 1, driver::kWaitEq, 0, 0});
  mem_ops_.push_back({driver::kWriteValue32, mine, 0, 0, 0, 0});
}

void Streams::flush_mem_ops(driver::Stream lane) {
  if (mem_ops_.empty()) return;
  auto count = static_cast<unsigned>(mem_ops_.size());
  driver::Result result = api_.mem_ops(lane, count, mem_ops_.data(), 0);
  mem_ops_.clear();
  api_.expect(result, "cuStreamBatchMemOp");
}

void Streams::add_copy(const StreamCommand& command, void* const* operands, driver::Stream lane,
                       uint32_t epoch) {
  driver::Address to = resolve(command.to, operands, epoch);
  driver::Address from = resolve(command.source, operands, epoch);
  bool dense = command.rows == 1 ||
               (command.to_pitch == command.bytes && command.from_pitch == command.bytes);
  if (command.bytes * command.rows == 0) return;
  if (dense) {
    to_.push_back(to);
    from_.push_back(from);
    sizes_.push_back(static_cast<size_t>(command.bytes * command.rows));
    return;
  }
  driver::Copy2D copy{};
  copy.from_type = copy.to_type = driver::kDeviceMemory;
  copy.from_device = from;
  copy.from_pitch = static_cast<size_t>(command.from_pitch);
  copy.to_device = to;
  copy.to_pitch = static_cast<size_t>(command.to_pitch);
  copy.width = static_cast<size_t>(command.bytes);
  copy.height = static_cast<size_t>(command.rows);
  api_.expect(api_.copy_2d(&copy, lane), "cuMemcpy2DAsync");
}

void Streams::flush_copies(driver::Stream lane, bool capturing) {
  if (sizes_.empty()) return;
  auto to = std::move(to_), from = std::move(from_);
  auto sizes = std::move(sizes_);
  to_.clear(), from_.clear(), sizes_.clear();
  // The null stream takes no batches.
  if (!api_.batches() || single_copies_ || capturing || lane == nullptr) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      api_.expect(api_.copy(to[i], from[i], sizes[i], lane), "cuMemcpyAsync");
    }
    return;
  }
  driver::CopyAttributes attributes{};
  attributes.source_order = driver::kSourceInStreamOrder;
  attributes.flags = driver::kOverlapWithCompute;
  size_t first = 0, failed = 0;
  driver::Result result =
      api_.copy_batch != nullptr
          ? api_.copy_batch(to.data(), from.data(), sizes.data(), sizes.size(), &attributes, &first,
                            1, lane)
          : api_.copy_batch_12(to.data(), from.data(), sizes.data(), sizes.size(), &attributes,
                               &first, 1, &failed, lane);
  api_.expect(result, "cuMemcpyBatchAsync");
}

void Streams::run(const StreamCommand* commands, int count, void* const* operands,
                  driver::Stream const* lanes, uint32_t epoch, bool capturing,
                  const char* call_name) {
  int32_t lane = count > 0 ? commands[0].lane : 0;
  auto flush = [&] {
    // Never both at once: each kind flushes the other before it gathers.
    flush_mem_ops(lanes[lane]);
    flush_copies(lanes[lane], capturing);
  };
  for (int i = 0; i < count; ++i) {
    const StreamCommand& command = commands[i];
    if (command.lane != lane) flush();
    lane = command.lane;
    driver::Stream stream = lanes[lane];
    switch (command.kind) {
      case StreamKind::kCopy:
        flush_mem_ops(stream);
        if (command.alone != 0) flush_copies(stream, capturing);
        add_copy(command, operands, stream, epoch);
        break;
      case StreamKind::kSignal:
      case StreamKind::kWait:
      case StreamKind::kArrived:
        flush_copies(stream, capturing);
        add_mem_ops(command, epoch, call_name);
        break;
      case StreamKind::kRecord:
        flush();
        api_.expect(api_.event_record(events_.at(command.event), stream), "cuEventRecord");
        break;
      case StreamKind::kWaitEvent:
        flush();
        api_.expect(api_.stream_wait_event(stream, events_.at(command.event), 0),
                    "cuStreamWaitEvent");
        break;
    }
  }
  flush();
}

}  // namespace symm_cp
