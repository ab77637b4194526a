#include "memory/mapping.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "base/error.h"

namespace symm_cp {

namespace {

using std::chrono::milliseconds;

enum PayloadWord : size_t { kBlockBytes, kPadBytes, kMappedBytes, kWords };
const char* const kNames[kWords] = {"allocation size", "signal pad size", "mapped size"};

std::string text(int64_t value) { return std::to_string(value); }

// Throws when a peer makes another call, or has sent different words.
void check_payloads(const Peers& peers, const std::vector<Received>& received, const Payload& own,
                    const std::string& context) {
  const std::string me = "rank " + text(peers.rank());
  for (int peer = 0; peer < peers.world_size(); ++peer) {
    if (peer == peers.rank()) continue;
    const std::vector<int64_t>& words = received[peer].words;
    const std::string who = "rank " + text(peer);
    if (received[peer].call_name != context)
      throw PeerError("ranks disagree: " + me + " calls " + context + ", " + who + " calls " +
                      received[peer].call_name);
    if (words.size() != own.words.size() || received[peer].fds.size() != own.fds.size())
      throw PeerError(context + ": " + who + " sent " + text(words.size()) + " numbers and " +
                      text(received[peer].fds.size()) + " descriptors, " + text(own.words.size()) +
                      " and " + text(own.fds.size()) + " are required");
    for (size_t i = 0; i < words.size(); ++i)
      if (words[i] != own.words[i])
        throw PeerError("ranks disagree on the " + std::string(kNames[i]) + ": " + me + " calls " +
                        context + " with " + text(own.words[i]) + " bytes, " + who + " with " +
                        text(words[i]));
  }
}

}  // namespace

Mapping::Mapping(std::shared_ptr<Peers> peers, const Segment& block, size_t block_bytes,
                 size_t pad_bytes, int64_t sequence, const Rendezvous& rendezvous)
    : peers_(std::move(peers)),
      block_bytes_(block_bytes),
      pad_bytes_(pad_bytes),
      sequence_(sequence),
      spins_(spin_rounds(peers_->world_size())) {
  try {
    require_descriptors(2 * world_size() + 1, rendezvous.call_name);
    control_ = Segment::create(ControlPage::kBytes + pad_bytes, "symm_cp-control");
    const Payload own{{static_cast<int64_t>(block_bytes), static_cast<int64_t>(pad_bytes),
                       static_cast<int64_t>(block.size())},
                      {block.fd(), control_.fd()}};
    auto received = peers_->exchange(rendezvous, 0, own, false);
    check_payloads(*peers_, received, own, rendezvous.call_name);
    map_peers(block, received);
    // Waits until all ranks have mapped all memory: if one fails, none uses it.
    peers_->exchange(rendezvous, 1, {}, true);
    for (int peer = 0; peer < world_size(); ++peer)
      cores_.add(&control(peer).cores, peer == rank());
  } catch (const std::exception& error) {
    peers_->refuse(rendezvous.key, cause_of(error, rank()), other_of(error));
    throw;
  }
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

void Mapping::close() {
  if (peers_->owned()) control(rank()).closed.store(1);
}

void Mapping::throw_if_peer_lost(int peer, bool expired, WaitBudget& budget,
                                 const std::string& context) const {
  const std::string who = "rank " + text(peer);
  const auto lost = [&](const std::string& why) {
    return PeerError(context + ": " + who + " " + why,
                     who + " " + why + " (noticed by rank " + text(rank()) + ")");
  };
  // A process that ends normally closes its memory and then exits. "died" says more, so death is
  // checked first.
  if (peers_->dead(peer)) throw lost("died");
  if (control(peer).closed.load() == 1) throw lost("has left the group");
  if (expired) throw TimedOut(context + ": timed out after " + text(budget.limit.count()) + " ms");
  budget.say_if_long(peers_->group(), [&] { return context; });
}

WaitBudget Mapping::budget_of(int64_t timeout_ms) const {
  return WaitBudget(timeout_ms > 0 ? milliseconds(timeout_ms) : peers_->timeout());
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
        text(words / world_size() - 1) + " for " + text(world_size()) +
        " ranks; for more, call torch.distributed._symmetric_memory.set_signal_pad_size(bytes) "
        "before any symmetric memory is allocated");
  return static_cast<Word*>(pads_[owner]) + index;
}

void Mapping::put(int destination, int channel, WaitBudget& budget, const char* op) {
  Word* word = pad_word(destination, rank(), channel, op);
  Word* sleepers = &control(destination).sleepers;
  uint32_t free = 0;
  // The previous signal on this channel must have been consumed first.
  while (!word->compare_exchange_strong(free, 1, std::memory_order_seq_cst)) {
    wait_until(
        word, sleepers, spins_, budget, [](uint32_t v) { return v == 0; },
        [&](bool expired) {
          throw_if_peer_lost(destination, expired, budget,
                             std::string(op) + " on channel " + text(channel) + ", rank " +
                                 text(rank()) + " waiting for rank " + text(destination) +
                                 " to consume the previous signal");
        });
    free = 0;
  }
  wake_sleepers(word, sleepers);
}

void Mapping::await(int source, int channel, WaitBudget& budget, const char* op) {
  Word* word = pad_word(rank(), source, channel, op);
  Word* sleepers = &control(rank()).sleepers;
  wait_until(
      word, sleepers, spins_, budget, [](uint32_t v) { return v == 1; },
      [&](bool expired) {
        throw_if_peer_lost(source, expired, budget,
                           std::string(op) + " on channel " + text(channel) + ", rank " +
                               text(rank()) + " waiting for rank " + text(source));
      });
  symm_cp::publish(word, sleepers, 0);
}

void Mapping::put_signal(int destination, int channel, int64_t timeout_ms) {
  peers_->check_owned("put_signal");
  WaitBudget budget = budget_of(timeout_ms);
  put(destination, channel, budget, "put_signal");
}

void Mapping::wait_signal(int source, int channel, int64_t timeout_ms) {
  peers_->check_owned("wait_signal");
  WaitBudget budget = budget_of(timeout_ms);
  await(source, channel, budget, "wait_signal");
}

void Mapping::barrier(int channel, int64_t timeout_ms) {
  peers_->check_owned("barrier");
  WaitBudget budget = budget_of(timeout_ms);
  pad_word(rank(), world_size() - 1, channel, "barrier");
  for (int step = 1; step < world_size(); ++step)
    put((rank() + step) % world_size(), channel, budget, "barrier");
  for (int step = 1; step < world_size(); ++step)
    await((rank() + step) % world_size(), channel, budget, "barrier");
}

int64_t* Mapping::number_of(int owner) const {
  char* end = static_cast<char*>(pads_[owner]) + pad_bytes_ / sizeof(int64_t) * sizeof(int64_t);
  return reinterpret_cast<int64_t*>(end) - 1;
}

// The counters are the last words of the pad before `number_of`.
Word* Mapping::counter(int owner, int source) const {
  if (pad_bytes_ < 2 * sizeof(int64_t) + world_size() * sizeof(Word))
    throw std::out_of_range("a signal pad of " + text(static_cast<int64_t>(pad_bytes_)) +
                            " bytes has no room for counted signals of " + text(world_size()) +
                            " ranks");
  return reinterpret_cast<Word*>(number_of(owner)) - world_size() + source;
}

void Mapping::put_number(int owner, int64_t* number, int64_t value) {
  peers_->check_owned("a signal");
  reinterpret_cast<std::atomic<int64_t>*>(number)->store(value, std::memory_order_seq_cst);
  wake_sleepers(reinterpret_cast<Word*>(number), &control(owner).sleepers);
}

void Mapping::await_number(int64_t* number, int source, const char* op,
                           const std::function<bool(int64_t)>& ready) {
  peers_->check_owned(op);
  WaitBudget budget = budget_of(0);
  const auto* whole = reinterpret_cast<std::atomic<int64_t>*>(number);
  const std::string who = source < 0 ? "a peer" : "rank " + text(source);
  wait_until(
      reinterpret_cast<Word*>(number), &control(rank()).sleepers, spins_, budget,
      [&](uint32_t) { return ready(whole->load(std::memory_order_acquire)); },
      [&](bool expired) {
        const std::string context = "rank " + text(rank()) + " waiting for the signal of " + who +
                                    ", seeing " + text(whole->load(std::memory_order_acquire));
        for (int peer = 0; peer < world_size(); ++peer)
          if (peer != rank() && (source < 0 ? world_size() == 2 : peer == source))
            throw_if_peer_lost(peer, false, budget, context);
        if (expired)
          throw PeerError(context + ": timed out after " + text(budget.limit.count()) + " ms");
        budget.say_if_long(peers_->group(), [&] { return context; });
      });
}

void Mapping::count_signal(int destination) {
  peers_->check_owned("a signal");
  Word* word = counter(destination, rank());
  word->fetch_add(1, std::memory_order_seq_cst);
  wake_sleepers(word, &control(destination).sleepers);
}

void Mapping::take_signal(int source, const char* op) {
  peers_->check_owned(op);
  WaitBudget budget = budget_of(0);
  Word* word = counter(rank(), source);
  wait_until(
      word, &control(rank()).sleepers, spins_, budget, [](uint32_t v) { return v > 0; },
      [&](bool expired) {
        throw_if_peer_lost(
            source, expired, budget,
            "rank " + text(rank()) + " waiting for the signal of rank " + text(source));
      });
  word->fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace symm_cp
