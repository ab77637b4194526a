// Backend of torch's symmetric memory for CPU tensors: registers itself when this library loads.
//
// Few files include torch's headers, which keeps the build short.
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "backend/link_probe.h"
#include "base/error.h"
#include "base/python.h"
#include "memory/mapping.h"
#include "rendezvous/store_bootstrap.h"

namespace symm_cp {

namespace {

namespace symm = c10d::symmetric_memory;
using std::chrono::milliseconds;

// How long to wait for a store when its answer would only spare peers a wait.
constexpr std::chrono::seconds kNotePatience{1};

// The peers of a group, tied to the process group object instead of its name: names are reused
// after a group is destroyed.
struct GroupPeers {
  std::shared_ptr<Peers> peers;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> process_group{
      c10::intrusive_ptr<c10d::ProcessGroup>()};
  c10::intrusive_ptr<c10d::Store> store;  // only for a group known by set_group_info
};

// The number of tensor rendezvous that this rank has begun in a process group, including failed
// ones: the same on all ranks. The weak pointer keeps the address of a group that is gone from
// being another group's.
struct Count {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> process_group{
      c10::intrusive_ptr<c10d::ProcessGroup>()};
  c10::intrusive_ptr<c10d::Store> store;  // only for a group known by set_group_info
  int64_t value = 0;
};

struct Block {
  Segment segment;
  size_t bytes;
  std::optional<std::string> default_group;
  std::map<std::string, std::shared_ptr<Mapping>> mappings;
};

struct Registry {
  std::mutex mutex;
  std::map<const char*, std::shared_ptr<Block>> blocks;  // by start address
  std::map<std::string, std::shared_ptr<GroupPeers>> groups;
  std::map<std::string, std::shared_ptr<GroupPeers>> unmet;  // groups with incomplete meshes
  std::map<std::string, Count> rendezvous;
  std::set<std::string> in_progress;  // groups with a rendezvous under way in some thread

  std::shared_ptr<Block> find(const void* address) {
    const char* at = static_cast<const char*>(address);
    auto next = blocks.upper_bound(at);
    if (next == blocks.begin()) return nullptr;
    const auto& [start, block] = *std::prev(next);
    return at < start + block->segment.size() ? block : nullptr;
  }
};

// Never destroyed: tensors may be freed after static destructors have run.
Registry& registry() {
  static Registry* instance = new Registry;
  return *instance;
}

c10::intrusive_ptr<c10d::ProcessGroup> try_resolve(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    return {};
  }
}

c10::intrusive_ptr<c10d::Backend> cpu_backend(c10d::ProcessGroup& group) {
  try {
    return group.getBackend(c10::DeviceType::CPU);
  } catch (const std::exception&) {
    return {};  // a group without a CPU backend
  }
}

// The time-out of a process group's collectives.
milliseconds own_timeout_of(c10d::ProcessGroup& group) {
  try {
    const auto backend = cpu_backend(group);
    const auto options = backend ? backend->getBackendOptions() : nullptr;
    if (options) return options->timeout;  // torch's "fake" backend has none
  } catch (const std::exception&) {        // a backend without options
  }
  return kProcessGroupDefaultTimeout;
}

std::optional<milliseconds> chosen_timeout() {
  const char* chosen = std::getenv("SYMM_CP_TIMEOUT_MS");
  if (chosen == nullptr || std::atoll(chosen) <= 0) return std::nullopt;
  return milliseconds(std::atoll(chosen));
}

milliseconds timeout_of(c10d::ProcessGroup& group) {
  const auto chosen = chosen_timeout();
  return chosen ? *chosen : own_timeout_of(group);
}

// Whether `known`, GroupPeers or a Count, belongs to the group that now has this name.
template <class Known>
bool current(const Known& known, const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
             const std::string& name) {
  if (process_group) return known.process_group.lock().get() == process_group.get();
  return known.store == symm::get_group_info(name).store;
}

// The count of the group that now has this name; call it with the registry's lock.
Count& count_of(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
                const std::string& name) {
  Count& count = registry().rendezvous[name];
  if (current(count, process_group, name)) return count;
  count = Count{c10::weak_intrusive_ptr<c10d::ProcessGroup>(process_group)};
  if (!process_group) count.store = symm::get_group_info(name).store;
  return count;
}

StoreBootstrap bootstrap_of(const std::string& name,
                            const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
                            milliseconds limit) {
  if (!process_group) return StoreBootstrap(symm::get_group_info(name).store, limit);
  const std::shared_ptr<LinkProbe> probe = LinkProbe::of(cpu_backend(*process_group), name);
  return StoreBootstrap(process_group->getStore(), limit, [probe](int rank) {
    return probe != nullptr && probe->lost(rank) == rank;
  });
}

// The peers that this package's backend found when the group was made.
std::shared_ptr<Peers> peers_of_its_backend(c10d::ProcessGroup& process_group,
                                            const std::string& name) {
  const auto backend = cpu_backend(process_group);
  return backend && backend->getBackendName() == "symm_cp" ? peers_of_backend(name) : nullptr;
}

// The peers of a group that this rank has met or begun to look for; null if there are none.
std::shared_ptr<Peers> connected_peers_of(
    const std::string& name, const c10::intrusive_ptr<c10d::ProcessGroup>& process_group) {
  {
    Registry& all = registry();
    std::lock_guard<std::mutex> lock(all.mutex);
    for (const auto* groups : {&all.groups, &all.unmet})
      if (const auto it = groups->find(name);
          it != groups->end() && current(*it->second, process_group, name))
        return it->second->peers;
  }
  return process_group ? peers_of_its_backend(*process_group, name) : nullptr;
}

// Returns the peers of a group that this rank has begun to look for; begins now if it has not. Only
// the thread that has put the group's name into `in_progress` may call this.
std::shared_ptr<GroupPeers> unmet_peers_of(
    const std::string& name, const c10::intrusive_ptr<c10d::ProcessGroup>& process_group) {
  Registry& all = registry();
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    const auto it = all.unmet.find(name);
    if (it != all.unmet.end() && current(*it->second, process_group, name)) return it->second;
  }
  auto group_peers = std::make_shared<GroupPeers>();
  if (process_group) {
    group_peers->process_group = c10::weak_intrusive_ptr<c10d::ProcessGroup>(process_group);
    group_peers->peers = std::make_shared<Peers>(
        name, process_group->getRank(), process_group->getSize(), timeout_of(*process_group));
  } else {
    const auto& info = symm::get_group_info(name);
    group_peers->store = info.store;
    group_peers->peers =
        std::make_shared<Peers>(name, info.rank, info.world_size, info.store->getTimeout());
  }
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.unmet[name] = group_peers;
}

std::shared_ptr<GroupPeers> make_group_peers(
    const std::string& name, const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
    const Rendezvous& rendezvous) {
  StoreBootstrap bootstrap = bootstrap_of(name, process_group, rendezvous.budget.limit);
  if (auto known = process_group ? peers_of_its_backend(*process_group, name) : nullptr) {
    auto group_peers = std::make_shared<GroupPeers>();
    group_peers->process_group = c10::weak_intrusive_ptr<c10d::ProcessGroup>(process_group);
    group_peers->peers = std::move(known);
    return group_peers;
  }
  auto group_peers = unmet_peers_of(name, process_group);
  group_peers->peers->check_owned(rendezvous.call_name);
  group_peers->peers->meet(bootstrap, rendezvous);
  return group_peers;
}

// Collective on the first call for a group. The registry's lock is not held during the rendezvous,
// so that two threads can rendezvous in two groups; in the same group the second thread waits.
std::shared_ptr<GroupPeers> group_peers_of(const std::string& name, const Rendezvous& rendezvous) {
  release_groups();
  const auto process_group = try_resolve(name);
  Registry& all = registry();
  {
    const Waiting waiting(rendezvous.budget);
    std::unique_lock<std::mutex> lock(all.mutex);
    while (true) {
      const auto it = all.groups.find(name);
      if (it != all.groups.end() && current(*it->second, process_group, name)) {
        it->second->peers->check_owned(rendezvous.call_name);
        return it->second;
      }
      if (all.in_progress.insert(name).second) break;
      lock.unlock();
      std::this_thread::sleep_for(milliseconds(2));
      throw_if_interrupted();
      rendezvous.on_slice();
      rendezvous.budget.say_if_long(
          name, [&] { return rendezvous.call_name + ": waiting for another thread's rendezvous"; });
      if (waiting.expired())
        throw TimedOut(rendezvous.call_name +
                       ": another thread did not make the rendezvous of group '" + name +
                       "' within " + std::to_string(rendezvous.budget.limit.count()) + " ms");
      lock.lock();
    }
  }
  std::shared_ptr<GroupPeers> group_peers;
  try {
    group_peers = make_group_peers(name, process_group, rendezvous);
  } catch (...) {
    std::lock_guard<std::mutex> lock(all.mutex);
    all.in_progress.erase(name);
    throw;
  }
  std::lock_guard<std::mutex> lock(all.mutex);
  all.in_progress.erase(name);
  all.unmet.erase(name);
  return all.groups[name] = group_peers;
}

class CpuSymmetricMemory : public symm::SymmetricMemory {
 public:
  CpuSymmetricMemory(std::shared_ptr<Block> block, std::shared_ptr<Mapping> mapping, size_t offset)
      : block_(std::move(block)), mapping_(std::move(mapping)), offset_(offset) {
    data_ = mapping_->data();
    pads_ = mapping_->pads();
  }

  std::vector<void*> get_buffer_ptrs() override { return data_; }
  std::vector<void*> get_signal_pad_ptrs() override { return pads_; }
  void** get_buffer_ptrs_dev() override { return data_.data(); }
  void** get_signal_pad_ptrs_dev() override { return pads_.data(); }
  size_t get_buffer_size() override { return block_->bytes; }
  size_t get_offset() override { return offset_; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  int get_rank() override { return mapping_->rank(); }
  int get_world_size() override { return mapping_->world_size(); }
  c10::Device get_device() override { return c10::Device(c10::DeviceType::CPU); }
  bool world_within_direct_access() override { return true; }
  const std::shared_ptr<Mapping>& mapping() const { return mapping_; }

  void barrier(int channel, size_t timeout_ms) override {
    guarded([&] { mapping_->barrier(channel, static_cast<int64_t>(timeout_ms)); });
  }
  void put_signal(int dst_rank, int channel, size_t timeout_ms) override {
    guarded([&] { mapping_->put_signal(dst_rank, channel, static_cast<int64_t>(timeout_ms)); });
  }
  void wait_signal(int src_rank, int channel, size_t timeout_ms) override {
    guarded([&] { mapping_->wait_signal(src_rank, channel, static_cast<int64_t>(timeout_ms)); });
  }

 private:
  template <class F>
  static void guarded(F body) {
    try {
      body();
    } catch (const std::exception& error) {
      TORCH_CHECK(false, error.what());
    }
  }

  std::shared_ptr<Block> block_;  // memory outlives the tensor while a handle is in use
  std::shared_ptr<Mapping> mapping_;
  size_t offset_;
  std::vector<void*> data_;
  std::vector<void*> pads_;
};

class CpuAllocator : public symm::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t size, int /*device_idx*/,
              const std::optional<std::string>& group_name) override {
    auto block = std::make_shared<Block>();
    block->segment = Segment::create(size, owned_label("tensors"));
    block->bytes = size;
    block->default_group = group_name;
    std::lock_guard<std::mutex> lock(registry().mutex);
    char* data = block->segment.data();
    registry().blocks[data] = std::move(block);
    return data;
  }

  void free(void* ptr) override {
    std::shared_ptr<Block> block;  // unmapped after the lock is released
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto it = registry().blocks.find(static_cast<char*>(ptr));
    if (it == registry().blocks.end()) return;
    block = std::move(it->second);
    registry().blocks.erase(it);
  }

  size_t get_alloc_size(void* ptr) override {
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto block = registry().find(ptr);
    TORCH_CHECK(block != nullptr, "get_alloc_size: the address is not symmetric CPU memory");
    return block->bytes;
  }

  // Not marked `override`: torch 2.11 has no such method.
  bool has_allocation(void* ptr) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    return registry().find(ptr) != nullptr;
  }

  c10::intrusive_ptr<symm::SymmetricMemory> rendezvous(
      void* ptr, const std::optional<std::string>& group_name) override {
    std::shared_ptr<Block> block;
    {
      std::lock_guard<std::mutex> lock(registry().mutex);
      block = registry().find(ptr);
    }
    if (block == nullptr) return nullptr;  // as torch does for an ordinary tensor
    const auto name = group_name ? group_name : block->default_group;
    TORCH_CHECK(name.has_value(),
                "rendezvous: group_name was given neither here nor at the allocation");
    const size_t offset = static_cast<size_t>(static_cast<char*>(ptr) - block->segment.data());
    const WithoutGil without_gil;
    try {
      return c10::make_intrusive<CpuSymmetricMemory>(block, mapping_of(*block, *name), offset);
    } catch (const PeerError& error) {
      TORCH_CHECK(false, error.what());
    } catch (const ResourceError& error) {
      TORCH_CHECK(false, "rendezvous of group '", *name, "': ", error.what());
    }
  }

  bool has_multicast_support(int /*device_idx*/) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::DeviceType::CPU; }
  std::string name() override { return "SHM"; }

 private:
  static std::shared_ptr<Mapping> mapping_of(Block& block, const std::string& name) {
    const auto process_group = try_resolve(name);
    int64_t sequence;
    {
      std::lock_guard<std::mutex> lock(registry().mutex);
      const auto group_peers = registry().groups.find(name);
      const auto known = block.mappings.find(name);
      if (group_peers != registry().groups.end() && known != block.mappings.end() &&
          current(*group_peers->second, process_group, name) &&
          known->second->peers() == group_peers->second->peers)
        return known->second;
      sequence = count_of(process_group, name).value++;
    }
    WaitBudget budget(symm_cp::timeout_of(name));
    const Rendezvous rendezvous{"tensor/" + std::to_string(sequence), "symm_mem.rendezvous",
                                budget};
    const auto group_peers = group_peers_of(name, rendezvous);
    auto mapping = std::make_shared<Mapping>(group_peers->peers, block.segment, block.bytes,
                                             symm::get_signal_pad_size(), sequence, rendezvous);
    std::lock_guard<std::mutex> lock(registry().mutex);
    return block.mappings[name] = mapping;
  }
};

const bool registered = [] {
  const auto allocator = c10::make_intrusive<CpuAllocator>();
  symm::register_allocator(c10::DeviceType::CPU, allocator);
  symm::register_availability(allocator->name(), allocator);  // for set_backend("SHM")
  return true;
}();

}  // namespace

std::shared_ptr<Mapping> find_mapping(const void* address, const Peers& peers) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto block = registry().find(address);
  if (block == nullptr) return nullptr;
  const auto it = block->mappings.find(peers.group());
  const bool known = it != block->mappings.end() && it->second->peers().get() == &peers;
  return known ? it->second : nullptr;
}

std::shared_ptr<Mapping> find_mapping(const void* address, const std::string& name) {
  std::shared_ptr<GroupPeers> group_peers;
  const auto process_group = try_resolve(name);
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const auto it = registry().groups.find(name);
    if (it == registry().groups.end() || !current(*it->second, process_group, name)) return nullptr;
    group_peers = it->second;
  }
  return find_mapping(address, *group_peers->peers);
}

std::optional<size_t> symmetric_offset(const void* address) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto block = registry().find(address);
  if (block == nullptr) return std::nullopt;
  return static_cast<size_t>(static_cast<const char*>(address) - block->segment.data());
}

std::shared_ptr<Mapping> find_mapping(const void* address) {
  std::map<std::string, std::shared_ptr<Mapping>> known;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    if (const auto block = registry().find(address)) known = block->mappings;
  }
  if (known.size() == 1) return known.begin()->second;
  const auto all = known.find("0");  // torch's name of the group of all ranks
  return all == known.end() ? nullptr : all->second;
}

std::optional<PadPlace> find_pad(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (const auto& [start, block] : registry().blocks)
    for (const auto& [group, mapping] : block->mappings)
      for (const void* pad : mapping->pads()) {
        const auto begin = reinterpret_cast<uintptr_t>(pad);
        if (begin <= at && at < begin + mapping->pad_bytes()) return PadPlace{mapping, at - begin};
      }
  return std::nullopt;
}

std::shared_ptr<Mapping> find_mapping(const Peers& peers, int64_t sequence) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (const auto& [start, block] : registry().blocks)
    for (const auto& [name, mapping] : block->mappings)
      if (mapping->peers().get() == &peers && mapping->sequence() == sequence) return mapping;
  return nullptr;
}

std::shared_ptr<Peers> peers_of(const std::string& name, const Rendezvous& rendezvous) {
  return group_peers_of(name, rendezvous)->peers;
}

void refuse_peers(const std::string& name, const std::string& key, const std::string& reason,
                  const CallSite* other) {
  const auto process_group = try_resolve(name);
  const int rank = process_group ? process_group->getRank() : symm::get_group_info(name).rank;
  StoreBootstrap bootstrap = bootstrap_of(name, process_group, kNotePatience);
  try {
    Peers::refuse_before(bootstrap, rank, key, reason);
  } catch (const std::exception&) {  // the store failed; the caller raises the reason
  }
  // Peers that have met no longer look in the store: tells them directly.
  const auto known = connected_peers_of(name, process_group);
  if (known != nullptr && known->owned()) known->refuse(key, reason, other);
}

void check_refused_peers(const std::string& name, const Rendezvous& rendezvous, int peer) {
  StoreBootstrap bootstrap = bootstrap_of(name, try_resolve(name), kNotePatience);
  Peers::check_refusal(bootstrap, rendezvous, peer);
}

milliseconds timeout_of(const std::string& name) {
  const auto process_group = try_resolve(name);
  return process_group ? timeout_of(*process_group)
                       : symm::get_group_info(name).store->getTimeout();
}

milliseconds default_timeout() { return chosen_timeout().value_or(kProcessGroupDefaultTimeout); }

std::shared_ptr<Mapping> mapping_of_handle(symm::SymmetricMemory& handle) {
  auto* ours = dynamic_cast<CpuSymmetricMemory*>(&handle);
  return ours == nullptr ? nullptr : ours->mapping();
}

void release_groups() {
  std::vector<std::shared_ptr<GroupPeers>> ended;  // their sockets close after the lock is released
  const auto is_gone = [](const auto& known) {
    return !known.store && known.process_group.use_count() == 0;
  };
  std::lock_guard<std::mutex> lock(registry().mutex);
  std::erase_if(registry().rendezvous, [&](const auto& each) { return is_gone(each.second); });
  for (auto* groups : {&registry().groups, &registry().unmet})
    for (auto it = groups->begin(); it != groups->end();) {
      const bool gone = is_gone(*it->second);
      if (gone) ended.push_back(std::move(it->second));
      it = gone ? groups->erase(it) : std::next(it);
    }
}

}  // namespace symm_cp

extern "C" {

// Opens a probe of a group's links to its peers, for use during waits; null if its links cannot be
// probed.
void* symm_cp_probe_links(const char* group) {
  const auto process_group = symm_cp::try_resolve(group);
  if (!process_group) return nullptr;
  return symm_cp::LinkProbe::of(symm_cp::cpu_backend(*process_group), group).release();
}

// Returns the rank whose loss may keep `rank` from sending (see LinkProbe::lost), or -1.
int symm_cp_link_lost(void* links, int rank) {
  return static_cast<symm_cp::LinkProbe*>(links)->lost(rank).value_or(-1);
}

void symm_cp_links_close(void* links) { delete static_cast<symm_cp::LinkProbe*>(links); }

// Whether the group's own backend, made by this package, has found that all ranks share this host's
// memory.
int symm_cp_met_on_this_host(const char* group) {
  const auto process_group = symm_cp::try_resolve(group);
  return process_group && symm_cp::peers_of_its_backend(*process_group, group) != nullptr;
}

// Returns the time-out of a group's collectives on the CPU: torch's default if its backend has
// none.
int64_t symm_cp_group_timeout_ms(const char* group) {
  const auto process_group = symm_cp::try_resolve(group);
  return process_group ? symm_cp::own_timeout_of(*process_group).count()
                       : kProcessGroupDefaultTimeout.count();
}

}  // extern "C"

extern "C" {

// Returns the number of tensor rendezvous that this rank has begun in a group: the same on all
// ranks.
int64_t symm_cp_rendezvous_begun(const char* group) {
  using symm_cp::registry;
  const auto process_group = symm_cp::try_resolve(group);
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto known = registry().rendezvous.find(group);
  if (known == registry().rendezvous.end()) return 0;
  return symm_cp::current(known->second, process_group, group) ? known->second.value : 0;
}

}  // extern "C"
