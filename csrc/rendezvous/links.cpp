#include "rendezvous/links.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace symm_cp {

namespace {

using std::chrono::milliseconds;

constexpr size_t kBellBytes = 4096;
constexpr uint32_t kGreeting = 0x53434d4d;  // "SCMM"
constexpr size_t kMaxDescriptors = 3;       // ring, page, event
constexpr milliseconds kGrace{500};        // between the end of a socket and the end of its process
constexpr milliseconds kLongestPause{50};  // between two looks into the store for a peer
constexpr milliseconds kWatchPause{250};   // and for ranks that only need to be watched
constexpr milliseconds kClosing{5};        // between two looks at a process that ends
constexpr int kStoreAttempts = 3;

std::string key_of(int rank) { return "symm_cp/messages/" + std::to_string(rank); }

// The number, in this process's namespace, of the process that has connected a socket.
pid_t process_behind(int socket) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 ? peer.pid : 0;
}

bool polls(int fd, short events) {
  pollfd entry{fd, events, 0};
  return fd >= 0 && poll(&entry, 1, 0) > 0 && (entry.revents & events) != 0;
}

bool send_descriptors(int socket, const std::vector<int>& fds) {
  uint32_t greeting = kGreeting;
  iovec data{&greeting, sizeof(greeting)};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  attach_descriptors(header, control, fds);
  return sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof(greeting);
}

// Returns the received descriptors; nullopt if none have come. Throws unless there are exactly
// `count`.
std::optional<std::vector<Descriptor>> receive_descriptors(int socket, size_t count) {
  uint32_t greeting = 0;
  iovec data{&greeting, sizeof(greeting)};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  const ssize_t bytes = recvmsg(socket, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (bytes <= 0) return std::nullopt;  // nothing yet, or closed, which poll reports
  std::vector<Descriptor> found;
  for (cmsghdr* rights = CMSG_FIRSTHDR(&header); rights != nullptr;
       rights = CMSG_NXTHDR(&header, rights)) {
    if (rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) continue;
    const int* fds = reinterpret_cast<const int*>(CMSG_DATA(rights));
    const size_t fetched = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < fetched; ++i) found.emplace_back(fds[i]);
  }
  if ((header.msg_flags & MSG_CTRUNC) != 0)
    throw ResourceError(
        "too few file descriptors for a rank's messages; raise the limit (ulimit "
        "-n)");
  if (greeting != kGreeting || found.size() != count)
    throw PeerError("a rank's messages are of another version");
  return found;
}

void open_process(Descriptor& process, int socket) {
  if (process.valid()) return;
#ifdef SYS_pidfd_open
  const ucred credentials = Listener::credentials(socket);
  process = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, credentials.pid, 0)));
#endif
}

}  // namespace

// --- Bell ----------------------------------------------------------------------------------------

Bell Bell::create() {
  Descriptor event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event.valid()) throw SystemError("cannot create an event");
  return {Segment::create(kBellBytes, "symm_cp-bell"), std::move(event)};
}

void Bell::ring() const {
  pause_at_random();
  Doorbell& bell = doorbell();
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0) {
    bell.rings.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(&bell.rings);
  } else if (bell.engine.load(std::memory_order_seq_cst) != 0 && bell.engine.exchange(0) != 0) {
    kick();
  }
}

void Bell::kick() const {
  const uint64_t one = 1;
  while (write(event_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void Bell::quiet() const {
  uint64_t count = 0;
  while (read(event_.get(), &count, sizeof(count)) < 0 && errno == EINTR) {
  }
}

// --- Connector -----------------------------------------------------------------------------------

Connector::Connector(std::shared_ptr<Bootstrap> bootstrap, std::string group, int rank,
                     int world_size, const Bell& bell)
    : bootstrap_(std::move(bootstrap)),
      rank_(rank),
      world_size_(world_size),
      bell_(bell),
      listener_(std::move(group), -1, world_size),  // -1: any rank may connect
      contacts_(static_cast<size_t>(world_size)) {
  bootstrap_->set(key_of(rank_), listener_.entry());
}

void Connector::connect(Contact& contact, const std::string& entry, int ring) {
  Descriptor socket = Listener::connect(entry, rank_, world_size_);
  if (!socket.valid()) return;
  if (Listener::credentials(socket.get()).uid != getuid()) {
    contact.loss = "belongs to another user";
    return;
  }
  if (!send_descriptors(socket.get(), {ring, bell_.page_fd(), bell_.event_fd()})) return;
  open_process(contact.process, socket.get());
  contact.out = std::move(socket);
}

// Looks for a peer in the store; connects to it when there is a ring for it.
void Connector::look_for(int peer, std::optional<int> ring) {
  Contact& contact = contacts_[peer];
  std::optional<std::string> entry;
  try {
    entry = bootstrap_->get(key_of(peer));
    if (!entry && bootstrap_->lost(peer)) contact.loss = "died or left before its first message";
    contact.store_failures = 0;
  } catch (const std::exception& error) {
    if (ring && ++contact.store_failures >= kStoreAttempts)
      contact.loss = std::string("cannot be found: ") + error.what();
  }
  if (!entry) return;
  if (!Listener::same_host(*entry)) {
    contact.loss = "is not on the host of rank " + std::to_string(rank_);
  } else if (Listener::process_ended(*entry)) {
    // The entry may be of an earlier process; the present process will replace it.
    if (contact.entry != *entry || !contact.ended) contact.ended = Clock::now();
    if (Clock::now() - *contact.ended > kGrace) contact.loss = "died";
  } else if (ring) {
    connect(contact, *entry, *ring);
  }
  contact.entry = std::move(*entry);
}

void Connector::accept_all() {
  for (auto& [peer, socket] : listener_.accept_ranks()) {
    Contact& contact = contacts_[peer];
    if (peer == rank_ || contact.in.valid()) continue;
    open_process(contact.process, socket.get());
    contact.in = std::move(socket);
    contact.stirred = true;
  }
}

void Connector::add_event(LinkEvent::What what, int peer, Segment ring, Descriptor page,
                          Descriptor event, std::vector<LinkEvent>& events) {
  auto& bell = contacts_[peer].bell;
  if (bell == nullptr)
    bell =
        std::make_shared<const Bell>(Segment::map(std::move(page), kBellBytes), std::move(event));
  events.push_back({what, peer, std::move(ring), bell});
}

// Reads the message that a peer sends when it connects, or when it answers this rank's connection.
void Connector::greet(int peer, std::vector<LinkEvent>& events) {
  Contact& contact = contacts_[peer];
  if (contact.in.valid() && !contact.incoming) {
    if (auto fds = receive_descriptors(contact.in.get(), 3)) {
      contact.incoming = true;
      send_descriptors(contact.in.get(), {bell_.page_fd(), bell_.event_fd()});
      add_event(LinkEvent::kIncoming, peer, Segment::map(std::move((*fds)[0]), Ring::kSegmentBytes),
                std::move((*fds)[1]), std::move((*fds)[2]), events);
      events.back().process = process_behind(contact.in.get());
    }
  }
  if (contact.out.valid() && !contact.connected) {
    if (auto fds = receive_descriptors(contact.out.get(), 2)) {
      contact.connected = true;
      add_event(LinkEvent::kConnected, peer, {}, std::move((*fds)[0]), std::move((*fds)[1]),
                events);
    }
  }
}

// Called after `greet`: messages that a peer sent before it ended must still be received.
void Connector::check_gone(int peer, std::vector<LinkEvent>& events) {
  Contact& contact = contacts_[peer];
  const bool in_order = contact.bell != nullptr && contact.bell->doorbell().closed.load() == 1;
  std::string reason = contact.loss;
  const bool closed = polls(contact.in.get(), POLLHUP) || polls(contact.out.get(), POLLHUP);
  if (closed && !contact.hung_up) contact.hung_up = Clock::now();
  if (polls(contact.process.get(), POLLIN))
    reason = "died";
  else if (contact.hung_up && (in_order || Clock::now() - *contact.hung_up > kGrace))
    reason = "has left the group";
  if (reason.empty()) return;
  contact.gone = true;
  events.push_back({LinkEvent::kGone, peer, {}, contact.bell, reason, in_order});
}

std::vector<LinkEvent> Connector::step(const std::vector<Wanted>& wanted, bool all) {
  accept_all();
  if (wanted.size() > wanted_before_) next_look_ = {}, pause_ = milliseconds(1);
  wanted_before_ = wanted.size();
  const auto missing = [&](int peer) {
    const Contact& contact = contacts_[peer];
    return peer != rank_ && !contact.out.valid() && !contact.gone;
  };
  std::vector<std::optional<int>> rings(contacts_.size());
  looking_ = false;
  for (const Wanted& each : wanted) {
    rings[each.peer] = each.ring;
    looking_ = looking_ || missing(each.peer);
  }
  const bool look = Clock::now() >= next_look_;
  for (int peer = 0; look && peer < world_size_; ++peer)
    if (missing(peer) && (rings[peer] || (all && !contacts_[peer].in.valid())))
      look_for(peer, rings[peer]);
  if (look) {
    pause_ = looking_ ? std::min(2 * pause_, kLongestPause) : kWatchPause;
    next_look_ = Clock::now() + pause_;
  }
  looking_ = looking_ || all;
  std::vector<LinkEvent> events;
  for (int peer = 0; peer < world_size_; ++peer) {
    Contact& contact = contacts_[peer];
    const bool concerned = contact.stirred || contact.hung_up || !contact.loss.empty();
    contact.stirred = false;
    if (contact.gone || !concerned) continue;
    greet(peer, events);
    check_gone(peer, events);
  }
  return events;
}

void Connector::wait() {
  std::vector<pollfd> entries{{bell_.event_fd(), POLLIN, 0}};
  std::vector<Contact*> owners{nullptr};
  listener_.add_to(entries);
  owners.resize(entries.size());
  milliseconds limit{-1};
  if (looking_) {
    const auto left = std::chrono::ceil<milliseconds>(next_look_ - Clock::now());
    limit = std::max(left, milliseconds(0));
  }
  for (Contact& contact : contacts_) {
    if (contact.gone) continue;
    const bool closing = contact.hung_up.has_value();
    if (closing) limit = limit < milliseconds(0) ? kClosing : std::min(limit, kClosing);
    const auto add = [&](const Descriptor& fd, bool reads) {
      if (!fd.valid()) return;
      entries.push_back({fd.get(), static_cast<short>(reads ? POLLIN : 0), 0});
      owners.push_back(&contact);
    };
    if (!closing) {
      add(contact.in, !contact.incoming);
      add(contact.out, !contact.connected);
    }
    add(contact.process, true);
  }
  poll(entries.data(), entries.size(), static_cast<int>(limit.count()));
  for (size_t i = 0; i < entries.size(); ++i)
    if (owners[i] != nullptr && entries[i].revents != 0) owners[i]->stirred = true;
  bell_.quiet();
}

}  // namespace symm_cp
