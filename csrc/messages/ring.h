// A ring in shared memory through which one rank sends the frames of messages.cpp to another, in
// order.
//
// `tail` counts the bytes that the sender has written, `head` the bytes that the receiver has
// taken; neither wraps around. The store of `tail` publishes the frames before it to the receiver;
// the store of `head` hands their places back to the sender. Either side may have the ring before
// the other. Model: tests/model/messages.pml.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>

#include "channel/wire.h"
#include "memory/segment.h"

namespace symm_cp {

// kEager is a whole message. The other kinds belong to a longer message, which `id` names. Its
// sender sends kOffer and kWithdraw. Its receiver sends kTaken after it has read the message in the
// sender's memory; or it sends kAccept, and then the sender sends kPiece. kReject, from a receiver,
// ends an eager or a longer message. kWithdraw and kReject carry the reason.
enum class FrameKind : uint32_t { kEager, kOffer, kAccept, kPiece, kReject, kWithdraw, kTaken };

// The header of a frame's bytes. A multiple of a cache line.
struct Frame {
  FrameKind kind = FrameKind::kEager;
  uint32_t length = 0;  // of the bytes that follow
  uint64_t id = 0;      // of the message, among its sender's messages to its receiver
  uint64_t tag = 0;
  int64_t bytes = 0;     // of the whole message
  uint64_t address = 0;  // of kOffer: where the message lies in the sender's process
  char name[88] = {};
};
static_assert(sizeof(Frame) == 128);

class Ring {
 public:
  static constexpr uint64_t kBytes = uint64_t{256} << 10;
  static constexpr size_t kSegmentBytes = 4096 + kBytes;

  Ring() = default;
  // `base`: kSegmentBytes, zeros at first.
  explicit Ring(char* base) : header_(reinterpret_cast<Header*>(base)), data_(base + 4096) {}
  bool there() const { return header_ != nullptr; }

  // The bytes of the ring that a frame takes up, with `length` bytes of data behind it.
  static constexpr uint64_t space_of(uint64_t length) {
    return sizeof(Frame) + (length + sizeof(Frame) - 1) / sizeof(Frame) * sizeof(Frame);
  }

  // --- the sender, one thread at a time:

  bool fits(uint64_t length) {
    if (kBytes - (position_ - other_) >= space_of(length)) return true;
    other_ = header_->head.load(std::memory_order_seq_cst);
    return kBytes - (position_ - other_) >= space_of(length);
  }
  // Publishes the frame, which must fit.
  void push(const Frame& frame, const void* bytes) {
    write(position_, &frame, sizeof(frame));
    write(position_ + sizeof(frame), bytes, frame.length);
    position_ += space_of(frame.length);
    header_->tail.store(position_, std::memory_order_seq_cst);
  }
  // Asks the receiver for a signal when it has taken a frame. The sender checks the ring again
  // after this: the receiver may have taken the last frames without a signal.
  void set_starved(bool starved) {
    if (starved_ == starved) return;
    starved_ = starved;
    header_->starved.store(starved ? 1 : 0, std::memory_order_seq_cst);
  }
  // Called before the memory of an offered message is used for anything else. A receiver that reads
  // it meanwhile finds another count afterwards, and discards the bytes.
  void withdraw() { header_->withdrawals.fetch_add(1, std::memory_order_seq_cst); }
  // Whether the receiver has taken frames since the sender last looked. From any thread; then the
  // answer may be late.
  bool drained(uint64_t seen) const {
    return header_->head.load(std::memory_order_seq_cst) != seen;
  }
  uint64_t seen_head() const { return other_; }

  // --- the receiver, one thread at a time:

  // The oldest frame, or null. It stays in place until `pop`.
  const Frame* front() {
    if (other_ == position_) other_ = header_->tail.load(std::memory_order_acquire);
    if (other_ == position_) return nullptr;
    return reinterpret_cast<const Frame*>(data_ + position_ % kBytes);
  }
  // Copies the bytes of the oldest frame.
  void read(void* to, uint64_t bytes) const {
    const uint64_t at = (position_ + sizeof(Frame)) % kBytes;
    const uint64_t first = std::min(bytes, kBytes - at);
    if (first > 0) std::memcpy(to, data_ + at, first);
    if (bytes > first) std::memcpy(static_cast<char*>(to) + first, data_, bytes - first);
  }
  // Hands the place of the oldest frame back. Returns whether the sender asked for a signal.
  bool pop() {
    position_ += space_of(front()->length);
    header_->head.store(position_, std::memory_order_seq_cst);
    return header_->starved.load(std::memory_order_seq_cst) != 0;
  }
  // Whether the sender has published more than `taken` bytes. From any thread.
  bool filled(uint64_t taken) const {
    return header_->tail.load(std::memory_order_seq_cst) != taken;
  }
  uint64_t position() const { return position_; }
  // How often the sender has withdrawn offers. Not a plain load, which could be reordered before
  // the reads of a message.
  uint64_t withdrawals() const {
    return header_->withdrawals.fetch_add(0, std::memory_order_seq_cst);
  }

 private:
  struct Header {
    alignas(64) std::atomic<uint64_t> tail;
    alignas(64) std::atomic<uint64_t> head;
    alignas(64) Word starved;
    alignas(64) std::atomic<uint64_t> withdrawals;
  };
  static_assert(sizeof(Header) <= 4096 && std::atomic<uint64_t>::is_always_lock_free);
  static_assert(kBytes % sizeof(Frame) == 0);  // so that no Frame wraps around

  void write(uint64_t position, const void* from, uint64_t bytes) {
    const uint64_t at = position % kBytes;
    const uint64_t first = std::min(bytes, kBytes - at);
    if (first > 0) std::memcpy(data_ + at, from, first);
    if (bytes > first) std::memcpy(data_, static_cast<const char*>(from) + first, bytes - first);
  }

  Header* header_ = nullptr;
  char* data_ = nullptr;
  uint64_t position_ = 0;  // this side's count
  uint64_t other_ = 0;     // the other side's, when it was last read
  bool starved_ = false;
};

}  // namespace symm_cp
