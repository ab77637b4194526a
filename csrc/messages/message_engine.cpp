// Messages under the lock of the engine: matching, frames, failures.
#include "messages/message_engine.h"

#include <sys/uio.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace symm_cp {

namespace {

constexpr int64_t kRingPieceBytes = int64_t{32} << 10;
constexpr int64_t kReadBytes = int64_t{4} << 20;        // of a peer's memory, at a time
constexpr std::chrono::microseconds kMoment{10};        // from an offer to the wait for it
constexpr int64_t kMaxQueuedBytes = int64_t{16} << 20;  // copies for which the ring has no room
constexpr int kBatch = 16;                              // frames taken from a ring at a time
constexpr size_t kMaxReason = 1024;

std::string text(int64_t value) { return std::to_string(value); }
std::string rank_text(int rank) { return "rank " + text(rank); }

std::string size_text(const char* name, int64_t bytes) {
  return std::string(name) + (*name == 0 ? "" : " ") + "(" + text(bytes) + " bytes)";
}

Frame frame_of(const Transmission& of) {
  return {FrameKind::kEager, 0, of.id, of.tag, of.message.bytes, 0, {}};
}

}  // namespace

std::string MessageEngine::describe(const Transmission& transmission) const {
  const bool open = transmission.peer == kAnySource;
  return std::string(transmission.sends ? "send to " : "recv from ") +
         (open ? "any rank" : rank_text(transmission.peer)) + " (tag " +
         std::to_string(transmission.tag) + ") on " + rank_text(rank_);
}

// --- starting and ending -------------------------------------------------------------------------

// Makes the ring to a peer, for the engine to hand over.
void MessageEngine::reach(int peer) {
  MessageLink& link = *links_[peer];
  if (link.out.there()) return;
  link.out_memory = Segment::create(Ring::kSegmentBytes, "symm_cp-ring");
  link.out = Ring(link.out_memory.data());
  bell_->kick();
}

void MessageEngine::start_send(MessageLink& link, const TransmissionPtr& transmission) {
  Transmission& send = *transmission;
  send.id = ++link.last_id;
  QueuedFrame queued{frame_of(send), {}, {}};
  std::strncpy(queued.frame.name, send.message.name.c_str(), sizeof(queued.frame.name) - 1);
  if (send.message.bytes > kEagerBytes) {
    queued.frame.kind = FrameKind::kOffer;
    queued.frame.address = reinterpret_cast<uint64_t>(send.message.data);
    link.offered[send.id] = transmission;
    link.queue.push_back(std::move(queued));
    flush(link);
    return;
  }
  queued.frame.length = static_cast<uint32_t>(send.message.bytes);
  if (link.queue.empty() && link.out.fits(queued.frame.length)) {
    link.out.push(queued.frame, send.data());
    if (link.bell != nullptr) link.bell->ring();
    finish(send);
  } else if (link.queued_bytes + send.message.bytes <= kMaxQueuedBytes) {
    queued.copy = std::make_unique_for_overwrite<char[]>(queued.frame.length);
    if (queued.frame.length > 0) std::memcpy(queued.copy.get(), send.data(), queued.frame.length);
    link.queued_bytes += queued.frame.length;
    link.queue.push_back(std::move(queued));
    finish(send);
    flush(link);
  } else {
    queued.transmission = transmission;
    link.queue.push_back(std::move(queued));
    flush(link);
  }
}

void MessageEngine::start_receive(const TransmissionPtr& transmission) {
  Transmission& receive = *transmission;
  const auto known = unexpected_.find(receive.tag);
  if (known != unexpected_.end()) {
    auto& arrivals = known->second;
    const auto arrival = std::find_if(arrivals.begin(), arrivals.end(), [&](const Arrival& each) {
      return receive.any_source || each.source == receive.peer;
    });
    if (arrival != arrivals.end()) {
      const Arrival taken = std::move(*arrival);
      arrivals.erase(arrival);
      if (arrivals.empty()) unexpected_.erase(known);
      deliver(transmission, taken.source, taken.frame, taken.bytes.get());
      return;
    }
  }
  posted_[receive.tag].push_back(transmission);
  any_sources_ += receive.any_source;
  progress();
  if (receive.ended.load()) return;
  refuse_if_lost(receive);
  if (!receive.any_source || watching_) return;
  for (int peer = 0; peer < world_size_; ++peer)
    watching_ = watching_ || (peer != rank_ && links_[peer]->bell == nullptr);
  if (watching_) bell_->kick();
}

void MessageEngine::finish(Transmission& transmission, std::string failure) {
  transmission.failure = std::move(failure);
  --live_;
  ended_.push_back({std::move(transmission.message.owner), std::move(transmission.then)});
  transmission.message.owner = nullptr;
  transmission.ended.store(true, std::memory_order_seq_cst);
  wake_waiters();
}

// Throws when the message cannot come any more.
void MessageEngine::refuse_if_lost(Transmission& receive) {
  std::string reason;
  bool all_gone = true;
  for (int peer = 0; peer < world_size_; ++peer) {
    const MessageLink& link = *links_[peer];
    if (peer == rank_) continue;
    all_gone = all_gone && !link.gone.empty();
    if (!link.gone.empty() && (receive.any_source ? !link.left_in_order : receive.peer == peer))
      reason = rank_text(peer) + " " + link.gone;
  }
  if (reason.empty() && receive.any_source && all_gone) reason = "all ranks have left the group";
  if (reason.empty()) return;
  const std::string what = describe(receive) + ": " + reason;
  report_loss(receive.peer);
  give_up(receive, reason);
  throw PeerError(what, reason + " (noticed by " + rank_text(rank_) + ")");
}

void MessageEngine::report_loss(int peer) const {
  if (!on_loss_) return;
  for (int each = 0; each < world_size_; ++each)
    if ((peer == each || peer == kAnySource) && !links_[each]->gone.empty()) on_loss_(each);
}

bool MessageEngine::give_up(Transmission& transmission, const std::string& reason) {
  if (transmission.ended.load()) return false;
  // Keeps the transmission until this function ends.
  TransmissionPtr self;
  if (transmission.sends) {
    withdraw_send(transmission, reason);
  } else if (transmission.accepted) {
    MessageLink& link = *links_[transmission.peer];
    self = link.accepted.at(transmission.id);
    link.accepted.erase(transmission.id);
    std::erase(link.reading, self);
    reply(transmission.peer, FrameKind::kReject, frame_of(transmission),
          rank_text(rank_) + " gave up: " + reason);
  } else {
    auto& posted = posted_.at(transmission.tag);
    const auto at = std::find_if(posted.begin(), posted.end(), [&](const TransmissionPtr& each) {
      return each.get() == &transmission;
    });
    self = *at;
    posted.erase(at);
    if (posted.empty()) posted_.erase(transmission.tag);
    any_sources_ -= transmission.any_source;
  }
  finish(transmission, describe(transmission) + ": " + reason);
  return true;
}

void MessageEngine::withdraw_send(Transmission& transmission, const std::string& reason) {
  MessageLink& link = *links_[transmission.peer];
  const auto queued =
      std::find_if(link.queue.begin(), link.queue.end(), [&](const QueuedFrame& each) {
        return each.frame.id == transmission.id &&
               (each.frame.kind == FrameKind::kOffer || each.frame.kind == FrameKind::kEager);
      });
  const bool told = queued == link.queue.end();
  if (!told) link.queue.erase(queued);
  std::erase_if(link.streaming,
                [&](const TransmissionPtr& each) { return each.get() == &transmission; });
  link.offered.erase(transmission.id);
  link.out.withdraw();
  if (told)
    reply(transmission.peer, FrameKind::kWithdraw, frame_of(transmission),
          rank_text(rank_) + " gave up its send: " + reason);
}

void MessageEngine::fail_receives(int peer, const std::string& reason, bool any_source) {
  for (auto by_tag = posted_.begin(); by_tag != posted_.end();) {
    std::erase_if(by_tag->second, [&](const TransmissionPtr& each) {
      if (each->any_source ? !any_source : peer != kAnySource && each->peer != peer) return false;
      any_sources_ -= each->any_source;
      finish(*each, describe(*each) + ": " + reason);
      return true;
    });
    by_tag = by_tag->second.empty() ? posted_.erase(by_tag) : std::next(by_tag);
  }
}

// Fails all transmissions in flight between this rank and a peer, except receives that have no
// message yet.
void MessageEngine::fail_link(MessageLink& link, const std::string& reason) {
  for (auto& [id, receive] : std::exchange(link.accepted, {}))
    finish(*receive, describe(*receive) + ": " + reason);
  link.reading.clear();
  link.readable.store(false);
  if (!link.offered.empty()) link.out.withdraw();
  for (auto& [id, send] : std::exchange(link.offered, {}))
    finish(*send, describe(*send) + ": " + reason);
  for (QueuedFrame& queued : std::exchange(link.queue, {}))
    if (queued.transmission != nullptr)
      finish(*queued.transmission, describe(*queued.transmission) + ": " + reason);
  link.streaming.clear();
  link.queued_bytes = 0;
  link.backlog.store(false);
}

void MessageEngine::fail_all(const std::string& reason) {
  for (const auto& link : links_) fail_link(*link, reason);
  fail_receives(kAnySource, reason, true);
  unexpected_.clear();
}

// Messages that a peer sent before its end can still be received.
void MessageEngine::lose(int peer, const std::string& reason, bool in_order) {
  MessageLink& link = *links_[peer];
  while (take_frames(peer)) {
  }
  link.gone = reason;
  link.left_in_order = in_order;
  const std::string why = rank_text(peer) + " " + reason;
  fail_link(link, why);
  for (auto by_tag = unexpected_.begin(); by_tag != unexpected_.end();) {
    std::erase_if(by_tag->second, [&](const Arrival& each) {
      return each.source == peer && each.frame.kind == FrameKind::kOffer;
    });
    by_tag = by_tag->second.empty() ? unexpected_.erase(by_tag) : std::next(by_tag);
  }
  fail_receives(peer, why, !in_order);
  for (int other = 0; other < world_size_; ++other)
    if (other != rank_ && links_[other]->gone.empty()) return;
  fail_receives(peer, "all ranks have left the group", true);
}

// --- from the peers ------------------------------------------------------------------------------

bool MessageEngine::progress() {
  bool any = false;
  for (int peer = 0; peer < world_size_; ++peer) {
    MessageLink& link = *links_[peer];
    if (link.incoming.load()) any = take_frames(peer) || any;
    if (link.readable.load()) any = read_on(peer) || any;
    if (link.backlog.load()) any = flush(link) || any;
  }
  return any;
}

bool MessageEngine::take_frames(int peer) {
  MessageLink& link = *links_[peer];
  if (!link.incoming.load()) return false;
  int count = 0;
  for (; count < kBatch; ++count) {
    const Frame* frame = link.in.front();
    if (frame == nullptr) break;
    handle(peer, *frame);
    if (link.in.pop() && link.bell != nullptr) link.bell->ring();
  }
  link.taken.store(link.in.position());
  return count > 0;
}

void MessageEngine::handle(int peer, const Frame& frame) {
  MessageLink& link = *links_[peer];
  switch (frame.kind) {
    case FrameKind::kEager:
    case FrameKind::kOffer: handle_message(peer, frame); break;
    case FrameKind::kAccept: {
      const auto send = link.offered.find(frame.id);
      if (send == link.offered.end()) break;  // it has been withdrawn
      link.streaming.push_back(send->second);
      flush(link);
      break;
    }
    case FrameKind::kPiece: handle_piece(link, frame); break;
    case FrameKind::kTaken: handle_taken(link, frame); break;
    case FrameKind::kReject: handle_rejection(peer, frame); break;
    case FrameKind::kWithdraw: handle_withdrawal(peer, frame); break;
  }
}

void MessageEngine::handle_message(int peer, const Frame& frame) {
  MessageLink& link = *links_[peer];
  const auto known = posted_.find(frame.tag);
  if (known != posted_.end()) {
    auto& receives = known->second;
    const auto at = std::find_if(
        receives.begin(), receives.end(),
        [&](const TransmissionPtr& each) { return each->any_source || each->peer == peer; });
    if (at != receives.end()) {
      const TransmissionPtr receive = std::move(*at);
      receives.erase(at);
      if (receives.empty()) posted_.erase(known);
      any_sources_ -= receive->any_source;
      deliver(receive, peer, frame, nullptr);
      return;
    }
  }
  Arrival arrival{peer, frame, {}};
  if (frame.kind == FrameKind::kEager) {
    arrival.bytes = std::make_unique_for_overwrite<char[]>(frame.length);
    link.in.read(arrival.bytes.get(), frame.length);
  }
  unexpected_[frame.tag].push_back(std::move(arrival));
}

// Matches a message with its receive. `bytes`: the data of an eager message; null while it is still
// in the ring.
void MessageEngine::deliver(const TransmissionPtr& transmission, int peer, const Frame& frame,
                            const char* bytes) {
  Transmission& receive = *transmission;
  MessageLink& link = *links_[peer];
  receive.peer = peer;
  receive.id = frame.id;
  if (frame.bytes != receive.message.bytes) {
    const std::string why = rank_text(peer) + " sends " + size_text(frame.name, frame.bytes) +
                            ", " + rank_text(rank_) + " receives " +
                            size_text(receive.message.name.c_str(), receive.message.bytes);
    finish(receive, describe(receive) + ": " + why);
    reply(peer, FrameKind::kReject, frame, why);
  } else if (frame.kind == FrameKind::kOffer) {
    receive.accepted = true;
    link.accepted[frame.id] = transmission;
    if (link.process > 0) {
      receive.address = frame.address;
      link.reading.push_back(transmission);
      link.readable.store(true);
    } else {
      answer(peer, transmission, FrameKind::kAccept);
    }
  } else {
    if (bytes == nullptr)
      link.in.read(receive.data(), frame.length);
    else if (frame.length > 0)
      std::memcpy(receive.data(), bytes, frame.length);
    finish(receive);
  }
}

void MessageEngine::handle_piece(MessageLink& link, const Frame& frame) {
  const auto at = link.accepted.find(frame.id);
  if (at == link.accepted.end()) return;  // this rank has given up
  const TransmissionPtr receive = at->second;
  link.in.read(receive->data() + receive->moved, frame.length);
  receive->moved += frame.length;
  if (receive->moved < receive->message.bytes) return;
  link.accepted.erase(at);
  finish(*receive);
}

void MessageEngine::handle_taken(MessageLink& link, const Frame& frame) {
  const auto at = link.offered.find(frame.id);
  if (at == link.offered.end()) return;  // it has been withdrawn
  const TransmissionPtr send = at->second;
  link.offered.erase(at);
  finish(*send);
}

// Whether a thread of the sender waits, and so takes part in the copying. A thread that has just
// offered its message comes to its wait a moment later.
bool MessageEngine::attended(const MessageLink& link) const {
  if (reads_ == Reads::kAlways || link.bell == nullptr) return false;
  const Word& engine = link.bell->doorbell().engine;
  const auto until = Clock::now() + kMoment;
  while (engine.load(std::memory_order_relaxed) != 0) {
    if (Clock::now() > until) return false;
    cpu_relax();
  }
  return true;
}

// Reads one message after the other, and a large message in parts, so that other frames are handled
// in between.
bool MessageEngine::read_on(int peer) {
  MessageLink& link = *links_[peer];
  if (link.reading.empty()) {  // given up meanwhile
    link.readable.store(false);
    return false;
  }
  Transmission& receive = *link.reading.front();
  if (receive.moved == 0) {
    if (attended(link)) {
      end_reading(peer, false);
      return true;
    }
    receive.withdrawals = link.in.withdrawals();
  }
  const int64_t left = std::min(kReadBytes, receive.message.bytes - receive.moved);
  const auto bytes = static_cast<size_t>(left);
  const iovec to{receive.data() + receive.moved, bytes};
  const iovec from{reinterpret_cast<void*>(receive.address + receive.moved), bytes};
  const ssize_t read = process_vm_readv(link.process, &to, 1, &from, 1, 0);
  if (read <= 0) {
    // Reading is not allowed, or the peer is gone, which the link then reports.
    link.process = 0;
    while (!link.reading.empty()) end_reading(peer, false);
    return true;
  }
  receive.moved += read;
  if (receive.moved == receive.message.bytes)
    end_reading(peer, link.in.withdrawals() == receive.withdrawals);
  return true;
}

// Ends reading the first message. Unless `complete`, it comes in pieces instead, or is withdrawn.
void MessageEngine::end_reading(int peer, bool complete) {
  MessageLink& link = *links_[peer];
  const TransmissionPtr receive = std::move(link.reading.front());
  link.reading.pop_front();
  link.readable.store(!link.reading.empty());
  if (!complete) receive->moved = 0;
  answer(peer, receive, complete ? FrameKind::kTaken : FrameKind::kAccept);
}

// Answers the offer of a message: it has been taken, or comes in pieces now.
void MessageEngine::answer(int peer, const TransmissionPtr& receive, FrameKind kind) {
  const bool told = reply(peer, kind, frame_of(*receive), {});
  if (told && kind == FrameKind::kAccept) return;
  links_[peer]->accepted.erase(receive->id);
  finish(*receive,
         told ? "" : describe(*receive) + ": no memory for the answer to " + rank_text(peer));
}

std::string MessageEngine::read_text(const MessageLink& link, const Frame& frame) {
  std::string text(frame.length, 0);
  link.in.read(text.data(), frame.length);
  return text;
}

void MessageEngine::handle_rejection(int peer, const Frame& frame) {
  MessageLink& link = *links_[peer];
  const std::string why = read_text(link, frame);
  const auto offered = link.offered.find(frame.id);
  if (offered != link.offered.end()) {
    const TransmissionPtr send = offered->second;
    link.offered.erase(offered);
    std::erase(link.streaming, send);
    finish(*send, describe(*send) + ": " + why);
    return;
  }
  if (frame.bytes > kEagerBytes) return;  // it has been withdrawn
  // The send has ended: the error reaches the sender with its next wait or call.
  const std::string complaint = "an earlier send to " + rank_text(peer) + " (tag " +
                                std::to_string(frame.tag) + ") on " + rank_text(rank_) + ": " + why;
  for (auto by_tag = posted_.begin(); by_tag != posted_.end(); ++by_tag) {
    auto& receives = by_tag->second;
    const auto at = std::find_if(
        receives.begin(), receives.end(),
        [&](const TransmissionPtr& each) { return !each->any_source && each->peer == peer; });
    if (at == receives.end()) continue;
    const TransmissionPtr receive = std::move(*at);
    receives.erase(at);
    if (receives.empty()) posted_.erase(by_tag);
    finish(*receive, describe(*receive) + ": " + complaint);
    return;
  }
  link.complaint = complaint;
}

void MessageEngine::handle_withdrawal(int peer, const Frame& frame) {
  MessageLink& link = *links_[peer];
  const std::string why = read_text(link, frame);
  const auto accepted = link.accepted.find(frame.id);
  if (accepted != link.accepted.end()) {
    const TransmissionPtr receive = accepted->second;
    link.accepted.erase(accepted);
    std::erase(link.reading, receive);
    finish(*receive, describe(*receive) + ": " + why);
    return;
  }
  const auto known = unexpected_.find(frame.tag);
  if (known == unexpected_.end()) return;  // it was received, or rejected
  known->second.remove_if(
      [&](const Arrival& each) { return each.source == peer && each.frame.id == frame.id; });
  if (known->second.empty()) unexpected_.erase(known);
}

// --- to the peers --------------------------------------------------------------------------------

// Returns false if there cannot be a ring to the peer.
bool MessageEngine::reply(int peer, FrameKind kind, const Frame& about, const std::string& words) {
  MessageLink& link = *links_[peer];
  if (!link.gone.empty()) return true;
  try {
    reach(peer);
  } catch (const ResourceError&) {
    return false;
  }
  QueuedFrame queued{{kind, 0, about.id, about.tag, about.bytes, 0, {}}, {}, {}};
  queued.frame.length = static_cast<uint32_t>(std::min(words.size(), kMaxReason));
  queued.copy = std::make_unique<char[]>(queued.frame.length);
  std::memcpy(queued.copy.get(), words.data(), queued.frame.length);
  link.queue.push_back(std::move(queued));
  flush(link);
  return true;
}

// Writes queued frames and pieces while the ring has room.
bool MessageEngine::flush(MessageLink& link) {
  if (!link.out.there()) {
    link.backlog.store(false);
    return false;
  }
  bool any = false, backlog = false;
  do {
    any = push_queued(link) || any;
    any = push_pieces(link) || any;
    backlog = !link.queue.empty() || !link.streaming.empty();
    link.out.set_starved(backlog);
  } while (backlog && next_fits(link));
  link.seen_head.store(link.out.seen_head());
  link.backlog.store(backlog);
  return any;
}

bool MessageEngine::push_queued(MessageLink& link) {
  bool any = false;
  while (!link.queue.empty() && link.out.fits(link.queue.front().frame.length)) {
    const QueuedFrame queued = std::move(link.queue.front());
    link.queue.pop_front();
    Transmission* send = queued.transmission.get();
    link.out.push(queued.frame, send != nullptr ? send->data() : queued.copy.get());
    if (send != nullptr) finish(*send);
    if (send == nullptr && queued.frame.kind == FrameKind::kEager)
      link.queued_bytes -= queued.frame.length;
    any = true;
  }
  if (any && link.bell != nullptr) link.bell->ring();
  return any;
}

// Pushes one piece after the other: frames that are queued meanwhile go first.
bool MessageEngine::push_pieces(MessageLink& link) {
  bool any = false;
  while (link.queue.empty() && !link.streaming.empty() && next_fits(link)) {
    const TransmissionPtr send = link.streaming.front();
    Frame frame{FrameKind::kPiece, 0, send->id, send->tag, send->message.bytes, 0, {}};
    frame.length = piece_of(*send);
    link.out.push(frame, send->data() + send->moved);
    if (link.bell != nullptr) link.bell->ring();
    send->moved += frame.length;
    any = true;
    if (send->moved < send->message.bytes) continue;
    link.streaming.pop_front();
    link.offered.erase(send->id);
    finish(*send);
  }
  return any;
}

uint32_t MessageEngine::piece_of(const Transmission& send) {
  return static_cast<uint32_t>(std::min(kRingPieceBytes, send.message.bytes - send.moved));
}

bool MessageEngine::next_fits(MessageLink& link) {
  if (!link.queue.empty()) return link.out.fits(link.queue.front().frame.length);
  return !link.streaming.empty() && link.out.fits(piece_of(*link.streaming.front()));
}

}  // namespace symm_cp
