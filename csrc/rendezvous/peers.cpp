#include "rendezvous/peers.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <thread>
#include <utility>

#include "base/error.h"

namespace symm_cp {

namespace {

using std::chrono::milliseconds;

constexpr size_t kMaxDescriptors = 2;
constexpr size_t kMaxEnded = 1024;
constexpr int kRefusal = -1;  // the round of a refusal
constexpr milliseconds kPollInterval{10};

std::string text(int64_t value) { return std::to_string(value); }

// A rendezvous has the key "CHANNEL/NUMBER".
std::string channel_of(const std::string& key) { return key.substr(0, key.find('/')); }
int64_t number_of(const std::string& key) { return std::atoll(key.c_str() + key.find('/') + 1); }

// Where a rank notes the last rendezvous of a channel that it refused: "KEY\nREASON", the latest
// first. A peer may still be in an earlier rendezvous, and needs that refusal's reason.
std::string refusals_of(int rank, const std::string& key) {
  return "symm_cp/refused/" + text(rank) + "/" + channel_of(key);
}
constexpr size_t kMaxNotes = 8;
constexpr char kNextNote = '\x1e';  // ASCII's record separator

std::vector<std::string> notes_in(const std::string& refusals) {
  std::vector<std::string> notes;
  std::istringstream stream(refusals);
  for (std::string note; std::getline(stream, note, kNextNote);) notes.push_back(note);
  return notes;
}

template <size_t N>
void put(char (&to)[N], const std::string& from) {
  const size_t length = std::min(from.size(), N - 1);
  std::memcpy(to, from.data(), length);
  to[length] = 0;
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

Peers::Message Peers::Message::of(const std::string& key, int32_t round, const std::string& text) {
  Message message{};
  put(message.key, key);
  put(message.text, text);
  message.round = round;
  return message;
}

Peers::Peers(std::string group, int rank, int world_size, milliseconds timeout)
    : group_(std::move(group)),
      rank_(rank),
      world_size_(world_size),
      timeout_(timeout),
      forks_(fork_count()),
      peers_(static_cast<size_t>(world_size)),
      boards_(static_cast<size_t>(world_size)) {}

void Peers::check_refusal(Bootstrap& bootstrap, const Rendezvous& rendezvous, int peer) {
  const auto refusals = bootstrap.get(refusals_of(peer, rendezvous.key));
  if (!refusals) return;
  std::optional<std::string> cause;  // of the earliest refusal that is not of an earlier call
  for (const std::string& note : notes_in(*refusals)) {
    const size_t line = note.find('\n');
    if (number_of(note.substr(0, line)) < number_of(rendezvous.key)) break;
    cause = note.substr(line + 1);
  }
  if (!cause) return;
  throw PeerError(rendezvous.call_name + ": rank " + text(peer) + " failed: " + *cause, *cause);
}

void Peers::refuse_before(Bootstrap& bootstrap, int rank, const std::string& key,
                          const std::string& reason) {
  const std::string entry = refusals_of(rank, key);
  std::string refusals = key + "\n" + reason;
  std::replace(refusals.begin(), refusals.end(), kNextNote, ' ');
  const auto earlier = notes_in(bootstrap.get(entry).value_or(""));
  for (size_t i = 0; i < earlier.size() && i + 1 < kMaxNotes; ++i)
    refusals += kNextNote + earlier[i];
  bootstrap.set(entry, refusals);
}

void Peers::check_owned(const std::string& context) const {
  if (!owned())
    throw PeerError(context + ": this process was forked from rank " + text(rank_) + " of group '" +
                    group_ + "' and is no rank of it: call it in the parent process only");
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
  return sent >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS &&
                       errno != ETOOMANYREFS);  // descriptors of this user that nobody has read
}

// Reads one message; false when there is none. Throws when there are too few descriptors for it,
// and leaves it for later.
bool Peers::read_message(Peer& peer) {
  Message message{};
  iovec data{&message, sizeof(message)};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  const ssize_t bytes =
      recvmsg(peer.socket.get(), &header, MSG_PEEK | MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
  if (bytes != sizeof(message)) {
    peer.closed = true;
    return false;
  }
  Received received;
  for (cmsghdr* rights = CMSG_FIRSTHDR(&header); rights != nullptr;
       rights = CMSG_NXTHDR(&header, rights)) {
    if (rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    const int* fds = reinterpret_cast<const int*>(CMSG_DATA(rights));
    for (size_t i = 0; i < count; ++i) received.fds.emplace_back(fds[i]);
  }
  if ((header.msg_flags & MSG_CTRUNC) != 0)
    throw ResourceError(std::string(message.text) +
                        ": too few file descriptors; raise the limit (ulimit -n)");
  recv(peer.socket.get(), &message, sizeof(message), MSG_DONTWAIT);
  message.key[sizeof(message.key) - 1] = message.text[sizeof(message.text) - 1] = 0;
  if (std::find(ended_.begin(), ended_.end(), message.key) != ended_.end()) return true;
  Incoming& letter = peer.incoming[{message.key, message.round}];
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
  Message message = Message::of(key, kRefusal, reason);
  if (other != nullptr) {
    message.words = other->channel;
    message.word[0] = other->number;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (int peer = 0; peer < world_size_; ++peer)
    if (peers_[peer].socket.valid()) send_message(peer, message, {});
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
    all[peer] = std::move(*letter->second.payload);
    have[peer] = true;
    incoming.erase(letter);
  }
  return std::all_of(have.begin(), have.end(), [](bool accepted) { return accepted; });
}

// Throws when a peer has died or left. Does not throw if a message from it under this key is left
// for the next `collect`.
void Peers::throw_if_gone(int peer, const std::string& key, const std::string& context) {
  bool closed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    read_messages();
    closed = peers_[peer].closed;
    const auto& incoming = peers_[peer].incoming;
    const auto letter = incoming.lower_bound({key, kRefusal});
    if (letter != incoming.end() && letter->first.first == key) return;
  }
  if (closed) {
    const auto until = Clock::now() + kExitGrace;
    while (!dead(peer) && Clock::now() < until) std::this_thread::sleep_for(milliseconds(5));
  }
  if (dead(peer)) throw_missing(peer, context, "died");
  if (closed) throw_missing(peer, context, "has left the group");
}

// Throws when a missing peer will never come, or the time-out has passed.
void Peers::check_missing(const std::string& key, const std::string& context,
                          const std::vector<bool>& have, bool expired, WaitBudget& budget) {
  for (int peer = 0; peer < world_size_; ++peer)
    if (!have[peer]) throw_if_gone(peer, key, context);
  std::string late;
  for (int peer = 0; peer < world_size_; ++peer)
    if (!have[peer]) late += (late.empty() ? "rank " : ", rank ") + text(peer);
  budget.say_if_long(group_, [&] { return context + ": " + late + " did not come yet"; });
  if (!expired) return;
  throw TimedOut(context + ": " + late + " did not come within the timeout of " +
                 text(budget.limit.count()) + " ms");
}

std::vector<Received> Peers::exchange(const Rendezvous& rendezvous, int round,
                                      const Payload& payload, bool last) {
  std::vector<Received> all(static_cast<size_t>(world_size_));
  std::vector<bool> have(static_cast<size_t>(world_size_), false);
  have[rank_] = true;
  Message message = Message::of(rendezvous.key, round, rendezvous.call_name);
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
