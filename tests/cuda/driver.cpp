// A stand-in for the CUDA driver that runs on CPU memory, for tests: a stream is a thread with a
// queue, the null stream is the thread that calls. It does what the driver promises and no more:
// streams run at their own pace (with random delays), copies of a batch in any order, and a wait
// for an event that was not recorded yet is none.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "../../csrc/driver.h"

using namespace symm_cp::driver;

namespace {

constexpr auto kPatience = std::chrono::seconds(30);
std::atomic<int> max_delay_us{0};
std::atomic<int> copies{0}, batches{0}, copies_2d{0}, mem_op_calls{0}, mem_ops{0};
std::atomic<int> refused{0};

void spin_until(const std::function<bool()>& ready, const char* what) {
  auto end = std::chrono::steady_clock::now() + kPatience;
  for (int i = 0; !ready(); ++i) {
    if (i > 100) std::this_thread::sleep_for(std::chrono::microseconds(20));
    if (std::chrono::steady_clock::now() > end) {
      std::fprintf(stderr, "simulated driver: %s was not there after 30 s\n", what);
      std::abort();
    }
  }
}

struct Fired {
  std::atomic<bool> value{false};
};

struct SimEvent {
  std::mutex mutex;
  std::shared_ptr<Fired> last;  // null: never recorded
};

class SimStream {
 public:
  SimStream() : random_(std::random_device{}()), thread_([this] { serve(); }) { thread_.detach(); }
  void push(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    ++pushed_;
    changed_.notify_all();
  }
  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    int64_t all = pushed_;
    changed_.wait(lock, [&] { return done_ >= all; });
  }
  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= pushed_;
  }

 private:
  void serve() {
    while (true) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      if (int most = max_delay_us.load(); most > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % most));
      }
      work();
      std::lock_guard<std::mutex> lock(mutex_);
      ++done_;
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  int64_t pushed_ = 0, done_ = 0;
  std::mt19937 random_;
  std::thread thread_;
};

Result run(Stream stream, std::function<void()> work) {
  if (stream == nullptr) {
    work();
  } else {
    static_cast<SimStream*>(stream)->push(std::move(work));
  }
  return 0;
}

void copy_bytes(Address to, Address from, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
}

}  // namespace

extern "C" {

Stream simulated_stream() { return new SimStream; }
void simulated_drain(Stream stream) { static_cast<SimStream*>(stream)->drain(); }
void simulated_call(Stream stream, void (*kernel)()) {
  run(stream, [kernel] { kernel(); });
}
void simulated_delays(int most_us) { max_delay_us = most_us; }
// How often the driver was called since the last time, by kind.
int simulated_count(int kind) {
  std::atomic<int>* counts[] = {&copies, &batches, &copies_2d, &mem_op_calls, &mem_ops};
  return counts[kind]->exchange(0);
}
// The next calls of that many copies fail.
void simulated_refuse(int calls) { refused = calls; }

Result cuGetErrorName(Result result, const char** name) {
  *name = result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
  return 0;
}

Result cuDriverGetVersion(int* version) {
  *version = 13010;
  return 0;
}

Result cuEventCreate(Event* event, unsigned) {
  *event = new SimEvent;
  return 0;
}

Result cuEventDestroy_v2(Event event) {
  delete static_cast<SimEvent*>(event);
  return 0;
}

Result cuEventRecord(Event event, Stream stream) {
  auto fired = std::make_shared<Fired>();
  {
    auto* it = static_cast<SimEvent*>(event);
    std::lock_guard<std::mutex> lock(it->mutex);
    it->last = fired;
  }
  return run(stream, [fired] { fired->value = true; });
}

Result cuStreamWaitEvent(Stream stream, Event event, unsigned) {
  auto* it = static_cast<SimEvent*>(event);
  std::shared_ptr<Fired> fired;
  {
    std::lock_guard<std::mutex> lock(it->mutex);
    fired = it->last;
  }
  if (fired == nullptr) return 0;
  return run(stream, [fired] { spin_until([&] { return fired->value.load(); }, "an event"); });
}

Result cuStreamBatchMemOp_v2(Stream stream, unsigned count, MemOp* given, unsigned) {
  ++mem_op_calls;
  mem_ops += static_cast<int>(count);
  std::vector<MemOp> ops(given, given + count);
  return run(stream, [ops] {
    for (const MemOp& op : ops) {
      std::atomic_ref<uint32_t> word(*reinterpret_cast<uint32_t*>(op.address));
      auto value = static_cast<uint32_t>(op.value);
      if (op.operation == kWriteValue32) {
        word.store(value, std::memory_order_release);
        continue;
      }
      bool equal = op.flags == kWaitEq;
      spin_until(
          [&] {
            uint32_t seen = word.load(std::memory_order_acquire);
            return equal ? seen == value : static_cast<int32_t>(seen - value) >= 0;
          },
          "a signal");
    }
  });
}

// One for all: nothing waits on it.
Result cuStreamCreate(Stream* stream, unsigned) {
  static SimStream* made = new SimStream;
  *stream = made;
  return 0;
}

Result cuStreamDestroy_v2(Stream) { return 0; }

Result cuStreamQuery(Stream stream) {
  return static_cast<SimStream*>(stream)->idle() ? 0 : kNotReady;
}

Result cuMemAllocHost_v2(void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  return *memory != nullptr ? 0 : 2;
}

Result cuMemFreeHost(void* memory) {
  std::free(memory);
  return 0;
}

Result cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, Stream stream) {
  return run(stream, [=] {
    for (size_t i = 0; i < bytes / sizeof(uint32_t); ++i) {
      std::atomic_ref<uint32_t> word(reinterpret_cast<uint32_t*>(from)[i]);
      static_cast<uint32_t*>(to)[i] = word.load(std::memory_order_acquire);
    }
  });
}

Result cuCtxGetCurrent(Context* context) {
  *context = nullptr;
  return 0;
}

Result cuCtxSetCurrent(Context) { return 0; }
Result cuThreadExchangeStreamCaptureMode(int*) { return 0; }

Result cuMemcpyAsync(Address to, Address from, size_t bytes, Stream stream) {
  ++copies;
  return run(stream, [=] { copy_bytes(to, from, bytes); });
}

Result cuMemcpyBatchAsync_v2(Address* to, Address* from, size_t* sizes, size_t count,
                             CopyAttributes* attributes, size_t* firsts, size_t kinds,
                             Stream stream) {
  if (refused > 0) {
    --refused;
    return 2;
  }
  // What the driver checks.
  if (stream == nullptr || count == 0 || kinds != 1 || firsts[0] != 0) return 1;
  if (attributes->source_order != kSourceInStreamOrder) return 1;
  ++batches;
  std::vector<size_t> order(count);
  for (size_t i = 0; i < count; ++i) order[i] = i;
  static std::mt19937 random(std::random_device{}());
  std::shuffle(order.begin(), order.end(), random);
  std::vector<Address> all_to(to, to + count), all_from(from, from + count);
  std::vector<size_t> all_sizes(sizes, sizes + count);
  return run(stream, [=] {
    for (size_t i : order) copy_bytes(all_to[i], all_from[i], all_sizes[i]);
  });
}

Result cuMemcpy2DAsync_v2(const Copy2D* given, Stream stream) {
  ++copies_2d;
  Copy2D copy = *given;
  if (copy.from_type != kDeviceMemory || copy.to_type != kDeviceMemory) return 1;
  if (copy.width > copy.from_pitch || copy.width > copy.to_pitch) return 1;
  return run(stream, [copy] {
    for (size_t row = 0; row < copy.height; ++row) {
      copy_bytes(copy.to_device + row * copy.to_pitch, copy.from_device + row * copy.from_pitch,
                 copy.width);
    }
  });
}

}  // extern "C"
