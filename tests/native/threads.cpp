// Peers' memory is mapped where its owner has it (`mmap` is wrapped by the linker): a sanitizer
// tells memory apart by address.
#include "threads.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "base/helper_pool.h"
#include "base/team.h"

extern "C" {
void* __real_mmap(void*, size_t, int, int, int, off_t);
int __real_munmap(void*, size_t);
}

namespace native_test {

using namespace symm_cp;

thread_local int mappings_left = -1;

namespace {

// --- one address for each segment ----------------------------------------------------------------

struct Placed {
  void* address;
  int users;
};
std::mutex places_mutex;
std::map<ino_t, Placed> places;

// --- what symmetric_memory.cpp knows -------------------------------------------------------------

struct Known {
  const char* begin;
  size_t bytes;
  std::shared_ptr<Mapping> mapping;
};
std::mutex known_mutex;
std::map<const Peers*, std::vector<Known>> known;

// What torch knows of a group, by a name that each rank has for itself.
struct GroupPeers {
  Notes* notes;
  int rank;
  int world_size;
  std::mutex mutex;
  std::shared_ptr<Peers> peers;
  std::shared_ptr<Peers> unmet;  // whose mesh was begun
};
std::mutex groups_mutex;
std::map<std::string, std::unique_ptr<GroupPeers>> groups;

GroupPeers& group_peers_of(const std::string& name) {
  std::lock_guard<std::mutex> lock(groups_mutex);
  return *groups.at(name);
}

std::atomic<int> names{0};

// A pool for each thread that asks.
class PoolOfThread : public Pool {
 public:
  explicit PoolOfThread(int threads) : threads_(threads) {}
  int threads() override { return threads_; }
  void run(int parts, void (*body)(void*, int), void* argument) override {
    thread_local HelperPool pool(threads_);
    pool.run(parts, body, argument);
  }

 private:
  int threads_;
};

}  // namespace

bool has_mappings() {
  std::lock_guard<std::mutex> lock(places_mutex);
  return !places.empty();
}

// --- a rank --------------------------------------------------------------------------------------

Rank::Rank(Notes& notes, int rank, int world_size, std::chrono::milliseconds timeout)
    : rank_(rank), world_size_(world_size), name_("threads " + std::to_string(++names)) {
  auto group_peers = std::make_unique<GroupPeers>();
  group_peers->notes = &notes;
  group_peers->rank = rank;
  group_peers->world_size = world_size;
  {
    std::lock_guard<std::mutex> lock(groups_mutex);
    groups[name_] = std::move(group_peers);
  }
  group = std::make_shared<Group>(name_, rank, world_size, timeout);
  shared = Segment::create(kSharedBytes, "shared");
  map(shared);
}

Rank::~Rank() {
  group.reset();
  {
    std::lock_guard<std::mutex> lock(known_mutex);
    known.erase(peers().get());
  }
  std::lock_guard<std::mutex> lock(groups_mutex);
  groups.erase(name_);
}

std::shared_ptr<Peers> Rank::peers() {
  WaitBudget budget(std::chrono::seconds(30));
  return peers_of(name_, {"tensor/0", "rendezvous", budget});
}

std::shared_ptr<Mapping> Rank::map(const Segment& segment) {
  WaitBudget budget(std::chrono::seconds(30));
  const auto mesh = peers();
  const int64_t sequence = sequence_++;
  auto mapping = std::make_shared<Mapping>(
      mesh, segment, segment.size(), 4096, sequence,
      Rendezvous{"tensor/" + std::to_string(sequence), "rendezvous", budget});
  std::lock_guard<std::mutex> lock(known_mutex);
  known[mesh.get()].push_back({segment.data(), segment.size(), mapping});
  return mapping;
}

void set_threads_of_ranks(int threads) {
  static PoolOfThread pool(threads);
  set_pool(&pool);
  set_threads(Threads::kAll);
  set_background_threads(threads);
}

void on_all_ranks(int world_size, std::chrono::milliseconds timeout,
                  const std::function<void(Rank&)>& body) {
  Notes notes;
  std::vector<std::thread> threads;
  for (int r = 0; r < world_size; ++r)
    threads.emplace_back([&, r] {
      Rank rank(notes, r, world_size, timeout);
      body(rank);
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace native_test

using namespace native_test;

extern "C" void* __wrap_mmap(void* at, size_t size, int prot, int flags, int fd, off_t offset) {
  struct stat about{};
  if (fd < 0 || fstat(fd, &about) != 0) return __real_mmap(at, size, prot, flags, fd, offset);
  if (mappings_left == 0) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  if (mappings_left > 0) --mappings_left;
  std::lock_guard<std::mutex> lock(places_mutex);
  const auto it = places.find(about.st_ino);
  if (it != places.end()) {
    ++it->second.users;
    return it->second.address;
  }
  void* address = __real_mmap(at, size, prot, flags, fd, offset);
  if (address != MAP_FAILED) places[about.st_ino] = {address, 1};
  return address;
}

extern "C" int __wrap_munmap(void* address, size_t size) {
  std::lock_guard<std::mutex> lock(places_mutex);
  for (auto it = places.begin(); it != places.end(); ++it) {
    if (it->second.address != address) continue;
    if (--it->second.users > 0) return 0;
    places.erase(it);
    break;
  }
  return __real_munmap(address, size);
}

namespace symm_cp {

std::shared_ptr<Mapping> find_mapping(const void* address, const Peers& peers) {
  std::lock_guard<std::mutex> lock(known_mutex);
  const char* at = static_cast<const char*>(address);
  for (const Known& one : known[&peers])
    if (at >= one.begin && at < one.begin + one.bytes) return one.mapping;
  return nullptr;
}

std::shared_ptr<Mapping> find_mapping(const Peers& peers, int64_t sequence) {
  std::lock_guard<std::mutex> lock(known_mutex);
  for (const Known& one : known[&peers])
    if (one.mapping->sequence() == sequence) return one.mapping;
  return nullptr;
}

std::shared_ptr<Mapping> find_mapping(const void* address, const std::string& group) {
  const auto peers = group_peers_of(group).peers;
  return peers == nullptr ? nullptr : find_mapping(address, *peers);
}

std::shared_ptr<Peers> peers_of(const std::string& group, const Rendezvous& rendezvous) {
  GroupPeers& group_peers = group_peers_of(group);
  std::lock_guard<std::mutex> lock(group_peers.mutex);
  if (group_peers.peers != nullptr) return group_peers.peers;
  if (group_peers.unmet == nullptr)
    group_peers.unmet = std::make_shared<Peers>(group, group_peers.rank, group_peers.world_size,
                                                std::chrono::seconds(30));
  group_peers.unmet->meet(*group_peers.notes, rendezvous);
  return group_peers.peers = group_peers.unmet;
}

void refuse_peers(const std::string& group, const std::string& key, const std::string& reason,
                  const CallSite* other) {
  GroupPeers& group_peers = group_peers_of(group);
  Peers::refuse_before(*group_peers.notes, group_peers.rank, key, reason);
  if (group_peers.unmet != nullptr) group_peers.unmet->refuse(key, reason, other);
}

void check_refused_peers(const std::string& group, const Rendezvous& rendezvous, int peer) {
  Peers::check_refusal(*group_peers_of(group).notes, rendezvous, peer);
}

std::chrono::milliseconds timeout_of(const std::string&) { return std::chrono::seconds(30); }

}  // namespace symm_cp
