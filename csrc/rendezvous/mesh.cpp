// How the ranks of a group find each other: Peers::meet.
//
// Each rank listens on a socket, which its entry in the store names. The higher rank of each pair
// connects to the lower one, and both send their boards. A rank has met its peers once it has all
// boards and has sent its own to all. Then it closes its listener.
//
// A rank may abort its rendezvous at any moment: a peer refused the call, the time-out has passed,
// or Ctrl-C. It aborts the call, not the mesh: its listener, its connections and the messages
// received through them stay for its next call, which goes on from there. So no rank loses the
// connection to a live peer, whether or not that peer has met all others yet. (If it closed its
// sockets and came again with new sockets, peers that had met it could not distinguish that from
// its end.)
//
// A rank that refuses a rendezvous notes that in the store first, then sends it to all connected
// peers. A rank reads the store until the peer's board has come, and once more after the last
// board: so it finds refusals noted before the board was sent. Later refusals come through the
// connection.
//
// A connection that ends before the peer's board came, while the peer's process is still running,
// belonged to an earlier group of the same name, whose entry the peer has replaced or will replace:
// the rank looks for the peer anew.
#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "base/error.h"
#include "rendezvous/peers.h"

namespace symm_cp {

namespace {

using std::chrono::milliseconds;

const char* const kBoards = "boards";  // the key of the messages that carry them
constexpr milliseconds kPollInterval{5};

std::string text(int64_t value) { return std::to_string(value); }
std::string key_of(int rank) { return "symm_cp/peer/" + text(rank); }

}  // namespace

void Peers::meet(Bootstrap& bootstrap, const Rendezvous& rendezvous) {
  try {
    // For each peer a socket, a process and, for a moment, a board; and this rank's own
    // descriptors.
    require_descriptors(3 * world_size_ + 4, rendezvous.call_name);
    if (boards_[rank_].data() == nullptr)
      boards_[rank_] = Segment::create(sizeof(Board), "symm_cp-board");
    if (world_size_ == 1) return;
    if (!listener_) listener_.emplace(group_, rank_, world_size_);
    bootstrap.set(key_of(rank_), listener_->entry());
    make_mesh(bootstrap, rendezvous);
    for (int peer = 0; peer < world_size_; ++peer)
      if (peer != rank_) check_refusal(bootstrap, rendezvous, peer);
    listener_.reset();
  } catch (const std::exception& error) {
    const std::string cause = cause_of(error, rank_);
    try {
      refuse_before(bootstrap, rank_, rendezvous.key, cause);
    } catch (const std::exception&) {  // the store failed
    }
    refuse(rendezvous.key, cause, other_of(error));
    throw;
  }
}

void Peers::make_mesh(Bootstrap& bootstrap, const Rendezvous& rendezvous) {
  const Waiting waiting(rendezvous.budget);
  std::vector<StaleEntry> stale_entries(peers_.size());
  Clock::time_point next_look{};
  while (true) {
    pause_at_random();
    const bool thorough = Clock::now() >= next_look;
    if (thorough) next_look = Clock::now() + kSlice;
    for (auto& [peer, socket] : listener_->accept_ranks())
      add_connection(peer, std::move(socket), "");
    for (int peer = 0; peer < world_size_; ++peer) {
      if (peer == rank_) continue;
      if (peers_[peer].socket.valid())
        check_connection(bootstrap, rendezvous, peer, thorough);
      else if (peer < rank_ || thorough)
        find_peer(bootstrap, rendezvous, peer, thorough, stale_entries[peer]);
    }
    if (exchange_boards(rendezvous)) return;
    throw_if_interrupted();
    rendezvous.on_slice();
    if (waiting.expired()) throw_late(rendezvous);
    rendezvous.budget.say_if_long(group_, [&] {
      return rendezvous.call_name + ": rank " + text(rank_) + " waiting for rank " +
             text(missing_board()) + ", which did not come yet";
    });
    wait_for_peers();
  }
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
    // The entry may be of an earlier process; the present process will replace it.
    if (stale.entry != *entry) stale = {*entry, Clock::now()};
    if (Clock::now() - stale.since > kExitGrace) throw_missing(peer, rendezvous.call_name, "died");
    return;
  }
  if (peer < rank_) connect_to(*entry, peer);
}

void Peers::connect_to(const std::string& entry, int peer) {
  if (!Listener::same_host(entry))
    throw PeerError("group '" + group_ + "' spans hosts: rank " + text(peer) +
                    " is not on the host of rank " + text(rank_));
  Descriptor socket = Listener::connect(entry, rank_, world_size_);
  if (socket.valid()) add_connection(peer, std::move(socket), entry);
}

// Adds a connection; replaces the connection of an earlier group, if any.
void Peers::add_connection(int peer, Descriptor socket, std::string entry) {
  const ucred credentials = Listener::credentials(socket.get());
  if (credentials.uid != getuid())
    throw PeerError("rendezvous of group '" + group_ + "': rank " + text(peer) +
                    " belongs to another user");
  forget(peer);
  std::lock_guard<std::mutex> lock(mutex_);
#ifdef SYS_pidfd_open
  peers_[peer].process = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, credentials.pid, 0)));
#endif
  peers_[peer].socket = std::move(socket);
  peers_[peer].entry = std::move(entry);
}

void Peers::forget(int peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  peers_[peer] = Peer{};
  boards_[peer] = Segment();
}

// Throws when the peer of a connection is gone; forgets a connection to an earlier group.
void Peers::check_connection(Bootstrap& bootstrap, const Rendezvous& rendezvous, int peer,
                             bool thorough) {
  const Peer& connected = peers_[peer];
  if (boards_[peer].data() != nullptr) {
    // A peer that was sent this rank's board, too, may have met all, and have left since.
    if (!connected.has_board) throw_if_gone(peer, rendezvous.key, rendezvous.call_name);
    return;
  }
  bool replaced = connected.closed;
  if (thorough) {
    check_refusal(bootstrap, rendezvous, peer);
    const auto entry = bootstrap.get(key_of(peer));
    replaced = replaced || (peer < rank_ && entry && *entry != connected.entry);
  }
  if (replaced)
    forget(peer);
  else if (dead(peer))
    throw_if_gone(peer, kBoards, rendezvous.call_name);  // its last message may be its board
}

// Sends this rank's board to the connected peers that do not have it, and takes theirs. True when
// none is missing.
bool Peers::exchange_boards(const Rendezvous& rendezvous) {
  const Message message = Message::of(kBoards, 0, rendezvous.call_name);
  std::lock_guard<std::mutex> lock(mutex_);
  for (int peer = 0; peer < world_size_; ++peer)
    if (peers_[peer].socket.valid() && !peers_[peer].has_board)
      peers_[peer].has_board = send_message(peer, message, {boards_[rank_].fd()});
  read_messages();
  bool complete = true;
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    throw_if_refused(rendezvous.key, rendezvous.call_name, peer);
    take_board(peer);
    complete = complete && peers_[peer].has_board && boards_[peer].data() != nullptr;
  }
  return complete;
}

void Peers::take_board(int peer) {
  auto& incoming = peers_[peer].incoming;
  const auto letter = incoming.find({kBoards, 0});
  if (letter == incoming.end()) return;
  // The message stays in `incoming` if the board cannot be mapped now.
  const int received = letter->second.payload->fds.at(0).get();
  boards_[peer] =
      Segment::map(Descriptor(fcntl(received, F_DUPFD_CLOEXEC, 0)), boards_[rank_].size());
  incoming.erase(letter);
}

void Peers::wait_for_peers() {
  std::vector<pollfd> entries;
  listener_->add_to(entries);
  for (const Peer& peer : peers_)
    if (peer.socket.valid() && !peer.closed) entries.push_back({peer.socket.get(), POLLIN, 0});
  poll(entries.data(), entries.size(), static_cast<int>(kPollInterval.count()));
}

int Peers::missing_board() const {
  int missing = rank_;
  for (int peer = 0; peer < world_size_; ++peer)
    if (peer != rank_ && boards_[peer].data() == nullptr) missing = peer;
  return missing;
}

void Peers::throw_late(const Rendezvous& rendezvous) {
  const std::string limit = " within " + text(rendezvous.budget.limit.count()) + " ms";
  const int missing = missing_board();
  const bool found = peers_[missing].socket.valid();
  const std::string why =
      "rank " + text(missing) +
      (found ? " did not come" : " was not found on the host of rank " + text(rank_)) + limit;
  throw TimedOut(rendezvous.call_name + ": " + why, why + " (noticed by rank " + text(rank_) + ")");
}

}  // namespace symm_cp
