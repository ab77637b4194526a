#include "channel.h"

#include <algorithm>
#include <cstring>

#include "error.h"
#include "probe.h"
#include "reduce.h"
#include "trace.h"

namespace symm_cp {

namespace {

template <class T>
T* at(void* base, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

// By pages: memcpy of a large block uses string instructions, which page faults slow down.
void copy_bytes(char* to, const char* from, int64_t bytes) {
  constexpr int64_t kPage = 4096;
  for (int64_t at = 0; at < bytes; at += kPage)
    std::memcpy(to + at, from + at, static_cast<size_t>(std::min(kPage, bytes - at)));
}

int64_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
    case DType::kInt8: return 1;
    case DType::kInt16:
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kInt32:
    case DType::kFloat32: return 4;
    default: return 8;
  }
}

}  // namespace

Channel::Channel(std::shared_ptr<Mapping> mapping, Layout layout, std::chrono::milliseconds timeout)
    : mapping_(std::move(mapping)),
      layout_(layout),
      timeout_(timeout.count() > 0 ? timeout : mapping_->peers()->timeout()),
      spins_(spin_rounds(mapping_->world_size())) {}

Word* Channel::flag_word(int owner, int writer, int flag) const {
  const int64_t line = int64_t{flag} * mapping_->world_size() + writer;
  return at<Word>(mapping_->data()[owner], layout_.flags + line * kFlagBytes);
}

Record& Channel::record(int rank, uint32_t epoch) const {
  const int64_t slot = epoch % layout_.slot_count;
  return *at<Record>(mapping_->data()[rank],
                     layout_.records + slot * static_cast<int64_t>(sizeof(Record)));
}

void* Channel::slot(int rank, uint32_t epoch) const {
  const int64_t slot = epoch % layout_.slot_count;
  return at<void>(mapping_->data()[rank], layout_.slots + slot * layout_.slot_bytes);
}

void Channel::signal(int peer, int flag, uint32_t epoch) {
  publish(flag_word(peer, mapping_->rank(), flag), &mapping_->control(peer).sleepers, epoch);
}

void Channel::wait(int peer, int flag, uint32_t epoch, const char* what) {
  Word* word = flag_word(mapping_->rank(), peer, flag);
  const auto arrived = [epoch](uint32_t seen) { return reached(seen, epoch); };
  wait_until(word, &mapping_->control(mapping_->rank()).sleepers, spins_, timeout_, arrived,
             [&](bool expired) {
               mapping_->check_hope(peer, expired, timeout_,
                                    std::string(what) + ": rank " +
                                        std::to_string(mapping_->rank()) + " waiting for flag '" +
                                        kFlagNames[flag] + "' of rank " + std::to_string(peer) +
                                        " (call " + std::to_string(epoch) + ", seen " +
                                        std::to_string(word->load()) + ")");
             });
}

void Channel::announce(uint32_t epoch, const void* shard, const char* what) {
  Record& own = record(mapping_->rank(), epoch);
  own.epoch = epoch;
  own.in_place = 0;
  if (shard != nullptr) {
    const auto mapping = find_mapping(shard, *mapping_->peers());
    if (mapping == nullptr)
      throw PeerError(std::string(what) + ": the shard is not symmetric memory of this group");
    own.in_place = 1;
    own.sequence = mapping->sequence();
    own.offset = static_cast<const char*>(shard) -
                 static_cast<const char*>(mapping->data()[mapping->rank()]);
  }
  std::strncpy(own.what, what, Record::kWhat - 1);
  own.what[Record::kWhat - 1] = 0;
}

void* Channel::shard_of(int peer, uint32_t epoch, const char* what) {
  const Record& theirs = record(peer, epoch);
  if (std::strncmp(theirs.what, what, Record::kWhat - 1) != 0)
    throw PeerError("ranks disagree: rank " + std::to_string(mapping_->rank()) + " calls " + what +
                    ", rank " + std::to_string(peer) + " calls " + theirs.what);
  if (theirs.in_place == 0) return slot(peer, epoch);
  auto mapping = in_place_[theirs.sequence].lock();
  if (mapping == nullptr) {
    mapping = find_mapping(*mapping_->peers(), theirs.sequence);
    if (mapping == nullptr)
      throw PeerError(std::string(what) + ": rank " + std::to_string(peer) +
                      " gave a symmetric tensor that rank " + std::to_string(mapping_->rank()) +
                      " has freed");
    if (in_place_.size() > 256) in_place_.clear();  // only a cache: entries of freed memory pile up
    in_place_[theirs.sequence] = mapping;
  }
  return at<void>(mapping->data()[peer], theirs.offset);
}

void* Channel::resolve(const Reference& reference, void* const* operands, uint32_t epoch,
                       const char* what) {
  switch (reference.space) {
    case Space::kOperand: return at<void>(operands[reference.index], reference.offset);
    case Space::kSlot: return at<void>(slot(reference.index, epoch), reference.offset);
    default: return at<void>(shard_of(reference.index, epoch, what), reference.offset);
  }
}

void Channel::copy_rows(const Command& command, void* const* operands, uint32_t epoch,
                        const char* what) {
  char* to = static_cast<char*>(resolve(command.to, operands, epoch, what));
  const char* from = static_cast<const char*>(resolve(command.from, operands, epoch, what));
  if (to == from) return;
  if (command.rows == 1) prefault(to, static_cast<size_t>(command.bytes));
  for (int64_t row = 0; row < command.rows; ++row)
    copy_bytes(to + row * command.to_pitch, from + row * command.from_pitch, command.bytes);
}

void Channel::reduce_rows(const Command& command, const Reference* references,
                          void* const* operands, uint32_t epoch, const char* what) {
  std::vector<const void*> sources;
  for (int i = 0; i < command.sources; ++i)
    sources.push_back(resolve(references[command.first_source + i], operands, epoch, what));
  char* to = static_cast<char*>(resolve(command.to, operands, epoch, what));
  if (command.rows == 1) prefault(to, static_cast<size_t>(command.bytes));
  const auto dtype = static_cast<DType>(command.dtype);
  for (int64_t row = 0; row < command.rows; ++row) {
    reduce(to, sources.data(), command.sources, command.bytes / element_bytes(dtype), dtype,
           command.mean != 0);
    to += command.to_pitch;
    for (auto& source : sources) source = static_cast<const char*>(source) + command.from_pitch;
  }
}

void Channel::run_one(const Command& c, const Reference* references, void* const* operands,
                      uint32_t epoch, const char* what) {
  switch (c.kind) {
    case Kind::kCopy: copy_rows(c, operands, epoch, what); break;
    case Kind::kSignal: signal(c.peer, c.flag, epoch); break;
    case Kind::kWait: wait(c.peer, c.flag, epoch - static_cast<uint32_t>(c.lag), what); break;
    case Kind::kReduce: reduce_rows(c, references, operands, epoch, what); break;
    case Kind::kPublish:
      announce(epoch, c.mean != 0 ? resolve(c.from, operands, epoch, what) : nullptr, what);
      break;
  }
}

void Channel::run(const Command* commands, int count, const Reference* references,
                  void* const* operands, uint32_t epoch, const char* what) {
  Recorder& recorder = Recorder::instance();
  Probe& probe = Probe::instance();
  if (!recorder.on() && !probe.on()) {
    for (const Command* c = commands; c != commands + count; ++c)
      run_one(*c, references, operands, epoch, what);
    return;
  }
  for (const Command* c = commands; c != commands + count; ++c) {
    if (probe.on()) probe.step();
    const int64_t start = Recorder::now();
    run_one(*c, references, operands, epoch, what);
    if (recorder.on()) recorder.add(*c, start, Recorder::now(), epoch, what);
  }
}

}  // namespace symm_cp
