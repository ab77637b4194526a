// Ranks as threads of one process, so that sanitizers see all that ranks do to each other's memory.
//
// Peers' memory is mapped where its owner has it (`mmap` is wrapped by the linker): a sanitizer
// tells memory apart by address. It stands in for symmetric_memory.cpp, which needs torch.
//
//   ranks calls FILE [FLAG]   carries out what plans.py wrote, without the waits for that flag
//   ranks faults              ranks that give up, with work in flight, and strangers
//   ranks messages SEED       see send_receive.cpp
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <thread>

#include "../../csrc/error.h"
#include "../../csrc/group.h"
#include "../../csrc/plan.h"
#include "../../csrc/segment.h"
#include "helpers.h"

extern "C" {
void* __real_mmap(void*, size_t, int, int, int, off_t);
int __real_munmap(void*, size_t);
}

namespace {

using namespace symm_cp;
using namespace native_test;

// --- one address for each segment ----------------------------------------------------------------

struct Placed {
  void* address;
  int users;
};
std::mutex places_mutex;
std::map<ino_t, Placed> places;
// So many more mappings of a thread succeed; -1: all do.
thread_local int mappings_left = -1;

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
};
std::mutex parties_mutex;
std::map<std::string, std::unique_ptr<GroupPeers>> groups;

GroupPeers& group_peers_of(const std::string& name) {
  std::lock_guard<std::mutex> lock(parties_mutex);
  return *groups.at(name);
}

// --- a rank --------------------------------------------------------------------------------------

constexpr size_t kSlotBytes = 1 << 16;
constexpr size_t kSharedBytes = 1 << 16;
std::atomic<int> names{0};

class Rank {
 public:
  Rank(Notes& notes, int rank, int world_size, std::chrono::milliseconds timeout)
      : rank_(rank), world_size_(world_size), name_("threads " + std::to_string(++names)) {
    auto group_peers = std::make_unique<GroupPeers>();
    group_peers->notes = &notes;
    group_peers->rank = rank;
    group_peers->world_size = world_size;
    {
      std::lock_guard<std::mutex> lock(parties_mutex);
      groups[name_] = std::move(group_peers);
    }
    group = std::make_shared<Group>(name_, rank, world_size, timeout);
    shared = Segment::create(kSharedBytes, "shared");
    map(shared);
  }

  ~Rank() {
    group.reset();
    {
      std::lock_guard<std::mutex> lock(known_mutex);
      known.erase(peers().get());
    }
    std::lock_guard<std::mutex> lock(parties_mutex);
    groups.erase(name_);
  }

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  Segment shared;
  std::shared_ptr<Group> group;

  std::shared_ptr<Peers> peers() {
    WaitBudget budget(std::chrono::seconds(30));
    return peers_of(name_, {"tensor/0", "rendezvous", budget});
  }

  std::shared_ptr<Mapping> map(const Segment& segment) {
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

 private:
  int rank_;
  int world_size_;
  std::string name_;
  int64_t sequence_ = 0;
};

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

// --- calls ---------------------------------------------------------------------------------------

enum Role : int64_t { kInput = 0, kSymmetric, kScratch, kGathered, kSum };

struct Operand {
  Role role;
  int64_t bytes;
};

struct Part {  // of a rank
  std::vector<Command> commands;
  std::vector<Reference> references;
  std::vector<Operand> operands;
};

struct Pattern {
  int64_t background;
  char name[40];
  std::vector<Part> parts;
};

template <class T>
void read(std::istream& file, T* to, size_t count = 1) {
  file.read(reinterpret_cast<char*>(to), static_cast<std::streamsize>(count * sizeof(T)));
  expect(file.good(), "the file is too short");
}

std::vector<Pattern> read_calls(const char* path, int64_t* world_size) {
  std::ifstream file(path, std::ios::binary);
  int64_t count = 0;
  read(file, world_size);
  read(file, &count);
  std::vector<Pattern> calls(static_cast<size_t>(count));
  for (Pattern& call : calls) {
    read(file, &call.background);
    read(file, call.name, sizeof(call.name));
    call.parts.resize(static_cast<size_t>(*world_size));
    for (Part& part : call.parts) {
      int64_t sizes[3];
      read(file, sizes, 3);
      part.commands.resize(static_cast<size_t>(sizes[0]));
      part.references.resize(static_cast<size_t>(sizes[1]));
      part.operands.resize(static_cast<size_t>(sizes[2]));
      read(file, part.commands.data(), part.commands.size());
      read(file, part.references.data(), part.references.size());
      read(file, part.operands.data(), part.operands.size());
    }
  }
  return calls;
}

float value_of(int rank, size_t number) {
  return static_cast<float>(static_cast<size_t>(rank + 1) * 100 + number % 50);
}

// A call under way: its operands must stay.
struct Running {
  size_t number;
  std::vector<std::vector<float>> memory;
  std::vector<void*> addresses;
  int64_t ticket = 0;
};

Running begin(Rank& rank, const Part& part, size_t number) {
  Running running{number, {}, {}, 0};
  for (const Operand& operand : part.operands) {
    const auto elements = static_cast<size_t>(operand.bytes) / sizeof(float);
    const float value = operand.role == kInput ? value_of(rank.rank(), number) : -1.0F;
    running.memory.emplace_back(elements, value);
    void* at = running.memory.back().data();
    if (operand.role == kSymmetric) {
      at = rank.shared.data();  // the caller overwrites it as soon as the call before is over
      std::fill_n(static_cast<float*>(at), elements, value_of(rank.rank(), number));
    }
    running.addresses.push_back(at);
  }
  return running;
}

void check_results(const Rank& rank, const Pattern& call, const Running& running) {
  const Part& part = call.parts[static_cast<size_t>(rank.rank())];
  for (size_t i = 0; i < part.operands.size(); ++i) {
    const std::vector<float>& found = running.memory[i];
    const auto chunk = found.size() / static_cast<size_t>(rank.world_size());
    float sum = 0;
    for (int r = 0; r < rank.world_size(); ++r) sum += value_of(r, running.number);
    for (size_t at = 0; at < found.size(); ++at) {
      const int source = static_cast<int>(at / (chunk == 0 ? 1 : chunk));
      const Role role = part.operands[i].role;
      if (role == kGathered)
        expect(found[at] == value_of(source, running.number), std::string("wrong: ") + call.name);
      if (role == kSum) expect(found[at] == sum, std::string("wrong: ") + call.name);
    }
  }
}

std::shared_ptr<const Plan> plan_of(const Part& part, const char* name) {
  return std::make_shared<const Plan>(part.commands, part.references, name);
}

// One command at a time, so that ranks meet in all sorts of ways.
void run_steps(Rank& rank, const Part& part, const Running& running, const char* name, int skip,
               std::mt19937& random) {
  Workspace& workspace = rank.group->workspace(kSync);
  const int64_t number = rank.group->next(kSync);
  try {
    Call call = workspace.begin(number, kSlotBytes, name);
    for (const Command& command : part.commands) {
      if (random() % 4 == 0) std::this_thread::yield();
      if (random() % 32 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
      if (skip >= 0 && command.kind == Kind::kVerify) continue;
      if (command.kind == Kind::kWait && command.flag == skip) continue;
      workspace.channel()->run(&command, 1, part.references.data(), running.addresses.data(), call);
    }
  } catch (const std::exception& error) {
    rank.group->failed(kSync, number, error);
    expect(skip >= 0, error.what());  // without a wait, ranks may find that others have gone on
    throw;
  }
}

void run_calls(Rank& rank, const std::vector<Pattern>& calls, int skip) {
  std::mt19937 random(static_cast<unsigned>(rank.rank()));
  std::deque<std::pair<const Pattern*, Running>> in_flight;
  Workspace& background = rank.group->workspace(kAsync);
  Lane& lane = rank.group->lane();
  const auto finish_one = [&] {
    const auto& [call, running] = in_flight.front();
    lane.wait(running.ticket);
    check_results(rank, *call, running);
    in_flight.pop_front();
  };
  for (size_t number = 0; number < calls.size(); ++number) {
    const Pattern& call = calls[number];
    const Part& part = call.parts[static_cast<size_t>(rank.rank())];
    const bool in_place = std::any_of(part.operands.begin(), part.operands.end(),
                                      [](const Operand& o) { return o.role == kSymmetric; });
    // The one symmetric tensor is the caller's again once the transfers on it are over.
    while (!in_flight.empty() && (in_place || in_flight.size() > random() % 4)) finish_one();
    Running running = begin(rank, part, number);
    if (call.background == 0) {
      run_steps(rank, part, running, call.name, skip, random);
      if (skip < 0) check_results(rank, call, running);
      continue;
    }
    // As `start` does: on an idle lane the caller publishes.
    const bool publish = lane.idle() && background.begins_at_once(kSlotBytes);
    const auto plan = plan_of(part, call.name);
    running.ticket = rank.group->next(kAsync);
    Lane::Program program{running.ticket, plan, running.addresses, kSlotBytes};
    if (publish) {
      program.begun = background.begin(running.ticket, kSlotBytes, call.name);
      background.channel()->run(plan->publish.data(), static_cast<int>(plan->publish.size()),
                                plan->references.data(), running.addresses.data(), *program.begun);
    }
    lane.submit(std::move(program), !publish || in_place || random() % 2 == 0);
    in_flight.emplace_back(&call, std::move(running));
    if (in_place) finish_one();
  }
  while (!in_flight.empty()) finish_one();
}

// --- faults --------------------------------------------------------------------------------------

Command step_of(Kind kind, int peer, int flag = 0) {
  Command command{};
  command.kind = kind;
  command.peer = peer;
  command.flag = flag;
  return command;
}

// A call in which each rank signals each peer and waits for it.
void meet(Rank& rank, const std::string& what) {
  Workspace& workspace = rank.group->workspace(kSync);
  const int64_t number = rank.group->next(kSync);
  try {
    Call call = workspace.begin(number, 0, what);
    std::vector<Command> commands{step_of(Kind::kPublish, 0)};
    for (const Kind kind : {Kind::kSignal, Kind::kWait})
      for (int peer = 0; peer < rank.world_size(); ++peer)
        if (peer != rank.rank()) commands.push_back(step_of(kind, peer));
    commands.push_back(step_of(Kind::kVerify, 0));
    workspace.channel()->run(commands.data(), static_cast<int>(commands.size()), nullptr, nullptr,
                             call);
  } catch (const std::exception& error) {
    rank.group->failed(kSync, number, error);
    throw;
  }
}

// The last rank does not make a call, the first ones included; the others hear why, and all go on.
void refuse(Rank& rank) {
  const int last = rank.world_size() - 1;
  for (int i = 0; i < 20; ++i) {
    if (rank.rank() == last) {
      for (int times = 0; times <= i % 3; ++times) rank.group->refuse(kSync, "no luck");
    } else {
      for (int times = 0; times <= i % 3; ++times)
        expect_failure([&] { meet(rank, "op"); }, "failed: no luck");
    }
    meet(rank, "good");
  }
}

// Ranks that make different calls are all told, and go on.
void disagree(Rank& rank) {
  for (int i = 0; i < 10; ++i) {
    expect_failure([&] { meet(rank, "op " + std::to_string(rank.rank())); }, "ranks disagree");
    meet(rank, "good");
  }
}

// Transfers that will never end: their engine and who waits for them do.
void close_in_flight(Rank& rank) {
  const auto plan = std::make_shared<const Plan>(
      std::vector{step_of(Kind::kPublish, 0),
                  step_of(Kind::kWait, (rank.rank() + 1) % rank.world_size())},
      std::vector<Reference>{}, "op");
  Lane& lane = rank.group->lane();
  const int64_t first = rank.group->next(kAsync), second = rank.group->next(kAsync);
  lane.submit({first, plan, {}, 0}, true);
  lane.submit({second, plan, {}, 0}, rank.rank() == 0);
  if (rank.rank() == 0) {  // closes when all have the memory: that is told to the last rank
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    return;
  }
  const std::string message = failure_of([&] { lane.wait(second); });
  expect(!message.empty() && lane.finished(first), "who waits for them hears that they failed");
}

// One rank cannot map the first, second, ... of the segments: no rank has the memory then.
void no_memory(Rank& rank) {
  const int last = rank.world_size() - 1, mappings = 1 + 2 * last;
  const std::string what =
      rank.rank() == last ? "cannot map" : "(on rank " + std::to_string(last) + ")";
  const Segment more = Segment::create(4096, "more");
  for (int allowed = 0; allowed <= mappings; ++allowed) {
    mappings_left = rank.rank() == last ? allowed : -1;
    const auto map = [&] { rank.map(more); };
    if (allowed < mappings)
      expect_failure(map, what);
    else
      expect(failure_of(map).empty(), "there is memory again");
  }
  mappings_left = -1;
}

void time_is_over(Rank& rank) {
  const int peer = (rank.rank() + 1) % rank.world_size();
  meet(rank, "good");
  const int64_t number = rank.group->next(kSync);
  Call call = rank.group->workspace(kSync).begin(number, 0, "op");
  const Command command = step_of(Kind::kWait, peer, 1);
  expect_failure(
      [&] { rank.group->workspace(kSync).channel()->run(&command, 1, nullptr, nullptr, call); },
      "op: rank ");
}

void segments() {
  expect_failure([] { Segment::map(Descriptor(memfd_create("open", MFD_ALLOW_SEALING)), 4096); },
                 "needs 4096 sealed bytes, got 0");
  const Segment made = Segment::create(8192, "made");
  expect_failure([&] { Segment::map(Descriptor(dup(made.fd())), 4096); }, "got 8192");
  expect(ftruncate(made.fd(), 4096) != 0, "sealed memory cannot shrink");
  expect_failure([] { Segment::map(Descriptor(open("/dev/zero", O_RDWR)), 4096); }, "sealed");
  expect_failure([] { Segment::create(size_t{1} << 50, "huge"); }, "1125899906842624 bytes");
}

// Someone who found the socket without the token is no rank; the ranks meet all the same.
void strangers() {
  Notes notes;
  std::atomic<bool> over{false};
  int refused = 0;
  std::thread stranger([&] {
    while (!over) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const auto token = notes.get("symm_cp/peer/0");
      if (!token) continue;
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      const std::string name = "symm_cp-" + token->substr(0, 32);
      std::memcpy(address.sun_path + 1, name.data(), name.size());
      const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
      const Descriptor fd(socket(AF_UNIX, SOCK_SEQPACKET, 0));
      if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) continue;
      // The layout of a greeting: magic, rank, world size, token.
      struct {
        uint32_t magic = 0x53434d32;
        int32_t rank = 1, world_size = 2;
        char token[32] = "not the token";
      } handshake;
      char answer = 0;
      send(fd.get(), &handshake, sizeof(handshake), MSG_NOSIGNAL);
      refused += recv(fd.get(), &answer, 1, 0) <= 0;  // the other end was closed
    }
  });
  std::thread first([&] { Rank rank(notes, 0, 2, std::chrono::seconds(30)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  std::thread second([&] { Rank rank(notes, 1, 2, std::chrono::seconds(30)); });
  first.join();
  second.join();
  over = true;
  stranger.join();
  expect(refused > 0, "the stranger was not heard at all");
}

void faults() {
  const std::chrono::seconds long_time(30);
  for (int world_size = 2; world_size <= 4; ++world_size) {
    on_all_ranks(world_size, long_time, refuse);
    on_all_ranks(world_size, long_time, disagree);
    on_all_ranks(world_size, long_time, close_in_flight);
    on_all_ranks(world_size, long_time, no_memory);
    on_all_ranks(world_size, std::chrono::milliseconds(120), time_is_over);
  }
  segments();
  strangers();
  expect(places.empty(), "segments are still mapped");
}

}  // namespace

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
  if (group_peers.peers == nullptr)
    group_peers.peers =
        std::make_shared<Peers>(*group_peers.notes, group, group_peers.rank, group_peers.world_size,
                                std::chrono::seconds(30), rendezvous);
  return group_peers.peers;
}

void refuse_peers(const std::string& group, const std::string& key, const std::string& reason) {
  GroupPeers& group_peers = group_peers_of(group);
  Peers::refuse_before(*group_peers.notes, group_peers.rank, key, reason);
}

void check_refused_peers(const std::string& group, const Rendezvous& rendezvous, int peer) {
  Peers::check_refusal(*group_peers_of(group).notes, rendezvous, peer);
}

std::chrono::milliseconds timeout_of(const std::string&) { return std::chrono::seconds(30); }

}  // namespace symm_cp

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "faults") {
    faults();
  } else if (argc == 3 && std::string(argv[1]) == "messages") {
    check_messages(static_cast<unsigned>(std::atoi(argv[2])));
    expect(places.empty(), "segments are still mapped");
  } else {
    expect(argc >= 3, "see the head of ranks.cpp");
    int64_t world_size = 0;
    const auto calls = read_calls(argv[2], &world_size);
    on_all_ranks(static_cast<int>(world_size), std::chrono::seconds(60),
                 [&](Rank& rank) { run_calls(rank, calls, argc > 3 ? std::atoi(argv[3]) : -1); });
  }
  std::puts("ok");
}
