// Backend of torch's symmetric memory for CPU tensors: registers itself when this library loads.
//
// The only file that sees torch's headers, which keeps the build short.
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <map>
#include <memory>
#include <mutex>

#include "error.h"
#include "gil.h"
#include "mapping.h"

namespace symm_cp {

namespace {

namespace symm = c10d::symmetric_memory;
using std::chrono::milliseconds;

class StoreBootstrap : public Bootstrap {
 public:
  explicit StoreBootstrap(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  std::optional<std::string> get(const std::string& key) override {
    if (!store_->check({key})) return std::nullopt;
    const auto value = store_->get(key);
    return std::string(value.begin(), value.end());
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

// A group that has rendezvoused. It is tied to the process group object, not to its name: names
// are used again after a group was destroyed.
struct Group {
  std::shared_ptr<Peers> peers;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> process_group{
      c10::intrusive_ptr<c10d::ProcessGroup>()};
  c10::intrusive_ptr<c10d::Store> store;  // of a group known by set_group_info only
  int64_t rendezvous_count = 0;
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
  std::map<std::string, std::shared_ptr<Group>> groups;

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

milliseconds timeout_of(c10d::ProcessGroup& group) {
  try {
    const auto options = group.getBackend(c10::DeviceType::CPU)->getBackendOptions();
    return options->timeout;
  } catch (const std::exception&) {
    return kProcessGroupDefaultTimeout;  // a backend without options
  }
}

bool current(const Group& known, const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
             const std::string& name) {
  if (known.peers->broken()) return false;
  if (process_group) return known.process_group.lock().get() == process_group.get();
  return known.store == symm::get_group_info(name).store;
}

std::shared_ptr<Group> make_group(const std::string& name,
                                  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group) {
  auto group = std::make_shared<Group>();
  if (process_group) {
    group->process_group = c10::weak_intrusive_ptr<c10d::ProcessGroup>(process_group);
    StoreBootstrap bootstrap(process_group->getStore());
    group->peers = std::make_shared<Peers>(bootstrap, name, process_group->getRank(),
                                           process_group->getSize(), timeout_of(*process_group));
  } else {
    const auto& info = symm::get_group_info(name);
    group->store = info.store;
    StoreBootstrap bootstrap(info.store);
    group->peers = std::make_shared<Peers>(bootstrap, name, info.rank, info.world_size,
                                           info.store->getTimeout());
  }
  return group;
}

// Collective on the first call for a group. The registry's lock is not held meanwhile, so that
// two threads can rendezvous in two groups.
std::shared_ptr<Group> group_of(const std::string& name) {
  release_groups();
  const auto process_group = try_resolve(name);
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto it = registry().groups.find(name);
    if (it != registry().groups.end() && current(*it->second, process_group, name))
      return it->second;
  }
  auto group = make_group(name, process_group);
  std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().groups[name] = group;
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
    } catch (const std::out_of_range& error) {
      TORCH_CHECK_VALUE(false, error.what());
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
    block->segment = Segment::create(size, "symm_cp");
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
    TORCH_CHECK_VALUE(name.has_value(),
                      "rendezvous: group_name was given neither here nor at the allocation");
    const size_t offset = static_cast<size_t>(static_cast<char*>(ptr) - block->segment.data());
    const WithoutGil others_may_run;
    try {
      return c10::make_intrusive<CpuSymmetricMemory>(block, mapping_of(*block, *name), offset);
    } catch (const PeerError& error) {
      TORCH_CHECK(false, error.what());
    } catch (const SystemError& error) {
      TORCH_CHECK(false, "rendezvous of group '", *name, "': ", error.what());
    }
  }

  bool has_multicast_support(int /*device_idx*/) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::DeviceType::CPU; }
  std::string name() override { return "SHM"; }

 private:
  static std::shared_ptr<Mapping> mapping_of(Block& block, const std::string& name) {
    auto group = group_of(name);
    int64_t sequence;
    {
      std::lock_guard<std::mutex> lock(registry().mutex);
      auto it = block.mappings.find(name);
      if (it != block.mappings.end() && it->second->peers() == group->peers) return it->second;
      sequence = group->rendezvous_count++;
    }
    auto mapping = std::make_shared<Mapping>(group->peers, block.segment, block.bytes,
                                             symm::get_signal_pad_size(), sequence);
    std::lock_guard<std::mutex> lock(registry().mutex);
    return block.mappings[name] = mapping;
  }
};

const bool registered = [] {
  symm::register_allocator(c10::DeviceType::CPU, c10::make_intrusive<CpuAllocator>());
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
  std::shared_ptr<Group> group;
  const auto process_group = try_resolve(name);
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const auto it = registry().groups.find(name);
    if (it == registry().groups.end() || !current(*it->second, process_group, name)) return nullptr;
    group = it->second;
  }
  return find_mapping(address, *group->peers);
}

std::shared_ptr<Mapping> find_mapping(const Peers& peers, int64_t sequence) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (const auto& [start, block] : registry().blocks)
    for (const auto& [name, mapping] : block->mappings)
      if (mapping->peers().get() == &peers && mapping->sequence() == sequence) return mapping;
  return nullptr;
}

void decline_rendezvous(const std::string& name, const std::string& reason) {
  const WithoutGil others_may_run;
  const auto group = group_of(name);
  int64_t sequence;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    sequence = group->rendezvous_count++;
  }
  Mapping::decline(*group->peers, sequence, reason);
}

void release_groups() {
  std::vector<std::shared_ptr<Group>> ended;  // their sockets close after the lock is released
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (auto it = registry().groups.begin(); it != registry().groups.end();) {
    const bool gone = !it->second->store && it->second->process_group.use_count() == 0;
    if (gone) ended.push_back(std::move(it->second));
    it = gone ? registry().groups.erase(it) : std::next(it);
  }
}

}  // namespace symm_cp
