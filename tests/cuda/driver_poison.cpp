// An allocator of CPU tensors that treats memory as the one of a GPU treats its own: a block that
// was freed belongs to the stream that allocated it, which may use it from its next command on. So
// the block is filled with NaN when the stream gets there. Whoever reads it later, in another
// stream, computes with NaN; and whoever writes to it is found when it leaves the quarantine.
//
// Fresh memory is NaN as well. Blocks that are allocated while a thread has it so are counted:
// those of a graph's pool, while torch warms the graph up.
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <string>

extern "C" {
void* simulated_owning_stream();
void simulated_when_passed(void* owner, void (*function)(void*), void* block);
void simulated_last_write(uint64_t address, size_t bytes, char* text, size_t room);
}

namespace {

constexpr int kPattern = 0xFF;  // NaN in all floating types, -1 in integers
constexpr size_t kAlign = 64;
constexpr size_t kQuarantine = size_t{64} << 20;
constexpr size_t kBlocks = 20000;

struct Header {  // lies in front of the block
  size_t bytes;
  void* owner;
  bool pooled;
};
static_assert(sizeof(Header) <= kAlign);

Header& header(void* data) { return *reinterpret_cast<Header*>(static_cast<char*>(data) - kAlign); }

thread_local bool pooling = false;
std::atomic<int64_t> pooled{0};  // blocks

struct Quarantine {
  std::mutex mutex;
  std::deque<void*> blocks;
  size_t bytes = 0;
  std::string failures;
};
Quarantine& quarantine() {
  static Quarantine* it = new Quarantine;
  return *it;
}

// With the lock held.
void release_first(Quarantine& it) {
  void* data = it.blocks.front();
  it.blocks.pop_front();
  const size_t bytes = header(data).bytes;
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
  std::free(static_cast<char*>(data) - kAlign);
}

void poison(void* data) {
  std::memset(data, kPattern, header(data).bytes);
  Quarantine& it = quarantine();
  std::lock_guard<std::mutex> lock(it.mutex);
  it.blocks.push_back(data);
  it.bytes += header(data).bytes;
  while (it.bytes > kQuarantine || it.blocks.size() > kBlocks) release_first(it);
}

void free_block(void* data) {
  if (data == nullptr) return;
  if (header(data).pooled) --pooled;
  simulated_when_passed(header(data).owner, poison, data);
}

class PoisoningAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, free_block, c10::Device(c10::kCPU)};
    const size_t rounded = (bytes + kAlign - 1) / kAlign * kAlign;
    auto* start = static_cast<char*>(std::aligned_alloc(kAlign, rounded + kAlign));
    if (start == nullptr) throw std::bad_alloc();
    void* data = start + kAlign;
    header(data) = {bytes, simulated_owning_stream(), pooling};
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

// Empties the quarantine; writes what was found to `text`.
void poison_check(char* text, size_t room) {
  Quarantine& it = quarantine();
  std::lock_guard<std::mutex> lock(it.mutex);
  while (!it.blocks.empty()) release_first(it);
  std::snprintf(text, room, "%s", it.failures.c_str());
  it.failures.clear();
}

}  // extern "C"
