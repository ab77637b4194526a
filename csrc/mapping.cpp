#include "mapping.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "error.h"

namespace symm_cp {

namespace {

using std::chrono::milliseconds;

enum ParcelWord : size_t { kRefused, kSequence, kBlockBytes, kPadBytes, kMappedBytes, kWords };
const char* const kNames[kWords] = {"", "rendezvous number", "allocation size", "signal pad size",
                                    "mapped size"};
constexpr size_t kReasonWords = 28;

std::string text(int64_t value) { return std::to_string(value); }

// What a rank says that cannot go on: the reason follows the sequence number.
Parcel refusal(int64_t sequence, const std::string& reason) {
  Parcel parcel{std::vector<int64_t>(2 + kReasonWords), {}};
  parcel.words[kRefused] = 1;
  parcel.words[kSequence] = sequence;
  const size_t room = kReasonWords * sizeof(int64_t) - 1;
  std::memcpy(&parcel.words[2], reason.data(), std::min(reason.size(), room));
  return parcel;
}

// Throws when a peer cannot go on, or has sent other words than this rank.
void check_parcels(const Peers& peers, const std::vector<Received>& received, const Parcel& own) {
  const std::string where = "rendezvous of group '" + peers.group() + "': ";
  for (int peer = 0; peer < peers.world_size(); ++peer) {
    if (peer == peers.rank()) continue;
    const std::vector<int64_t>& words = received[peer].words;
    const std::string who = "rank " + text(peer);
    const bool refused = words.size() == 2 + kReasonWords && words[kRefused] != 0;
    if (!refused &&
        (words.size() != own.words.size() || received[peer].fds.size() != own.fds.size()))
      throw PeerError(where + who + " speaks another version of the protocol");
    const size_t shared = refused ? kBlockBytes : words.size();
    for (size_t i = kSequence; i < shared; ++i)
      if (words[i] != own.words[i])
        throw PeerError(where + "ranks disagree on the " + kNames[i] + ": rank " +
                        text(peers.rank()) + " has " + text(own.words[i]) + ", " + who + " has " +
                        text(words[i]));
    if (refused)
      throw PeerError(where + who + " gave up: " + reinterpret_cast<const char*>(&words[2]));
  }
}

}  // namespace

Mapping::Mapping(std::shared_ptr<Peers> peers, const Segment& block, size_t block_bytes,
                 size_t pad_bytes, int64_t sequence)
    : peers_(std::move(peers)),
      block_bytes_(block_bytes),
      pad_bytes_(pad_bytes),
      sequence_(sequence),
      spins_(spin_rounds(peers_->world_size())) {
  const auto unless_refused = [&](const auto& step) {
    try {
      step();
    } catch (const std::exception& error) {
      try {
        decline(*peers_, sequence, error.what());
      } catch (const PeerError&) {  // gone: what was met here says more
      }
      throw;
    }
  };
  unless_refused(
      [&] { control_ = Segment::create(ControlPage::kBytes + pad_bytes, "symm_cp-control"); });
  const Parcel own{{0, sequence, static_cast<int64_t>(block_bytes), static_cast<int64_t>(pad_bytes),
                    static_cast<int64_t>(block.size())},
                   {block.fd(), control_.fd()}};
  auto received = peers_->exchange(own);
  check_parcels(*peers_, received, own);
  unless_refused([&] { map_peers(block, received); });
  // All ranks have mapped all memory, or none uses it.
  const Parcel done{{0, sequence}, {}};
  check_parcels(*peers_, peers_->exchange(done), done);
}

void Mapping::map_peers(const Segment& block, std::vector<Received>& received) {
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) {
      data_.push_back(block.data());
      pads_.push_back(control_.data() + ControlPage::kBytes);
      continue;
    }
    remote_.push_back(Segment::map(std::move(received[peer].fds[0]), block.size()));
    data_.push_back(remote_.back().data());
    remote_.push_back(Segment::map(std::move(received[peer].fds[1]), control_.size()));
    pads_.push_back(remote_.back().data() + ControlPage::kBytes);
  }
}

void Mapping::decline(Peers& peers, int64_t sequence, const std::string& reason) {
  peers.exchange(refusal(sequence, reason));
}

void Mapping::abort(const std::string& reason) {
  ControlPage& own = control(rank());
  uint32_t untold = 0;
  if (!own.aborted.compare_exchange_strong(untold, 2)) return;
  const size_t length = std::min(reason.size(), sizeof(own.reason) - 1);
  std::memcpy(own.reason, reason.data(), length);
  own.reason[length] = 0;
  own.aborted.store(1);
}

void Mapping::check_hope(int peer, bool expired, milliseconds timeout,
                         const std::string& what) const {
  if (control(rank()).aborted.load() == 1)
    throw PeerError(what + ": this workspace was given up: " + control(rank()).reason);
  const ControlPage& page = control(peer);
  if (page.aborted.load() == 1)
    throw PeerError(what + ": rank " + text(peer) + " gave up: " + page.reason);
  if (peers_->dead(peer)) throw PeerError(what + ": rank " + text(peer) + " died");
  if (expired) throw PeerError(what + ": timed out after " + text(timeout.count()) + " ms");
}

milliseconds Mapping::effective(int64_t timeout_ms) const {
  return timeout_ms > 0 ? milliseconds(timeout_ms) : peers_->timeout();
}

Word* Mapping::pad_word(int owner, int source, int channel, const char* op) const {
  if (owner < 0 || owner >= world_size() || source < 0 || source >= world_size())
    throw std::out_of_range(std::string(op) + ": rank " + text(owner == rank() ? source : owner) +
                            " is not in a group of " + text(world_size()));
  const int64_t index = int64_t{channel} * world_size() + source;
  const int64_t words = static_cast<int64_t>(pad_bytes_ / sizeof(uint32_t));
  if (channel < 0 || index >= words)
    throw std::out_of_range(
        std::string(op) + ": channel " + text(channel) + " is out of range: a signal pad of " +
        text(static_cast<int64_t>(pad_bytes_)) + " bytes has channels 0 to " +
        text(words / world_size() - 1) + " for " + text(world_size()) + " ranks");
  return static_cast<Word*>(pads_[owner]) + index;
}

void Mapping::put_signal(int destination, int channel, int64_t timeout_ms, const char* op) {
  Word* word = pad_word(destination, rank(), channel, op);
  Word* sleepers = &control(destination).sleepers;
  const auto timeout = effective(timeout_ms);
  uint32_t free = 0;
  // The previous signal on this channel must have been consumed first.
  while (!word->compare_exchange_strong(free, 1, std::memory_order_seq_cst)) {
    wait_until(
        word, sleepers, spins_, timeout, [](uint32_t v) { return v == 0; },
        [&](bool expired) {
          check_hope(destination, expired, timeout,
                     std::string(op) + " on channel " + text(channel) + ", rank " + text(rank()) +
                         " waiting for rank " + text(destination) +
                         " to consume the previous signal");
        });
    free = 0;
  }
  wake_sleepers(word, sleepers);
}

void Mapping::wait_signal(int source, int channel, int64_t timeout_ms, const char* op) {
  Word* word = pad_word(rank(), source, channel, op);
  Word* sleepers = &control(rank()).sleepers;
  const auto timeout = effective(timeout_ms);
  wait_until(
      word, sleepers, spins_, timeout, [](uint32_t v) { return v == 1; },
      [&](bool expired) {
        check_hope(source, expired, timeout,
                   std::string(op) + " on channel " + text(channel) + ", rank " + text(rank()) +
                       " waiting for rank " + text(source));
      });
  publish(word, sleepers, 0);
}

void Mapping::barrier(int channel, int64_t timeout_ms) {
  pad_word(rank(), world_size() - 1, channel, "barrier");
  for (int step = 1; step < world_size(); ++step)
    put_signal((rank() + step) % world_size(), channel, timeout_ms, "barrier");
  for (int step = 1; step < world_size(); ++step)
    wait_signal((rank() + step) % world_size(), channel, timeout_ms, "barrier");
}

}  // namespace symm_cp
