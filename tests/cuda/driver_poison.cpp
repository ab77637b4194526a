// An allocator of CPU tensors that treats memory as the one of a GPU treats its own: a block that
// was freed belongs to the stream that allocated it, which may use it from its next command on. So
// the block is filled with NaN when the stream gets there. Whoever reads it later, in another
// stream, computes with NaN; and whoever writes to it is found when it leaves the quarantine.
//
// oneDNN's tensors are freed by whatever allocator is in use then, not by the one that made them.
// So either allocator frees the blocks of the other: what this one knows of its blocks lies in a
// table.
//
// Fresh memory is NaN as well. Blocks that are allocated while a thread has it so are counted:
// those of a graph's pool, while torch warms the graph up.
#include <c10/core/CPUAllocator.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <unordered_map>

extern "C" {
int simulated_on_stream();
void* simulated_owning_stream();
void simulated_when_passed(void* owner, void (*function)(void*), void* block);
void simulated_last_write(uint64_t address, size_t bytes, char* text, size_t room);
}

namespace {

constexpr int kPattern = 0xFF;  // NaN in all floating types, -1 in integers
constexpr size_t kAlign = 64;
constexpr size_t kQuarantine = size_t{64} << 20;
constexpr size_t kBlocks = 20000;

struct Block {
  size_t bytes = 0;
  void* owner = nullptr;
  bool pooled = false;
  bool counted = false;  // the host made it: streams only make what a GPU would not
};

struct Blocks {
  std::mutex mutex;
  std::unordered_map<void*, Block> of;
  size_t bytes = 0, most = 0;  // counted now, and at a time

  void add(void* data, const Block& block) {
    std::lock_guard<std::mutex> lock(mutex);
    of[data] = block;
    if (block.counted) bytes += block.bytes;
    most = std::max(most, bytes);
  }
  std::optional<Block> take(void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = of.find(data);
    if (found == of.end()) return std::nullopt;
    const Block block = found->second;
    of.erase(found);
    if (block.counted) bytes -= block.bytes;
    return block;
  }
};
Blocks& blocks() {
  static Blocks* it = new Blocks;
  return *it;
}

// Less than it was given where the other allocator has freed that, and given the address again.
size_t bytes_at(void* data, size_t bytes) { return std::min(bytes, malloc_usable_size(data)); }

thread_local bool pooling = false;
std::atomic<int64_t> pooled{0};  // blocks

struct Freed {
  void* data;
  size_t bytes;
};

struct Quarantine {
  std::mutex mutex;
  std::deque<Freed> blocks;
  size_t bytes = 0;
  std::string failures;
};
Quarantine& quarantine() {
  static Quarantine* it = new Quarantine;
  return *it;
}

// With the lock held.
void release_first(Quarantine& it) {
  const auto [data, bytes] = it.blocks.front();
  it.blocks.pop_front();
  it.bytes -= bytes;
  const auto* at = static_cast<unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) {
    if (at[i] == kPattern) continue;
    char text[256];
    const auto address = reinterpret_cast<uint64_t>(at);
    simulated_last_write(address, bytes, text, sizeof text);
    char line[512];
    std::snprintf(line, sizeof line,
                  "freed memory was written to: byte %zu of a block of %zu at %p; last by %s\n", i,
                  bytes, data, text);
    it.failures += line;
    break;
  }
  std::free(data);
}

void poison(const Freed& block) {
  std::memset(block.data, kPattern, block.bytes);
  Quarantine& it = quarantine();
  std::lock_guard<std::mutex> lock(it.mutex);
  it.blocks.push_back(block);
  it.bytes += block.bytes;
  while (it.bytes > kQuarantine || it.blocks.size() > kBlocks) release_first(it);
}

void free_block(void* data) {
  if (data == nullptr) return;
  const auto block = blocks().take(data);
  if (!block) return std::free(data);
  if (block->pooled) --pooled;
  auto* freed = new Freed{data, bytes_at(data, block->bytes)};
  const auto passed = [](void* given) {
    const std::unique_ptr<Freed> freed(static_cast<Freed*>(given));
    poison(*freed);
  };
  simulated_when_passed(block->owner, passed, freed);
}

class PoisoningAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, free_block, c10::Device(c10::kCPU)};
    const size_t rounded = (bytes + kAlign - 1) / kAlign * kAlign;
    void* data = std::aligned_alloc(kAlign, rounded);
    if (data == nullptr) throw std::bad_alloc();
    blocks().add(data, {bytes, simulated_owning_stream(), pooling, simulated_on_stream() == 0});
    pooled += pooling;
    std::memset(data, kPattern, bytes);
    return {data, data, free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

extern "C" {

// Replaces torch's allocator from now on, or puts it back. Blocks of either are freed by their own.
void poison_use(int on) {
  static auto* allocator = new PoisoningAllocator;
  c10::SetCPUAllocator(on != 0 ? allocator : c10::GetDefaultCPUAllocator(), 255);
}

// Whether what this thread allocates is counted from now on; returns whether it was.
int poison_pool(int on) {
  const bool before = pooling;
  pooling = on != 0;
  return before;
}

// How many of these blocks are allocated.
int64_t poison_pooled() { return pooled; }

// The most bytes that were allocated at a time since the last call, beyond those of then.
int64_t poison_most() {
  static size_t before = 0;
  std::lock_guard<std::mutex> lock(blocks().mutex);
  const auto more = static_cast<int64_t>(blocks().most) - static_cast<int64_t>(before);
  before = blocks().most = blocks().bytes;
  return more;
}

// Empties the quarantine; writes what was found to `text`.
void poison_check(char* text, size_t room) {
  Quarantine& it = quarantine();
  std::lock_guard<std::mutex> lock(it.mutex);
  while (!it.blocks.empty()) release_first(it);
  std::snprintf(text, room, "%s", it.failures.c_str());
  it.failures.clear();
}

}  // extern "C"
