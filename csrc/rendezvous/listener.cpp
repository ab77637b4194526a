#include "rendezvous/listener.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <fstream>

#include "base/error.h"

namespace symm_cp {

namespace {

constexpr uint32_t kMagic = 0x53434d32;  // "SCM2": layout of Handshake and of messages
constexpr size_t kTokenBytes = 32;
constexpr int kBacklog = 512;
constexpr size_t kMaxPending = 256;  // connections of this user: a new one replaces the oldest

struct Handshake {
  uint32_t magic;
  int32_t rank;
  int32_t world_size;
  char token[kTokenBytes];
};

std::string random_token() {
  std::array<unsigned char, kTokenBytes / 2> bytes{};
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

// The pid namespace: process numbers are comparable only within one.
std::string process_space() {
  std::array<char, 64> name{};
  const ssize_t length = readlink("/proc/self/ns/pid", name.data(), name.size() - 1);
  return length > 0 ? std::string(name.data(), static_cast<size_t>(length)) : "?";
}

// An entry has four lines: token, process number, pid namespace, host.
std::string line_of(const std::string& entry, int number) {
  size_t begin = 0;
  for (int i = 0; i < number && begin != std::string::npos; ++i) {
    begin = entry.find('\n', begin);
    if (begin != std::string::npos) ++begin;
  }
  return begin == std::string::npos ? "" : entry.substr(begin, entry.find('\n', begin) - begin);
}

std::pair<sockaddr_un, socklen_t> address_of(const std::string& token) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = "symm_cp-" + token;  // after a NUL byte: the abstract namespace
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

Descriptor new_socket() {
  Descriptor fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) throw SystemError("cannot create a Unix socket");
  return fd;
}

}  // namespace

Listener::Listener(std::string group, int rank, int world_size)
    : group_(std::move(group)),
      rank_(rank),
      world_size_(world_size),
      token_(random_token()),
      listener_(new_socket()) {
  const auto [address, length] = address_of(token_);
  if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(listener_.get(), kBacklog) != 0)
    throw SystemError("cannot listen on a Unix socket");
  entry_ =
      token_ + "\n" + std::to_string(getpid()) + "\n" + process_space() + "\n" + host_identity();
}

ucred Listener::credentials(int socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    throw SystemError("cannot read the credentials of a Unix socket's peer");
  return credentials;
}

std::vector<std::pair<int, Descriptor>> Listener::accept_ranks() {
  while (true) {
    Descriptor fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) break;
      if (errno == EINTR || errno == ECONNABORTED) continue;
      throw SystemError("rendezvous of group '" + group_ + "': cannot accept a rank");
    }
    if (credentials(fd.get()).uid != getuid()) continue;  // another user: closed
    if (pending_.size() >= kMaxPending) pending_.erase(pending_.begin());
    pending_.push_back(std::move(fd));
  }
  std::vector<std::pair<int, Descriptor>> accepted;
  for (auto it = pending_.begin(); it != pending_.end();) {
    Handshake handshake{};
    const ssize_t bytes = recv(it->get(), &handshake, sizeof(handshake), MSG_DONTWAIT);
    if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      ++it;
      continue;
    }
    const bool known = bytes == sizeof(handshake) && handshake.magic == kMagic &&
                       handshake.world_size == world_size_ && handshake.rank > rank_ &&
                       handshake.rank < world_size_ &&
                       std::memcmp(handshake.token, token_.data(), kTokenBytes) == 0;
    if (known) accepted.emplace_back(handshake.rank, std::move(*it));
    it = pending_.erase(it);
  }
  return accepted;
}

void Listener::add_to(std::vector<pollfd>& entries) const {
  entries.push_back({listener_.get(), POLLIN, 0});
  for (const Descriptor& fd : pending_) entries.push_back({fd.get(), POLLIN, 0});
}

void Listener::wait(std::chrono::milliseconds limit) const {
  std::vector<pollfd> entries;
  add_to(entries);
  poll(entries.data(), entries.size(), static_cast<int>(limit.count()));
}

Descriptor Listener::connect(const std::string& entry, int rank, int world_size) {
  const std::string token = line_of(entry, 0);
  if (token.size() != kTokenBytes) return {};
  Descriptor fd = new_socket();
  const auto [address, length] = address_of(token);
  // Refused: the entry is of an earlier group with the same name; the caller tries again.
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) return {};
  Handshake handshake{kMagic, rank, world_size, {}};
  std::memcpy(handshake.token, token.data(), kTokenBytes);
  if (send(fd.get(), &handshake, sizeof(handshake), MSG_NOSIGNAL) != sizeof(handshake)) return {};
  return fd;
}

bool Listener::same_host(const std::string& entry) { return line_of(entry, 3) == host_identity(); }

bool Listener::process_ended(const std::string& entry) {
  if (line_of(entry, 2) != process_space() || !same_host(entry)) return false;
#ifdef SYS_pidfd_open
  const int pid = std::atoi(line_of(entry, 1).c_str());
  if (pid <= 0) return false;
  const Descriptor process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!process.valid()) return errno == ESRCH;
  pollfd ended{process.get(), POLLIN, 0};
  return poll(&ended, 1, 0) > 0;
#else
  return false;
#endif
}

}  // namespace symm_cp
