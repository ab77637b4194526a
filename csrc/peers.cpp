#include "peers.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <fstream>
#include <utility>

#include "error.h"

namespace symm_cp {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr uint32_t kMagic = 0x53434d31;  // "SCM1": layout of Hello and of parcels
constexpr size_t kMaxWords = 32;
constexpr size_t kMaxDescriptors = 4;
constexpr milliseconds kRetry{5};

struct Hello {
  uint32_t magic;
  int32_t rank;
  int32_t world_size;
  char token[32];
};

std::string random_token() {
  std::array<unsigned char, 16> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw SystemError("cannot draw random bytes");
  static const char* hex = "0123456789abcdef";
  std::string text;
  for (unsigned char b : bytes) {
    text += hex[b >> 4];
    text += hex[b & 15];
  }
  return text;
}

// Two processes share memory only on one host; the boot id tells hosts apart where names do not.
std::string host_identity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

std::string key_of(int rank) { return "symm_cp/peer/" + std::to_string(rank); }

std::pair<sockaddr_un, socklen_t> address_of(const std::string& token) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = "symm_cp-" + token;  // after a NUL byte: the abstract namespace
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

Descriptor new_socket() {
  Descriptor fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.valid()) throw SystemError("cannot create a Unix socket");
  return fd;
}

Descriptor listen_on(const std::string& token, int backlog) {
  Descriptor fd = new_socket();
  const auto [address, length] = address_of(token);
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(fd.get(), backlog) != 0)
    throw SystemError("cannot listen on a Unix socket");
  return fd;
}

bool readable(int fd, milliseconds limit) {
  pollfd entry{fd, POLLIN, 0};
  return poll(&entry, 1, static_cast<int>(limit.count())) > 0;
}

ucred credentials_of(int socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    throw SystemError("cannot tell who is at the other end of a Unix socket");
  return credentials;
}

}  // namespace

Peers::Peers(Bootstrap& bootstrap, std::string group, int rank, int world_size,
             milliseconds timeout)
    : group_(std::move(group)),
      rank_(rank),
      world_size_(world_size),
      timeout_(timeout),
      peers_(static_cast<size_t>(world_size)) {
  if (world_size == 1) return;
  const std::string token = random_token();
  Descriptor listener = listen_on(token, world_size);
  bootstrap.set(key_of(rank), token + host_identity());
  const auto deadline = steady_clock::now() + timeout;
  // Lower ranks are called, higher ranks call: one socket for each pair.
  while (true) {
    int missing = -1;
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer == rank || peers_[peer].socket.valid()) continue;
      if (peer > rank || !connect_to(bootstrap, peer)) missing = peer;
    }
    if (missing < 0) return;
    if (steady_clock::now() >= deadline)
      throw PeerError("rendezvous of group '" + group_ + "': rank " + std::to_string(rank_) +
                      " found no rank " + std::to_string(missing) + " on this host within " +
                      std::to_string(timeout.count()) + " ms");
    while (readable(listener.get(), kRetry)) accept_from(listener.get(), token);
  }
}

bool Peers::connect_to(Bootstrap& bootstrap, int peer) {
  const auto value = bootstrap.get(key_of(peer));
  if (!value || value->size() < 32) return false;
  if (value->substr(32) != host_identity())
    throw PeerError("group '" + group_ + "' spans hosts: rank " + std::to_string(peer) +
                    " is not on the host of rank " + std::to_string(rank_));
  const std::string token = value->substr(0, 32);
  Descriptor fd = new_socket();
  const auto [address, length] = address_of(token);
  // Refused: the entry is that of an earlier group of the same name; look again later.
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) return false;
  Hello hello{kMagic, rank_, world_size_, {}};
  std::memcpy(hello.token, token.data(), sizeof(hello.token));
  if (send(fd.get(), &hello, sizeof(hello), MSG_NOSIGNAL) != sizeof(hello)) return false;
  adopt(peer, std::move(fd));
  return true;
}

void Peers::accept_from(int listener, const std::string& token) {
  Descriptor fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (!fd.valid()) return;
  Hello hello{};
  if (!readable(fd.get(), milliseconds(1000)) ||
      recv(fd.get(), &hello, sizeof(hello), 0) != sizeof(hello))
    return;
  const bool known = hello.magic == kMagic && hello.world_size == world_size_ &&
                     hello.rank > rank_ && hello.rank < world_size_ &&
                     std::memcmp(hello.token, token.data(), sizeof(hello.token)) == 0 &&
                     credentials_of(fd.get()).uid == getuid();
  if (known) adopt(hello.rank, std::move(fd));  // a stranger is ignored
}

void Peers::adopt(int peer, Descriptor socket) {
  const ucred credentials = credentials_of(socket.get());
  if (credentials.uid != getuid())
    throw PeerError("rendezvous of group '" + group_ + "': rank " + std::to_string(peer) +
                    " belongs to another user");
#ifdef SYS_pidfd_open
  peers_[peer].process = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, credentials.pid, 0)));
#endif
  peers_[peer].socket = std::move(socket);
}

bool Peers::dead(int rank) const {
  const Peer& peer = peers_[rank];
  const bool has_pidfd = peer.process.valid();
  pollfd entry{has_pidfd ? peer.process.get() : peer.socket.get(), POLLIN, 0};
  if (entry.fd < 0 || poll(&entry, 1, 0) <= 0) return false;
  // A pidfd is readable once its process ended; a socket may just hold a parcel.
  return has_pidfd || (entry.revents & (POLLHUP | POLLERR)) != 0;
}

void Peers::send_parcel(int peer, const Parcel& parcel) {
  iovec data{const_cast<int64_t*>(parcel.words.data()), parcel.words.size() * sizeof(int64_t)};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (!parcel.fds.empty()) {
    const size_t bytes = parcel.fds.size() * sizeof(int);
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(header), parcel.fds.data(), bytes);
  }
  if (sendmsg(peers_[peer].socket.get(), &message, MSG_NOSIGNAL) < 0)
    throw PeerError("rendezvous of group '" + group_ + "': rank " + std::to_string(peer) +
                    " is gone (" + std::strerror(errno) + ")");
}

Received Peers::receive_parcel(int peer, steady_clock::time_point deadline) {
  const std::string who = "rendezvous of group '" + group_ + "': rank " + std::to_string(peer);
  const int fd = peers_[peer].socket.get();
  while (!readable(fd, milliseconds(100))) {
    if (dead(peer)) throw PeerError(who + " died");
    if (steady_clock::now() >= deadline)
      throw PeerError(who + " did not come within " + std::to_string(timeout_.count()) + " ms");
  }
  Received received;
  received.words.resize(kMaxWords);
  iovec data{received.words.data(), kMaxWords * sizeof(int64_t)};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t bytes = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  if (bytes <= 0) throw PeerError(who + (dead(peer) ? " died" : " left or gave up"));
  received.words.resize(static_cast<size_t>(bytes) / sizeof(int64_t));
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    const int* fds = reinterpret_cast<const int*>(CMSG_DATA(header));
    for (size_t i = 0; i < count; ++i) received.fds.emplace_back(fds[i]);
  }
  return received;
}

std::vector<Received> Peers::exchange(const Parcel& parcel) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Received> all(static_cast<size_t>(world_size_));
  const auto deadline = steady_clock::now() + timeout_;
  try {
    for (int peer = 0; peer < world_size_; ++peer)
      if (peer != rank_) send_parcel(peer, parcel);
    for (int peer = 0; peer < world_size_; ++peer)
      if (peer != rank_) all[peer] = receive_parcel(peer, deadline);
  } catch (...) {
    // Parcels of this exchange may still arrive, and the next one would take them for its own. A
    // peer that comes late finds the socket shut, and makes a new mesh with the others.
    broken_ = true;
    for (const Peer& peer : peers_)
      if (peer.socket.valid()) shutdown(peer.socket.get(), SHUT_RDWR);
    throw;
  }
  return all;
}

}  // namespace symm_cp
