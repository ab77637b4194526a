#include "peers.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "error.h"
#include "listener.h"

namespace symm_cp {

namespace {

using std::chrono::milliseconds;

constexpr size_t kMaxWords = 8;
constexpr size_t kMaxDescriptors = 2;
constexpr size_t kMaxEnded = 1024;
const char* const kBoards = "boards";    // the key under which boards are exchanged
constexpr int kRefusal = -1;             // the round of a refusal
constexpr milliseconds kExitGrace{500};  // between the end of a socket and that of its process
constexpr milliseconds kPollInterval{10};

std::string text(int64_t value) { return std::to_string(value); }
std::string key_of(int rank) { return "symm_cp/peer/" + text(rank); }
std::string refusal_of(int rank) { return "symm_cp/refused/" + text(rank); }

template <size_t N>
void put(char (&to)[N], const std::string& from) {
  const size_t length = std::min(from.size(), N - 1);
  std::memcpy(to, from.data(), length);
  to[length] = 0;
}

// The number of a call's rendezvous, when both keys are of one channel.
std::optional<int64_t> number_like(const std::string& key, const std::string& other) {
  const size_t slash = key.find('/');
  if (slash == std::string::npos || other.compare(0, slash + 1, key, 0, slash + 1) != 0)
    return std::nullopt;
  return std::atoll(other.c_str() + slash + 1);
}

}  // namespace

std::string key_of_call(int channel, int64_t number) {
  return std::string(kChannelNames[channel]) + "/" + text(number);
}

void require_descriptors(int count, const std::string& context) {
  std::vector<Descriptor> opened;
  for (int i = 0; i < count; ++i) {
    opened.emplace_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (opened.back().valid()) continue;
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    throw ResourceError(context + " needs " + text(count) + " more file descriptors, only " +
                        text(i) + " are left of " + text(static_cast<int64_t>(limit.rlim_cur)) +
                        "; raise the limit (ulimit -n)");
  }
}

struct Peers::Message {
  char key[48];
  int32_t round;
  int32_t words;  // of a refusal: the other channel, and as its word the number there
  int64_t word[kMaxWords];
  char text[256];  // the call; of a refusal the reason
};

Peers::Peers(Bootstrap& bootstrap, std::string group, int rank, int world_size,
             milliseconds timeout, const Rendezvous& rendezvous)
    : group_(std::move(group)),
      rank_(rank),
      world_size_(world_size),
      timeout_(timeout),
      forks_(fork_count()),
      peers_(static_cast<size_t>(world_size)),
      boards_(static_cast<size_t>(world_size)) {
  // On failure it is closed after the peers were told: those in its queue would see only that this
  // rank has left.
  std::optional<Listener> listener;
  try {
    // For each peer a socket, a process and, for a moment, a board; and what this rank opens.
    require_descriptors(3 * world_size + 4, rendezvous.call_name);
    boards_[rank_] = Segment::create(sizeof(Board), "symm_cp-board");
    if (world_size_ == 1) return;
    while (!meet(bootstrap, rendezvous, listener)) {
      peers_ = std::vector<Peer>(static_cast<size_t>(world_size_));
      ended_.clear();
    }
  } catch (const std::exception& error) {
    refuse_before(bootstrap, rank_, rendezvous.key, cause_of(error, rank_));
    refuse(kBoards, cause_of(error, rank_));  // for peers that are already connected
    // A peer's refusal is a better error than that it has left.
    for (int peer = 0; peer < world_size_; ++peer)
      if (peer != rank_) check_refusal(bootstrap, rendezvous, peer);
    throw;
  }
}

void Peers::check_refusal(Bootstrap& bootstrap, const Rendezvous& rendezvous, int peer) {
  const auto refusal = bootstrap.get(refusal_of(peer));
  if (!refusal) return;
  const size_t line = refusal->find('\n');
  const auto theirs = number_like(rendezvous.key, refusal->substr(0, line));
  const auto own = number_like(rendezvous.key, rendezvous.key);
  if (!theirs || !own || *theirs < *own) return;
  const std::string cause = refusal->substr(line + 1);
  throw PeerError(rendezvous.call_name + ": rank " + text(peer) + " failed: " + cause, cause);
}

void Peers::refuse_before(Bootstrap& bootstrap, int rank, const std::string& key,
                          const std::string& reason) {
  bootstrap.set(refusal_of(rank), key + "\n" + reason);
}

void Peers::check_owned(const std::string& context) const {
  if (!owned())
    throw PeerError(context + ": this process was forked from rank " + text(rank_) + " of group '" +
                    group_ + "' and is no rank of it: call it in the parent process only");
}

// Looks for a peer in the store, and connects to it if its rank is lower: one socket for each pair.
void Peers::find_peer(Bootstrap& bootstrap, const Rendezvous& rendezvous, int peer, bool thorough,
                      StaleEntry& stale) {
  if (thorough) check_refusal(bootstrap, rendezvous, peer);
  const auto entry = bootstrap.get(key_of(peer));
  if (!entry) {
    if (thorough && bootstrap.lost(peer))
      throw_missing(peer, rendezvous.call_name, "died or left before its first call");
    return;
  }
  if (thorough && Listener::process_ended(*entry)) {
    // The entry may be of an earlier process, which the present one will replace.
    if (stale.entry != *entry) stale = {*entry, Clock::now()};
    if (Clock::now() - stale.since > kExitGrace) throw_missing(peer, rendezvous.call_name, "died");
    return;
  }
  if (peer < rank_) connect_to(*entry, peer);
}

// A rank may be found while it makes the mesh for an earlier call, which it then gives up: its
// socket closes, and it comes again. False: so it was. Of two ranks only: others have this one's
// socket.
bool Peers::meet(Bootstrap& bootstrap, const Rendezvous& rendezvous,
                 std::optional<Listener>& listener) {
  try {
    connect_all(bootstrap, rendezvous, listener.emplace(group_, rank_, world_size_));
    listener.reset();
    exchange_boards(rendezvous);
  } catch (const LeftGroup&) {
    if (world_size_ > 2 || rendezvous.budget.left <= Clock::duration::zero()) throw;
    return false;
  }
  return true;
}

void Peers::connect_all(Bootstrap& bootstrap, const Rendezvous& rendezvous, Listener& listener) {
  bootstrap.set(key_of(rank_), listener.entry());
  const Waiting waiting(rendezvous.budget);
  std::vector<StaleEntry> stale_entries(peers_.size());
  Clock::time_point next_look{};
  while (true) {
    const bool thorough = Clock::now() >= next_look;
    if (thorough) next_look = Clock::now() + kSlice;
    for (int peer = 0; peer < world_size_; ++peer)
      if (peer != rank_ && !peers_[peer].socket.valid() && (peer < rank_ || thorough))
        find_peer(bootstrap, rendezvous, peer, thorough, stale_entries[peer]);
    for (auto& [peer, socket] : listener.accept_ranks()) add_connection(peer, std::move(socket));
    int missing = -1;
    for (int peer = 0; peer < world_size_; ++peer)
      if (peer != rank_ && !peers_[peer].socket.valid()) missing = peer;
    if (missing < 0) return;
    throw_if_interrupted();
    rendezvous.on_slice();
    if (waiting.expired())
      throw_missing(missing, rendezvous.call_name,
                    "was not found on the host of rank " + text(rank_) + " within " +
                        text(rendezvous.budget.limit.count()) + " ms");
    listener.wait(milliseconds(5));
  }
}

void Peers::connect_to(const std::string& entry, int peer) {
  if (!Listener::same_host(entry))
    throw PeerError("group '" + group_ + "' spans hosts: rank " + text(peer) +
                    " is not on the host of rank " + text(rank_));
  Descriptor socket = Listener::connect(entry, rank_, world_size_);
  if (socket.valid()) add_connection(peer, std::move(socket));
}

void Peers::add_connection(int peer, Descriptor socket) {
  const ucred credentials = Listener::credentials(socket.get());
  if (credentials.uid != getuid())
    throw PeerError("rendezvous of group '" + group_ + "': rank " + text(peer) +
                    " belongs to another user");
#ifdef SYS_pidfd_open
  peers_[peer].process = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, credentials.pid, 0)));
#endif
  peers_[peer].socket = std::move(socket);
}

// Not under the key of a call: the ranks' first calls may differ.
void Peers::exchange_boards(const Rendezvous& rendezvous) {
  const Payload own{{}, {boards_[rank_].fd()}};
  auto received = exchange({kBoards, rendezvous.call_name, rendezvous.budget, rendezvous.on_slice},
                           0, own, true);
  for (int peer = 0; peer < world_size_; ++peer)
    if (peer != rank_)
      boards_[peer] = Segment::map(std::move(received[peer].fds.at(0)), boards_[rank_].size());
}

bool Peers::dead(int rank) const {
  const Peer& peer = peers_[rank];
  const bool has_pidfd = peer.process.valid();
  pollfd entry{has_pidfd ? peer.process.get() : peer.socket.get(), POLLIN, 0};
  if (entry.fd < 0 || poll(&entry, 1, 0) <= 0) return false;
  // A pidfd is readable once its process ended; a socket may just hold a parcel.
  return has_pidfd || (entry.revents & (POLLHUP | POLLERR)) != 0;
}

// False when the peer's buffer is full. A closed socket is noticed when this rank reads.
bool Peers::send_message(int peer, const Message& message, const std::vector<int>& fds) {
  iovec data{const_cast<Message*>(&message), sizeof(message)};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (!fds.empty()) attach_descriptors(header, control, fds);
  const ssize_t sent = sendmsg(peers_[peer].socket.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
  return sent >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS);
}

// Reads one message; false when there is none.
bool Peers::read_message(Peer& peer) {
  Message message{};
  iovec data{&message, sizeof(message)};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  const ssize_t bytes = recvmsg(peer.socket.get(), &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
  if (bytes != sizeof(message)) {
    peer.closed = true;
    return false;
  }
  message.key[sizeof(message.key) - 1] = message.text[sizeof(message.text) - 1] = 0;
  Received received;
  for (cmsghdr* rights = CMSG_FIRSTHDR(&header); rights != nullptr;
       rights = CMSG_NXTHDR(&header, rights)) {
    if (rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    const int* fds = reinterpret_cast<const int*>(CMSG_DATA(rights));
    for (size_t i = 0; i < count; ++i) received.fds.emplace_back(fds[i]);
  }
  if (std::find(ended_.begin(), ended_.end(), message.key) != ended_.end()) return true;
  Incoming& letter = peer.incoming[{message.key, message.round}];
  letter.truncated = (header.msg_flags & MSG_CTRUNC) != 0;
  if (message.round == kRefusal) {
    letter.refused = true;
    letter.refusal = message.text;
    if (message.word[0] != 0) letter.other = CallSite{message.words, message.word[0], {}};
    return true;
  }
  const auto words = std::min(static_cast<size_t>(std::max(message.words, 0)), kMaxWords);
  received.words.assign(message.word, message.word + words);
  received.call_name = message.text;
  letter.payload = std::move(received);
  return true;
}

void Peers::read_messages() {
  for (Peer& peer : peers_)
    while (peer.socket.valid() && !peer.closed && read_message(peer)) {
    }
}

// Drops all messages under this key, also later ones.
void Peers::end(const std::string& key) {
  for (Peer& peer : peers_)
    for (auto it = peer.incoming.lower_bound({key, kRefusal});
         it != peer.incoming.end() && it->first.first == key;)
      it = peer.incoming.erase(it);
  if (std::find(ended_.begin(), ended_.end(), key) != ended_.end()) return;
  ended_.push_back(key);
  if (ended_.size() > kMaxEnded) ended_.pop_front();
}

void Peers::refuse(const std::string& key, const std::string& reason, const CallSite* other) {
  Message message{};
  if (other != nullptr) {
    message.words = other->channel;
    message.word[0] = other->number;
  }
  put(message.key, key);
  put(message.text, reason);
  message.round = kRefusal;
  for (int peer = 0; peer < world_size_; ++peer)
    if (peers_[peer].socket.valid()) send_message(peer, message, {});
  std::lock_guard<std::mutex> lock(mutex_);
  end(key);
}

void Peers::throw_missing(int peer, const std::string& context, const std::string& why) {
  throw PeerError(context + ": rank " + text(peer) + " " + why,
                  "rank " + text(peer) + " " + why + " (noticed by rank " + text(rank_) + ")");
}

void Peers::throw_if_refused(const std::string& key, const std::string& context, int peer) const {
  const auto refusal = peers_[peer].incoming.find({key, kRefusal});
  if (refusal == peers_[peer].incoming.end()) return;
  const Incoming& theirs = refusal->second;
  throw GaveUp(context + ": rank " + text(peer) + " failed: " + theirs.refusal, theirs.refusal,
               theirs.other);
}

void Peers::check_refused(const std::string& key, const std::string& context, int peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  read_messages();
  throw_if_refused(key, context, peer);
}

// Moves received payloads to `all`; throws a peer's refusal. True when nothing is missing.
bool Peers::collect(const std::string& key, int round, const std::string& context,
                    std::vector<Received>& all, std::vector<bool>& have) {
  std::lock_guard<std::mutex> lock(mutex_);
  read_messages();
  for (int peer = 0; peer < world_size_; ++peer) {
    auto& incoming = peers_[peer].incoming;
    throw_if_refused(key, context, peer);
    const auto letter = incoming.find({key, round});
    if (letter == incoming.end()) continue;
    if (letter->second.truncated)
      throw ResourceError(context + ": too few file descriptors for what rank " + text(peer) +
                          " sent; raise the limit (ulimit -n)");
    all[peer] = std::move(*letter->second.payload);
    have[peer] = true;
    incoming.erase(letter);
  }
  return std::all_of(have.begin(), have.end(), [](bool accepted) { return accepted; });
}

// Throws when a missing peer will never come, or the time is over.
void Peers::check_missing(const std::string& key, const std::string& context,
                          const std::vector<bool>& have, bool expired, const WaitBudget& budget) {
  for (int peer = 0; peer < world_size_; ++peer) {
    if (have[peer]) continue;
    bool closed;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      read_messages();
      closed = peers_[peer].closed;
      // A message sent just before its end counts: the next pass finds it.
      const auto& incoming = peers_[peer].incoming;
      const auto letter = incoming.lower_bound({key, kRefusal});
      if (letter != incoming.end() && letter->first.first == key) continue;
    }
    if (closed) {
      // The socket of a process closes a little before the process ends.
      const auto until = Clock::now() + kExitGrace;
      while (!dead(peer) && Clock::now() < until) std::this_thread::sleep_for(milliseconds(5));
    }
    if (dead(peer)) throw_missing(peer, context, "died");
    if (!closed) continue;
    const std::string who = "rank " + text(peer) + " has left the group";
    throw LeftGroup(context + ": " + who, who + " (noticed by rank " + text(rank_) + ")");
  }
  if (!expired) return;
  std::string late;
  for (int peer = 0; peer < world_size_; ++peer)
    if (!have[peer]) late += (late.empty() ? "rank " : ", rank ") + text(peer);
  throw PeerError(context + ": " + late + " did not come within " + text(budget.limit.count()) +
                  " ms");
}

std::vector<Received> Peers::exchange(const Rendezvous& rendezvous, int round,
                                      const Payload& payload, bool last) {
  std::vector<Received> all(static_cast<size_t>(world_size_));
  std::vector<bool> have(static_cast<size_t>(world_size_), false);
  have[rank_] = true;
  Message message{};
  put(message.key, rendezvous.key);
  put(message.text, rendezvous.call_name);
  message.round = round;
  message.words = static_cast<int32_t>(payload.words.size());
  std::copy(payload.words.begin(), payload.words.end(), message.word);
  const std::string context =
      rendezvous.call_name + ": rendezvous of group '" + group_ + "' on rank " + text(rank_);
  try {
    const Waiting waiting(rendezvous.budget);
    std::vector<bool> sent = have;
    while (true) {
      for (int peer = 0; peer < world_size_; ++peer)
        sent[peer] = sent[peer] || send_message(peer, message, payload.fds);
      if (collect(rendezvous.key, round, context, all, have)) break;
      throw_if_interrupted();
      check_missing(rendezvous.key, context, have, waiting.expired(), rendezvous.budget);
      rendezvous.on_slice();
      std::vector<pollfd> sockets;
      for (const Peer& peer : peers_)
        if (peer.socket.valid() && !peer.closed) sockets.push_back({peer.socket.get(), POLLIN, 0});
      poll(sockets.data(), sockets.size(), static_cast<int>(kPollInterval.count()));
    }
    if (last) {
      std::lock_guard<std::mutex> lock(mutex_);
      end(rendezvous.key);
    }
  } catch (const std::exception& error) {
    refuse(rendezvous.key, cause_of(error, rank_), other_of(error));
    throw;
  }
  return all;
}

}  // namespace symm_cp
