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

#include "door.h"
#include "error.h"

namespace symm_cp {

namespace {

using std::chrono::milliseconds;

constexpr size_t kMaxWords = 8;
constexpr size_t kMaxDescriptors = 2;
constexpr size_t kMaxEnded = 1024;
const char* const kBoards = "boards";   // the key under which boards are exchanged
constexpr int kRefusal = -1;            // the round of a refusal
constexpr milliseconds kPatience{500};  // between the end of a socket and that of its process
constexpr milliseconds kPoll{10};

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

void require_descriptors(int count, const std::string& what) {
  std::vector<Descriptor> opened;
  for (int i = 0; i < count; ++i) {
    opened.emplace_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (opened.back().valid()) continue;
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    throw ResourceError(what + " needs " + text(count) + " more file descriptors, only " + text(i) +
                        " are left of " + text(static_cast<int64_t>(limit.rlim_cur)) +
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
             milliseconds timeout, const Meeting& meeting)
    : group_(std::move(group)),
      rank_(rank),
      world_size_(world_size),
      timeout_(timeout),
      forks_(fork_count()),
      peers_(static_cast<size_t>(world_size)),
      boards_(static_cast<size_t>(world_size)) {
  try {
    // For each peer a socket, a process and, for a moment, a board; and what this rank opens.
    require_descriptors(3 * world_size + 4, meeting.what);
    boards_[rank_] = Segment::create(sizeof(Board), "symm_cp-board");
    if (world_size_ == 1) return;
    meet(bootstrap, meeting);
    exchange_boards(meeting);
  } catch (const std::exception& error) {
    refuse_before(bootstrap, rank_, meeting.key, cause_of(error, rank_));
    refuse(kBoards, cause_of(error, rank_));  // to those that have come that far
    // What a peer said before it left says more than that it has.
    for (int peer = 0; peer < world_size_; ++peer)
      if (peer != rank_) check_refusal(bootstrap, meeting, peer);
    throw;
  }
}

void Peers::check_refusal(Bootstrap& bootstrap, const Meeting& meeting, int peer) {
  const auto refusal = bootstrap.get(refusal_of(peer));
  if (!refusal) return;
  const size_t line = refusal->find('\n');
  const auto theirs = number_like(meeting.key, refusal->substr(0, line));
  const auto own = number_like(meeting.key, meeting.key);
  if (!theirs || !own || *theirs < *own) return;
  const std::string cause = refusal->substr(line + 1);
  throw PeerError(meeting.what + ": rank " + text(peer) + " failed: " + cause, cause);
}

void Peers::refuse_before(Bootstrap& bootstrap, int rank, const std::string& key,
                          const std::string& reason) {
  bootstrap.set(refusal_of(rank), key + "\n" + reason);
}

void Peers::check_owned(const std::string& what) const {
  if (!owned())
    throw PeerError(what + ": this process was forked from rank " + text(rank_) + " of group '" +
                    group_ + "' and is no rank of it: call it in the parent process only");
}

// Looks for a peer in the store and connects to it, when that is this rank's part. Lower ranks are
// called, higher ranks call: one socket for each pair.
void Peers::look_for(Bootstrap& bootstrap, const Meeting& meeting, int peer, bool closely,
                     Suspicion& suspicion) {
  if (closely) check_refusal(bootstrap, meeting, peer);
  const auto entry = bootstrap.get(key_of(peer));
  if (!entry) {
    if (closely && bootstrap.lost(peer))
      throw_missing(peer, meeting.what, "died or left before its first call");
    return;
  }
  if (closely && Door::gone(*entry)) {
    // The entry may be of an earlier process; then the present one will write its own.
    if (suspicion.entry != *entry) suspicion = {*entry, Clock::now()};
    if (Clock::now() - suspicion.since > kPatience) throw_missing(peer, meeting.what, "died");
    return;
  }
  if (peer < rank_) connect_to(*entry, peer);
}

void Peers::meet(Bootstrap& bootstrap, const Meeting& meeting) {
  Door door(group_, rank_, world_size_);
  bootstrap.set(key_of(rank_), door.entry());
  const Waiting waiting(meeting.budget);
  std::vector<Suspicion> suspicions(peers_.size());
  Clock::time_point next_look{};
  while (true) {
    const bool closely = Clock::now() >= next_look;
    if (closely) next_look = Clock::now() + kSlice;
    for (int peer = 0; peer < world_size_; ++peer)
      if (peer != rank_ && !peers_[peer].socket.valid() && (peer < rank_ || closely))
        look_for(bootstrap, meeting, peer, closely, suspicions[peer]);
    for (auto& [peer, socket] : door.arrivals()) adopt(peer, std::move(socket));
    int missing = -1;
    for (int peer = 0; peer < world_size_; ++peer)
      if (peer != rank_ && !peers_[peer].socket.valid()) missing = peer;
    if (missing < 0) return;
    throw_if_interrupted();
    meeting.on_slice();
    if (waiting.expired())
      throw_missing(missing, meeting.what,
                    "was not found on the host of rank " + text(rank_) + " within " +
                        text(meeting.budget.limit.count()) + " ms");
    door.wait(milliseconds(5));
  }
}

void Peers::connect_to(const std::string& entry, int peer) {
  if (!Door::same_host(entry))
    throw PeerError("group '" + group_ + "' spans hosts: rank " + text(peer) +
                    " is not on the host of rank " + text(rank_));
  Descriptor socket = Door::knock(entry, rank_, world_size_);
  if (socket.valid()) adopt(peer, std::move(socket));
}

void Peers::adopt(int peer, Descriptor socket) {
  const ucred credentials = Door::credentials(socket.get());
  if (credentials.uid != getuid())
    throw PeerError("rendezvous of group '" + group_ + "': rank " + text(peer) +
                    " belongs to another user");
#ifdef SYS_pidfd_open
  peers_[peer].process = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, credentials.pid, 0)));
#endif
  peers_[peer].socket = std::move(socket);
}

// Not under the key of a call: ranks may come here for different calls first.
void Peers::exchange_boards(const Meeting& meeting) {
  const Parcel own{{}, {boards_[rank_].fd()}};
  auto received = exchange({kBoards, meeting.what, meeting.budget, meeting.on_slice}, 0, own, true);
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

// False when the peer's buffer is full. That a peer is gone shows when this rank reads.
bool Peers::send_message(int peer, const Message& message, const std::vector<int>& fds) {
  iovec data{const_cast<Message*>(&message), sizeof(message)};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    const size_t bytes = fds.size() * sizeof(int);
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(rights), fds.data(), bytes);
  }
  const ssize_t sent = sendmsg(peers_[peer].socket.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
  return sent >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS);
}

// Reads one letter, if there is one.
bool Peers::read_letter(Peer& peer) {
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
  Letter& letter = peer.letters[{message.key, message.round}];
  letter.truncated = (header.msg_flags & MSG_CTRUNC) != 0;
  if (message.round == kRefusal) {
    letter.refused = true;
    letter.refusal = message.text;
    if (message.word[0] != 0) letter.other = CallSite{message.words, message.word[0], {}};
    return true;
  }
  const auto words = std::min(static_cast<size_t>(std::max(message.words, 0)), kMaxWords);
  received.words.assign(message.word, message.word + words);
  received.what = message.text;
  letter.parcel = std::move(received);
  return true;
}

void Peers::read_letters() {
  for (Peer& peer : peers_)
    while (peer.socket.valid() && !peer.closed && read_letter(peer)) {
    }
}

// What comes under this key from now on is of no use.
void Peers::end(const std::string& key) {
  for (Peer& peer : peers_)
    for (auto it = peer.letters.lower_bound({key, kRefusal});
         it != peer.letters.end() && it->first.first == key;)
      it = peer.letters.erase(it);
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

void Peers::throw_missing(int peer, const std::string& what, const std::string& why) {
  throw PeerError(what + ": rank " + text(peer) + " " + why,
                  "rank " + text(peer) + " " + why + " (noticed by rank " + text(rank_) + ")");
}

// Moves what has come to `all`; throws what a peer refused with. True when nothing is missing.
bool Peers::collect(const std::string& key, int round, const std::string& what,
                    std::vector<Received>& all, std::vector<bool>& have) {
  std::lock_guard<std::mutex> lock(mutex_);
  read_letters();
  for (int peer = 0; peer < world_size_; ++peer) {
    auto& letters = peers_[peer].letters;
    const auto refusal = letters.find({key, kRefusal});
    if (refusal != letters.end()) {
      const Letter& theirs = refusal->second;
      throw GaveUp(what + ": rank " + text(peer) + " failed: " + theirs.refusal, theirs.refusal,
                   theirs.other);
    }
    const auto letter = letters.find({key, round});
    if (letter == letters.end()) continue;
    if (letter->second.truncated)
      throw ResourceError(what + ": too few file descriptors for what rank " + text(peer) +
                          " sent; raise the limit (ulimit -n)");
    all[peer] = std::move(*letter->second.parcel);
    have[peer] = true;
    letters.erase(letter);
  }
  return std::all_of(have.begin(), have.end(), [](bool came) { return came; });
}

// Throws when one that has not come never will.
void Peers::check_missing(const std::string& key, const std::string& what,
                          const std::vector<bool>& have, bool expired, const WaitBudget& budget) {
  for (int peer = 0; peer < world_size_; ++peer) {
    if (have[peer]) continue;
    bool closed;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      read_letters();
      closed = peers_[peer].closed;
      // What came just before its end counts: the next look finds it.
      const auto& letters = peers_[peer].letters;
      const auto letter = letters.lower_bound({key, kRefusal});
      if (letter != letters.end() && letter->first.first == key) continue;
    }
    if (closed) {
      // The socket of a process closes a little before the process ends.
      const auto until = Clock::now() + kPatience;
      while (!dead(peer) && Clock::now() < until) std::this_thread::sleep_for(milliseconds(5));
    }
    if (dead(peer)) throw_missing(peer, what, "died");
    if (closed) throw_missing(peer, what, "has left the group");
  }
  if (!expired) return;
  std::string late;
  for (int peer = 0; peer < world_size_; ++peer)
    if (!have[peer]) late += (late.empty() ? "rank " : ", rank ") + text(peer);
  throw PeerError(what + ": " + late + " did not come within " + text(budget.limit.count()) +
                  " ms");
}

std::vector<Received> Peers::exchange(const Meeting& meeting, int round, const Parcel& parcel,
                                      bool last) {
  std::vector<Received> all(static_cast<size_t>(world_size_));
  std::vector<bool> have(static_cast<size_t>(world_size_), false);
  have[rank_] = true;
  Message message{};
  put(message.key, meeting.key);
  put(message.text, meeting.what);
  message.round = round;
  message.words = static_cast<int32_t>(parcel.words.size());
  std::copy(parcel.words.begin(), parcel.words.end(), message.word);
  const std::string what =
      meeting.what + ": rendezvous of group '" + group_ + "' on rank " + text(rank_);
  try {
    const Waiting waiting(meeting.budget);
    std::vector<bool> sent = have;
    while (true) {
      for (int peer = 0; peer < world_size_; ++peer)
        sent[peer] = sent[peer] || send_message(peer, message, parcel.fds);
      if (collect(meeting.key, round, what, all, have)) break;
      throw_if_interrupted();
      check_missing(meeting.key, what, have, waiting.expired(), meeting.budget);
      meeting.on_slice();
      std::vector<pollfd> sockets;
      for (const Peer& peer : peers_)
        if (peer.socket.valid() && !peer.closed) sockets.push_back({peer.socket.get(), POLLIN, 0});
      poll(sockets.data(), sockets.size(), static_cast<int>(kPoll.count()));
    }
    if (last) {
      std::lock_guard<std::mutex> lock(mutex_);
      end(meeting.key);
    }
  } catch (const std::exception& error) {
    refuse(meeting.key, cause_of(error, rank_), other_of(error));
    throw;
  }
  return all;
}

}  // namespace symm_cp
