#include "exchange/exchange_run.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "base/probe.h"
#include "base/team.h"
#include "channel/group.h"
#include "exchange/boxes.h"
#include "exchange/reduce.h"
#include "exchange/trace.h"

namespace symm_cp {

namespace {

int64_t all_bytes(const std::vector<Extent>& extents) {
  int64_t sum = 0;
  for (const Extent& extent : extents) sum += extent.bytes;
  return sum;
}

// Walks along bytes that may be in rows.
class Cursor {
 public:
  Cursor(char* begin, const Extent* extent, int64_t offset) : at_(begin) {
    if (extent == nullptr || extent->row == 0) return;
    extent_ = extent;
    rows_ = (extent->bytes + extent->row - 1) / extent->row;
    enter(offset / extent->row, offset % extent->row);
  }
  char* at() const { return at_; }
  int64_t left() const { return left_; }
  void advance(int64_t bytes) {
    at_ += bytes;
    left_ -= bytes;
    if (left_ == 0 && row_ + 1 < rows_) enter(row_ + 1, 0);
  }

 private:
  void enter(int64_t row, int64_t offset) {
    row_ = row;
    const int64_t number = extent_->numbers == nullptr ? row : extent_->numbers[row];
    at_ = static_cast<char*>(extent_->data) + number * extent_->pitch + offset;
    left_ = extent_->row - offset;
  }

  const Extent* extent_ = nullptr;
  char* at_;
  int64_t left_ = INT64_MAX;  // in this row
  int64_t row_ = 0;
  int64_t rows_ = 0;
};

// Returns how many bytes `store(past_caches)` wrote.
template <class Store>
int64_t stored_in_slot(Channel& channel, int64_t bytes, const Store& store) {
  int64_t stored = 0;
  channel.slot_stores().run(bytes, [&](bool past_caches) { stored = store(past_caches); });
  return stored;
}

}  // namespace

int64_t slot_bytes_of(const Exchange& exchange, const Loop& loop) {
  if (!loop.slotted) return 0;
  // Only calls with the usual piece size have a second piece. Smaller slots would soon be replaced.
  return std::max(2 * kPieceBytes, exchange.piece_bytes);
}

const Loop& loop_of(Group& group, int channel, const Exchange& exchange) {
  const LoopKind kind = exchange.in_place ? LoopKind::kInPlace : LoopKind::kPlain;
  return group.loop(channel, exchange.kind, kind);
}

ExchangeRun::ExchangeRun(Group& group, int channel, HeldExchange exchange)
    : exchange_(std::move(exchange)),
      loop_(&loop_of(group, channel, *exchange_)),
      world_size_(group.world_size()),
      rank_(group.rank()),
      slot_bytes_(slot_bytes_of(*exchange_, *loop_)) {
  if (complete()) measure();
}

void ExchangeRun::measure() {
  if (exchange_->handler != nullptr) {
    room_ = INT64_MAX;
    return;
  }
  result_bytes_ = all_bytes(exchange_->output);
  room_ = loop_->slotted ? exchange_->piece_bytes : INT64_MAX;
  if (loop_->slotted && loop_->parted)
    room_ = exchange_->piece_bytes / world_size_ / kPartAlignment * kPartAlignment;
  int64_t most = 0;
  for (const Extent& extent : exchange_->input) most = std::max(most, extent.bytes);
  for (const Extent& extent : exchange_->output) most = std::max(most, extent.bytes);
  pieces_ = most <= room_ ? 1 : (most + room_ - 1) / room_;
  if (exchange_->boxes != nullptr) {
    exchange_->boxes->check_room(exchange_->call_name, room_);
    pieces_ = exchange_->boxes->pieces();
  }
  if (pieces_ > kMaxPieces || (pieces_ > 1 && exchange_->piece_bytes != kPieceBytes))
    throw std::invalid_argument(exchange_->call_name + ": " + std::to_string(most) +
                                " bytes for one rank; there must be at most " +
                                std::to_string(kMaxPieces * room_) + " in one call");
}

char* ExchangeRun::address(Channel& channel, const Call& call, const Place& place, int64_t piece,
                           int64_t* left) {
  const size_t chunk = place.chunk < 0 ? 0 : static_cast<size_t>(place.chunk);
  switch (place.buffer) {
    case Buffer::kSlot: {
      const int64_t half = piece % 2 * exchange_->piece_bytes;
      const int64_t part = place.chunk < 0 ? 0 : place.chunk * room_;
      return static_cast<char*>(channel.slot(place.index, call.epoch)) + half + part;
    }
    case Buffer::kSymmetric: {
      // All ranks' tensors have the same layout.
      const auto& own = exchange_->input;
      const char* first = static_cast<const char*>(own.front().data);
      const int64_t offset = static_cast<const char*>(own[chunk].data) - first;
      char* theirs = place.index == rank_ ? static_cast<char*>(own.front().data)
                                          : static_cast<char*>(channel.shard_of(place.index, call));
      return theirs + offset + piece * room_;
    }
    default: {
      const auto& extents = place.buffer == Buffer::kInput ? exchange_->input : exchange_->output;
      const Extent& extent = extents[chunk];
      const int64_t offset = piece * room_;
      *left = std::min(room_, std::max<int64_t>(0, extent.bytes - offset));
      return static_cast<char*>(extent.data) + offset;
    }
  }
}

std::vector<PlaneCopy> ExchangeRun::copies_of(Channel& channel, const Call& call,
                                              const Command& step, int64_t piece,
                                              bool past_caches) {
  const Boxes& boxes = *exchange_->boxes;
  const Boxes::Operands& operands = exchange_->operands;
  int64_t unused = 0;
  if (step.source.buffer == Buffer::kSlot)
    return boxes.takes(step.to.chunk, piece, operands,
                       address(channel, call, step.source, piece, &unused), past_caches);
  if (step.to.buffer == Buffer::kSlot)
    return boxes.gives(step.to.chunk, piece, operands,
                       address(channel, call, step.to, piece, &unused), past_caches);
  return boxes.keeps(rank_, piece, operands, past_caches);
}

// Copies the first boxes of all steps together, then the second boxes, and so on.
int64_t ExchangeRun::copy_boxes(Channel& channel, const Call& call, size_t first, size_t last,
                                int64_t piece, bool past_caches) {
  std::vector<std::vector<PlaneCopy>> by_step;
  size_t most = 0;
  for (size_t at = first; at < last; ++at) {
    by_step.push_back(copies_of(channel, call, loop_->steps[at], piece, past_caches));
    most = std::max(most, by_step.back().size());
  }
  int64_t bytes = 0;
  for (size_t i = 0; i < most; ++i) {
    std::vector<PlaneCopy> together;
    for (const auto& copies : by_step)
      if (i < copies.size()) together.push_back(copies[i]);
    for (const PlaneCopy& copy : together) bytes += copy.bytes();
    copy_all_planes(std::move(together));
  }
  return bytes;
}

int64_t ExchangeRun::copy_pass(Channel& channel, const Call& call, size_t first, size_t last,
                               int64_t piece) {
  int64_t to_slots = 0;
  for (size_t at = first; at < last; ++at) {
    const Place& to = loop_->steps[at].to;
    if (to.buffer == Buffer::kSlot) to_slots += std::min(room_, exchange_->input[to.chunk].bytes);
  }
  const auto copy = [&](bool past_caches) {
    return copy_boxes(channel, call, first, last, piece, past_caches);
  };
  return to_slots > 0 ? stored_in_slot(channel, to_slots, copy) : stored_result(copy);
}

size_t ExchangeRun::end_of_pass(size_t at, size_t last) const {
  const auto copies = [&](size_t i) { return loop_->steps[i].kind == Kind::kCopy; };
  size_t end = at + 1;
  if (exchange_->boxes == nullptr || !copies(at)) return end;
  while (end < last && copies(end)) ++end;
  return end;
}

template <class Store>
int64_t ExchangeRun::stored_result(const Store& store) {
  if (result_bytes_ < ResultStores::kLarge) return store(false);
  const auto begin = std::chrono::steady_clock::now();
  const int64_t bytes = store(past_caches_);
  storing_ += std::chrono::steady_clock::now() - begin;
  return bytes;
}

template <class Store>
int64_t ExchangeRun::stored(Channel& channel, const Place& to, int64_t bytes, const Store& store) {
  return to.buffer == Buffer::kSlot ? stored_in_slot(channel, bytes, store) : stored_result(store);
}

int64_t ExchangeRun::copy(Channel& channel, const Call& call, const Command& step, int64_t piece) {
  int64_t bytes = room_;
  char* to = address(channel, call, step.to, piece, &bytes);
  int64_t given = bytes;
  const char* from = address(channel, call, step.source, piece, &given);
  // A copy between slots copies a part of the output.
  if (step.to.buffer == Buffer::kSlot && step.source.buffer == Buffer::kSlot)
    address(channel, call, {Buffer::kOutput, rank_, step.to.chunk, 0}, piece, &given);
  bytes = std::min(bytes, given);
  if (bytes <= 0 || to == from) return bytes;
  const bool to_slot = step.to.buffer == Buffer::kSlot;
  const auto copy = [&](bool past_caches) {
    divide_bytes(to, bytes, 1, [&](int64_t begin, int64_t end) {
      const int64_t offset = piece * room_ + begin;
      Cursor target(to + begin, extent_of(step.to), offset);
      Cursor source(const_cast<char*>(from) + begin, extent_of(step.source), offset);
      for (int64_t left = end - begin; left > 0;) {
        const int64_t run = std::min({left, target.left(), source.left()});
        copy_bytes(target.at(), source.at(), run, past_caches, to_slot);
        target.advance(run);
        source.advance(run);
        left -= run;
      }
    });
    return bytes;
  };
  return stored(channel, step.to, bytes, copy);
}

const Extent* ExchangeRun::extent_of(const Place& place) const {
  const size_t chunk = place.chunk < 0 ? 0 : static_cast<size_t>(place.chunk);
  switch (place.buffer) {
    case Buffer::kInput: return &exchange_->input[chunk];
    case Buffer::kOutput: return &exchange_->output[chunk];
    default: return nullptr;
  }
}

int64_t ExchangeRun::reduce_all(Channel& channel, const Call& call, const Command& step,
                                int64_t piece) {
  int64_t bytes = 0, unused = 0;
  // A sum that goes to the slot is a part of the output, too.
  address(channel, call, {Buffer::kOutput, rank_, step.to.chunk, 0}, piece, &bytes);
  char* to = address(channel, call, step.to, piece, &unused);
  if (bytes == 0) return 0;
  sources_.clear();
  for (int i = 0; i < step.sources; ++i)
    sources_.push_back(
        address(channel, call, loop_->sources[step.first_source + i], piece, &unused));
  const auto sum = [&](bool past_caches) {
    reduce(to, sources_.data(), step.sources, bytes / element_bytes(exchange_->dtype),
           exchange_->dtype, exchange_->reduce_op, past_caches, step.to.buffer == Buffer::kSlot);
    return bytes;
  };
  return stored(channel, step.to, bytes, sum);
}

int64_t ExchangeRun::produce(Channel& channel, const Call& call, int peer) {
  exchange_->handler->give(peer, static_cast<char*>(channel.slot(rank_, call.epoch)),
                           channel.slot_stores());
  return exchange_->input[peer].bytes;
}

int64_t ExchangeRun::consume(Channel& channel, const Call& call, int peer) {
  if (peer == rank_)
    exchange_->handler->keep();
  else
    exchange_->handler->take(peer, static_cast<const char*>(channel.slot(peer, call.epoch)));
  return exchange_->output[peer].bytes;
}

bool ExchangeRun::gives_alike() const {
  const ExchangeKind kind = exchange_->kind;
  return kind == ExchangeKind::kAllGather || kind == ExchangeKind::kAllReduce;
}

void ExchangeRun::announce(Channel& channel, Call& call) {
  if (gives_alike()) {
    call.bytes = exchange_->input.front().bytes;
  } else {
    int64_t* sizes = channel.sizes_of(rank_, call);
    for (int peer = 0; peer < world_size_; ++peer) sizes[peer] = exchange_->input[peer].bytes;
  }
  call.pieces = static_cast<uint32_t>(pieces_);
  channel.announce(call, exchange_->in_place ? exchange_->input.front().data : nullptr);
}

// A rank that takes anything has an output for each rank, which may be empty.
void ExchangeRun::compare_sizes(Channel& channel, int peer, const Call& call) {
  const ExchangeKind kind = exchange_->kind;
  const bool to_all = kind == ExchangeKind::kAllToAll || kind == ExchangeKind::kJoiningAllToAll ||
                      kind == ExchangeKind::kHandledAllToAll;
  const bool by_source = kind == ExchangeKind::kAllGather || to_all;
  if (!to_all && all_bytes(exchange_->output) == 0) return;
  const bool by_owner = kind == ExchangeKind::kTwoShotAllReduce;
  const size_t own = by_source ? peer : by_owner ? rank_ : 0;
  const int64_t wanted = exchange_->output[own].bytes;
  const int64_t given =
      gives_alike() ? channel.bytes_of(peer, call) : channel.sizes_of(peer, call)[rank_];
  if (wanted == given) return;
  throw PeerError("ranks disagree: " + exchange_->call_name + ": rank " + std::to_string(peer) +
                  " gives " + std::to_string(given) + " bytes to rank " + std::to_string(rank_) +
                  ", which takes " + std::to_string(wanted));
}

int64_t ExchangeRun::step(Channel& channel, Call& call, const Command& step, int64_t piece) {
  switch (step.kind) {
    case Kind::kPublish:
      if (piece == 0) announce(channel, call);
      return 0;
    case Kind::kSignal:
      channel.signal(step.peer, step.flag, call, static_cast<uint32_t>(piece));
      return 0;
    case Kind::kWait:
      channel.wait(step.peer, step.flag, call, static_cast<uint32_t>(piece));
      if (piece == 0 && (step.flag == kReadyFlag || step.flag == kPartialFlag)) {
        compare_sizes(channel, step.peer, call);
        pieces_ = std::max<int64_t>(pieces_, channel.pieces_of(step.peer, call));
      }
      return 0;
    case Kind::kCopy: return copy(channel, call, step, piece);
    case Kind::kReduce: return reduce_all(channel, call, step, piece);
    case Kind::kProduce: return produce(channel, call, step.peer);
    case Kind::kConsume: return consume(channel, call, step.peer);
    default: throw std::logic_error("exchanges have no events");
  }
}

void ExchangeRun::steps(Channel& channel, Call& call, int64_t piece, size_t first, size_t last) {
  Recorder& recorder = Recorder::instance();
  Probe& probe = Probe::instance();
  const bool watched = recorder.on() || probe.on();
  const Team team(channel.mapping().cores());
  for (size_t at = first, end = 0; at < last; at = end) {
    end = end_of_pass(at, last);
    const Command& each = loop_->steps[end - 1];
    const auto carry_out = [&] {
      return exchange_->boxes != nullptr && each.kind == Kind::kCopy
                 ? copy_pass(channel, call, at, end, piece)
                 : step(channel, call, each, piece);
    };
    if (!watched) {
      carry_out();
      continue;
    }
    if (probe.on()) probe.step();
    const int64_t start = Recorder::now();
    const int64_t bytes = carry_out();
    if (!recorder.on()) continue;
    Command shown = each;
    shown.bytes = bytes;
    recorder.add(shown, start, Recorder::now(), call.epoch, call.call_name.c_str());
  }
}

void ExchangeRun::publish(Channel& channel, Call& call) {
  steps(channel, call, 0, 0, loop_->published);
}

Call ExchangeRun::begin(Workspace& workspace, int64_t number) {
  if (const auto complete = std::exchange(exchange_->complete, nullptr)) {
    complete(*exchange_);
    measure();
  }
  Call call = workspace.begin(number, slot_bytes_, exchange_->call_name, exchange_->timeout);
  past_caches_ = workspace.channel()->result_stores().next(result_bytes_);
  return call;
}

void ExchangeRun::run(Workspace& workspace, int64_t number) {
  Call call = begin(workspace, number);
  publish(*workspace.channel(), call);
  finish(*workspace.channel(), call);
}

void ExchangeRun::finish(Channel& channel, Call& call) {
  steps(channel, call, 0, loop_->published, loop_->steps.size());
  // By now the pieces of all ranks are known.
  for (int64_t piece = 1; piece < pieces_; ++piece)
    steps(channel, call, piece, 0, loop_->steps.size());
  channel.verify_all(call);
  channel.result_stores().add(result_bytes_, past_caches_, storing_);
}

}  // namespace symm_cp
