#include "door.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <fstream>

#include "error.h"

namespace symm_cp {

namespace {

constexpr uint32_t kMagic = 0x53434d32;  // "SCM2": layout of Hello and of messages
constexpr size_t kTokenBytes = 32;
constexpr int kBacklog = 512;
constexpr size_t kMaxSilent = 256;  // of this user: the oldest is dropped for a new one

struct Hello {
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

// In which namespace the numbers of processes mean something.
std::string process_space() {
  std::array<char, 64> name{};
  const ssize_t length = readlink("/proc/self/ns/pid", name.data(), name.size() - 1);
  return length > 0 ? std::string(name.data(), static_cast<size_t>(length)) : "?";
}

// An entry is: token, number of the process, its namespace, host; a line each.
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

Door::Door(std::string group, int rank, int world_size)
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

ucred Door::credentials(int socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    throw SystemError("cannot tell who is at the other end of a Unix socket");
  return credentials;
}

std::vector<std::pair<int, Descriptor>> Door::arrivals() {
  while (true) {
    Descriptor fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) break;
      if (errno == EINTR || errno == ECONNABORTED) continue;
      throw SystemError("rendezvous of group '" + group_ + "': cannot accept a rank");
    }
    if (credentials(fd.get()).uid != getuid()) continue;  // closed: a stranger
    if (silent_.size() >= kMaxSilent) silent_.erase(silent_.begin());
    silent_.push_back(std::move(fd));
  }
  std::vector<std::pair<int, Descriptor>> came;
  for (auto it = silent_.begin(); it != silent_.end();) {
    Hello hello{};
    const ssize_t bytes = recv(it->get(), &hello, sizeof(hello), MSG_DONTWAIT);
    if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      ++it;
      continue;
    }
    const bool known = bytes == sizeof(hello) && hello.magic == kMagic &&
                       hello.world_size == world_size_ && hello.rank > rank_ &&
                       hello.rank < world_size_ &&
                       std::memcmp(hello.token, token_.data(), kTokenBytes) == 0;
    if (known) came.emplace_back(hello.rank, std::move(*it));
    it = silent_.erase(it);
  }
  return came;
}

void Door::wait(std::chrono::milliseconds limit) const {
  std::vector<pollfd> entries{{listener_.get(), POLLIN, 0}};
  for (const Descriptor& fd : silent_) entries.push_back({fd.get(), POLLIN, 0});
  poll(entries.data(), entries.size(), static_cast<int>(limit.count()));
}

Descriptor Door::knock(const std::string& entry, int rank, int world_size) {
  const std::string token = line_of(entry, 0);
  if (token.size() != kTokenBytes) return {};
  Descriptor fd = new_socket();
  const auto [address, length] = address_of(token);
  // Refused: the entry is that of an earlier group of the same name; look again later.
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) return {};
  Hello hello{kMagic, rank, world_size, {}};
  std::memcpy(hello.token, token.data(), kTokenBytes);
  if (send(fd.get(), &hello, sizeof(hello), MSG_NOSIGNAL) != sizeof(hello)) return {};
  return fd;
}

bool Door::same_host(const std::string& entry) { return line_of(entry, 3) == host_identity(); }

bool Door::gone(const std::string& entry) {
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
