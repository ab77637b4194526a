// A stand-in for the CUDA driver that runs on CPU memory, for tests. It does what the driver
// promises and no more (driver_model.h): copies of a batch in any order, a wait for an event that
// was not recorded yet is none, and errors where the driver of the chosen version reports them.
//
// The functions `simulated_*` are for simulated.py. The library that symm_cp loads is one of those
// made from driver_batch.cpp, which differ in the batched copies that drivers have had.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "driver_model.h"

using namespace symm_cp::driver;
using simulated::Kind;
using simulated::Owner;
using simulated::settings;
using simulated::SimEvent;
using simulated::SimStream;

namespace {

constexpr int kDevices = 8;

// What the driver was asked for, by kind: see `count` and `copied` in simulated.py.
enum Count {
  kCopies,
  kBatches,
  k2d,
  kMemOpCalls,
  kMemOps,
  kLocal,
  kPeer,
  kLocalOverlap,
  kPeerOverlap,
  kCounts
};
std::atomic<int> counts[kCounts];
std::atomic<int> refused_batches{0};

SimStream* default_streams[kDevices];
// Held while a kernel is loaded, which other calls of the driver wait for.
std::mutex context_lock;

struct Current {
  int device = 0;
  int context = 0;       // device + 1, or 0: none
  int capture_mode = 0;  // of this thread's unsafe calls: global
};
thread_local Current current;

int context_of_thread() { return settings().contexts ? current.context : current.device + 1; }

// Every function of the driver that needs a context begins with it.
template <class Body>
Result call(Body body) {
  std::unique_lock<std::mutex> lock(context_lock, std::defer_lock);
  // Python code of a kernel stands for the host's, which is through with it when others wait.
  if (simulated::served_here() == nullptr) lock.lock();
  return context_of_thread() == 0 ? simulated::kInvalidContext : body();
}

template <class Body>
Result call_on(Stream handle, Body body) {
  return call([&]() -> Result {
    auto* stream = static_cast<SimStream*>(handle);
    if (stream == nullptr) stream = default_streams[context_of_thread() - 1];
    if (stream->device + 1 != context_of_thread()) return simulated::kInvalidHandle;
    return body(*stream);
  });
}

// A call that may break another thread's capture, unless this thread has said that it may not.
template <class Body>
Result unsafe_call(Body body) {
  return call([&]() -> Result {
    if (current.capture_mode == 0 && simulated::capturing_anywhere())
      return simulated::kCaptureUnsupported;
    return body();
  });
}

Result issue(SimStream& stream, simulated::Command command) {
  if (stream.capture != nullptr)
    simulated::capture_command(&stream, std::move(command));
  else
    stream.push(std::move(command));
  return 0;
}

std::atomic_ref<uint32_t> word_at(Address address) {
  return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(address));
}

void copy_bytes(Address to, Address from, size_t bytes, const char* name) {
  if (bytes == sizeof(uint32_t) && to % sizeof(uint32_t) == 0 && from % sizeof(uint32_t) == 0) {
    // May be a signal, whose reader must see what was copied before.
    word_at(to).store(word_at(from).load(std::memory_order_relaxed), std::memory_order_release);
  } else {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  }
  simulated::note_write(to, bytes, name);
}

bool with_peer(Address to, Address from) {
  return simulated::owner_of(to) == Owner::kPeer || simulated::owner_of(from) == Owner::kPeer;
}

// Counts a copy, and says how it is carried out.
simulated::Command copy_command(const char* name, Address to, Address from, size_t bytes,
                                unsigned flags) {
  const bool peer = with_peer(to, from), overlap = (flags & kOverlapWithCompute) != 0;
  ++counts[peer ? (overlap ? kPeerOverlap : kPeer) : (overlap ? kLocalOverlap : kLocal)];
  simulated::Command command{name, peer ? Kind::kWork : Kind::kLocalCopy};
  command.carried = peer ? bytes : 0;
  if (peer && simulated::faulty(simulated::kFaultyPeerCopy, simulated::kHangs)) {
    command.kind = Kind::kWait;
    command.about = [] { return "a copy that hangs"; };
  }
  return command;
}

bool ignored(const simulated::Command& command) {
  return command.kind == Kind::kWork &&
         simulated::faulty(simulated::kFaultyPeerCopy, simulated::kIgnored);
}

Result issue_copy(SimStream& stream, simulated::Command command, std::function<void()> copy) {
  if (command.kind != Kind::kLocalCopy &&
      simulated::faulty(simulated::kFaultyPeerCopy, simulated::kRefuses))
    return simulated::kNotSupported;
  if (ignored(command)) copy = [] {};
  if (command.kind == Kind::kWait) {
    command.ready = [copy] {
      if (simulated::faulty(simulated::kFaultyPeerCopy, simulated::kHangs)) return false;
      copy();
      return true;
    };
  } else {
    command.run = std::move(copy);
  }
  return issue(stream, std::move(command));
}

Result check_mem_op(const MemOp& op) {
  Owner owner = simulated::owner_of(op.address);
  if (owner == Owner::kPeer) owner = simulated::owner_now(op.address);
  const int version = settings().version;
  if (op.operation == kWriteValue32) {
    if (simulated::faulty(simulated::kFaultyWrite, simulated::kRefuses))
      return simulated::kNotSupported;
    // NCCL issue 2052.
    return owner == Owner::kPeer && version >= 13010 ? simulated::kNotSupported : 0;
  }
  if (op.operation != kWaitValue32) return simulated::kInvalidValue;
  if (simulated::faulty(simulated::kFaultyWait, simulated::kRefuses))
    return simulated::kNotSupported;
  // Symmetric memory is made by cuMemCreate.
  return owner != Owner::kOrdinary && version < 12050 ? simulated::kNotSupported : 0;
}

simulated::Command write_command(const MemOp& op) {
  simulated::Command command{"cuStreamWriteValue"};
  command.writes_signal = true;
  const auto address = op.address;
  const auto value = static_cast<uint32_t>(op.value);
  command.run = [address, value] {
    if (simulated::faulty(simulated::kFaultyWrite, simulated::kIgnored)) return;
    word_at(address).store(value, std::memory_order_release);
    simulated::note_write(address, sizeof value, "cuStreamWriteValue");
  };
  return command;
}

simulated::Command wait_command(const MemOp& op) {
  simulated::Command command{"a signal", Kind::kWait};
  command.for_signal = true;
  const auto address = op.address;
  const auto value = static_cast<uint32_t>(op.value);
  const bool equal = op.flags == kWaitEq;
  command.ready = [address, value, equal] {
    if (simulated::faulty(simulated::kFaultyWait, simulated::kHangs)) return false;
    if (simulated::faulty(simulated::kFaultyWait, simulated::kIgnored)) return true;
    if (simulated::faulty(simulated::kFaultyWait, simulated::kReorders))
      simulated::served_here()->run_ahead();
    const uint32_t seen = word_at(address).load(std::memory_order_acquire);
    return equal ? seen == value : static_cast<int32_t>(seen - value) >= 0;
  };
  command.about = [address, value] {
    return "a signal: " + std::to_string(value) + ", seen " + std::to_string(word_at(address));
  };
  return command;
}

}  // namespace

extern "C" {

// --- for simulated.py

// Without a thread the stream runs what `simulated_serve` gets to.
Stream simulated_stream(int device, int own_thread) {
  return new SimStream(device, own_thread != 0);
}
void simulated_serve(Stream stream) { static_cast<SimStream*>(stream)->serve(); }
void simulated_default_stream(int device, Stream stream) {
  default_streams[device] = static_cast<SimStream*>(stream);
}
void simulated_destroy(Stream stream) { static_cast<SimStream*>(stream)->destroy(); }
void simulated_drain(Stream stream) { static_cast<SimStream*>(stream)->drain(); }
void simulated_drain_all() { simulated::drain_all(); }

// Has a stream run a function: 0 for the host alone, 1 a kernel, 2 one that polls.
void simulated_call(Stream handle, void (*function)(), int kind, const char* name) {
  const Kind kinds[] = {Kind::kHost, Kind::kKernel, Kind::kPollingKernel};
  simulated::Command command{name, kinds[kind]};
  command.run = [function] { function(); };
  issue(*static_cast<SimStream*>(handle), std::move(command));
}

// Loads a kernel, or allocates: all that was issued ends first, and nobody else gets in.
void simulated_load() {
  std::lock_guard<std::mutex> lock(context_lock);
  simulated::drain_all();
}

// Sets one of the settings, by its place in `Settings`.
void simulated_set(int setting, int value) {
  auto& all = settings();
  if (setting == 0) all.delay_us = value;
  if (setting == 1) all.version = value;
  if (setting == 2) all.patience_ms = value;
  if (setting == 3) all.one_queue = value != 0;
  if (setting == 4) all.multiprocessors = value != 0;
  if (setting == 5) all.contexts = value != 0;
  if (setting == 6) all.counts_deadlocks = value != 0;
  if (setting >= 7) all.faults[setting - 7] = value;
}

// How many waits did not end since the last time, where they are counted.
int simulated_deadlocks() { return simulated::deadlocks.exchange(0); }

// How often the driver was called since the last time, by kind.
int simulated_count(int kind) { return counts[kind].exchange(0); }
// The next calls of that many batched copies fail.
void simulated_refuse(int calls) { refused_batches = calls; }

// The device that the calling thread uses from now on. torch's own calls bind its context.
void simulated_set_device(int device, int bind) {
  current.device = device;
  if (bind != 0) current.context = device + 1;
}
int simulated_get_device() { return current.device; }

Result simulated_capture_begin(Stream stream) {
  return simulated::capture_begin(static_cast<SimStream*>(stream));
}
Result simulated_capture_end(Stream stream, int partial, void** graph) {
  return simulated::capture_end(static_cast<SimStream*>(stream), partial != 0,
                                reinterpret_cast<simulated::Graph**>(graph));
}
Result simulated_replay(void* graph, Stream stream, int on_captured_streams) {
  std::lock_guard<std::mutex> lock(context_lock);
  return simulated::replay(static_cast<simulated::Graph*>(graph), static_cast<SimStream*>(stream),
                           on_captured_streams != 0);
}
void simulated_graph_destroy(void* graph) {
  simulated::graph_destroy(static_cast<simulated::Graph*>(graph));
}

// The stream that the calling thread's tensors belong to: it may use what they leave, in order.
thread_local SimStream* chosen_stream = nullptr;
int simulated_on_stream() { return simulated::served_here() != nullptr; }
void* simulated_owning_stream() {
  if (simulated::served_here() != nullptr) return simulated::served_here();
  return chosen_stream != nullptr ? chosen_stream : default_streams[current.device];
}

// What csrc/cuda/driver.h asks of drivers that stand in for one. Handle 0 is the default stream.
Stream symm_cp_hosted_stream(int) { return chosen_stream; }
Stream symm_cp_hosted_use(Stream stream) {
  return std::exchange(chosen_stream, static_cast<SimStream*>(stream));
}
void (*ops_to)(int) = nullptr;  // of simulated.py
void simulated_ops(void (*function)(int)) { ops_to = function; }
void symm_cp_hosted_ops(int where) { ops_to(where); }

// Calls a function with a block that was freed, once its stream is past this point.
void simulated_when_passed(void* owner, void (*function)(void*), void* block) {
  auto* stream = static_cast<SimStream*>(owner);
  if (stream == nullptr || stream == simulated::served_here()) return function(block);
  if (stream->capture != nullptr) return;  // the graph keeps it
  simulated::Command command{"", Kind::kHost};
  command.run = [function, block] { function(block); };
  stream->push(std::move(command));
}

// Says which command wrote last to a range; for the allocator.
void simulated_last_write(Address address, size_t bytes, char* text, size_t room) {
  std::snprintf(text, room, "%s", simulated::last_write(address, bytes).c_str());
}

// --- the driver

Result cuDriverGetVersion(int* version) {
  *version = settings().version;
  return 0;
}

Result cuGetErrorName(Result result, const char** name) {
  struct {
    Result result;
    const char* name;
  } const names[] = {{1, "CUDA_ERROR_INVALID_VALUE"},
                     {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                     {201, "CUDA_ERROR_INVALID_CONTEXT"},
                     {400, "CUDA_ERROR_INVALID_HANDLE"},
                     {600, "CUDA_ERROR_NOT_READY"},
                     {801, "CUDA_ERROR_NOT_SUPPORTED"},
                     {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
                     {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
                     {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"},
                     {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
                     {907, "CUDA_ERROR_CAPTURED_EVENT"}};
  *name = "CUDA_ERROR_UNKNOWN";
  for (const auto& known : names)
    if (known.result == result) *name = known.name;
  return 0;
}

Result cuEventCreate(Event* event, unsigned) {
  return call([&] {
    auto* made = new SimEvent;
    made->device = context_of_thread() - 1;
    *event = made;
    return 0;
  });
}

Result cuEventDestroy_v2(Event event) {
  delete static_cast<SimEvent*>(event);
  return 0;
}

Result cuEventRecord(Event handle, Stream stream_handle) {
  return call_on(stream_handle, [&](SimStream& stream) -> Result {
    auto* event = static_cast<SimEvent*>(handle);
    if (event->device != stream.device) return simulated::kInvalidHandle;
    if (stream.capture != nullptr) return simulated::capture_record(&stream, event);
    auto fired = std::make_shared<simulated::Fired>();
    {
      std::lock_guard<std::mutex> lock(event->mutex);
      event->last = fired;
      event->graph = 0;
    }
    simulated::Command command{"cuEventRecord"};
    command.run = [fired] { fired->value = true; };
    return issue(stream, std::move(command));
  });
}

Result cuStreamWaitEvent(Stream stream_handle, Event handle, unsigned) {
  return call_on(stream_handle, [&](SimStream& stream) -> Result {
    auto* event = static_cast<SimEvent*>(handle);
    std::shared_ptr<simulated::Fired> fired;
    int graph = 0;
    {
      std::lock_guard<std::mutex> lock(event->mutex);
      fired = event->last;
      graph = event->graph;
    }
    if (graph != 0 || (stream.capture != nullptr && fired != nullptr))
      return simulated::capture_wait(&stream, event);
    if (fired == nullptr) return 0;
    simulated::Command command{"an event", Kind::kWait};
    command.ready = [fired] { return fired->value.load(); };
    command.about = [] { return "an event"; };
    return issue(stream, std::move(command));
  });
}

Result cuEventQuery(Event handle) {
  return unsafe_call([&]() -> Result {
    auto* event = static_cast<SimEvent*>(handle);
    std::lock_guard<std::mutex> lock(event->mutex);
    if (event->graph != 0) return simulated::kCapturedEvent;
    return event->last == nullptr || event->last->value ? 0 : kNotReady;
  });
}

Result cuStreamBatchMemOp_v2(Stream handle, unsigned count, MemOp* given, unsigned) {
  return call_on(handle, [&](SimStream& stream) -> Result {
    if (count == 0 || count > kMostMemOps) return simulated::kInvalidValue;
    for (unsigned i = 0; i < count; ++i)
      if (const Result result = check_mem_op(given[i])) return result;
    ++counts[kMemOpCalls];
    counts[kMemOps] += static_cast<int>(count);
    for (unsigned i = 0; i < count; ++i) {
      const bool writes = given[i].operation == kWriteValue32;
      auto command = writes ? write_command(given[i]) : wait_command(given[i]);
      command.at_once = i > 0;
      issue(stream, std::move(command));
    }
    return 0;
  });
}

Result cuStreamCreate(Stream* stream, unsigned) {
  return call([&] {
    *stream = new SimStream(context_of_thread() - 1, true);
    return 0;
  });
}

Result cuStreamQuery(Stream handle) {
  return call_on(handle, [](SimStream& stream) -> Result {
    if (const Result result = simulated::refuse_in_capture(&stream)) return result;
    return stream.idle() ? 0 : kNotReady;
  });
}

Result cuStreamSynchronize(Stream handle) {
  SimStream* waited = nullptr;
  const Result result = call_on(handle, [&](SimStream& stream) {
    waited = &stream;
    return simulated::refuse_in_capture(&stream);
  });
  if (result == 0) waited->drain();
  return result;
}

Result cuStreamIsCapturing(Stream handle, int* status) {
  return call_on(handle, [&](SimStream& stream) {
    *status = stream.capture != nullptr ? 1 : 0;
    return 0;
  });
}

Result cuStreamGetCaptureInfo_v2(Stream handle, int* status, uint64_t* id, void**, const void**,
                                 size_t*) {
  return call_on(handle, [&](SimStream& stream) {
    *status = stream.capture != nullptr ? 1 : 0;
    *id = stream.capture != nullptr ? stream.capture->number : 0;
    return 0;
  });
}

Result cuMemAllocHost_v2(void** memory, size_t bytes) {
  return unsafe_call([&] {
    *memory = std::malloc(bytes);
    return *memory != nullptr ? 0 : simulated::kOutOfMemory;
  });
}

Result cuMemFreeHost(void* memory) {
  std::free(memory);
  return 0;
}

Result cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, Stream handle) {
  return call_on(handle, [&](SimStream& stream) {
    simulated::Command command{"cuMemcpyDtoHAsync"};
    command.run = [=] {
      for (size_t i = 0; i < bytes / sizeof(uint32_t); ++i)
        static_cast<uint32_t*>(to)[i] =
            word_at(from + i * sizeof(uint32_t)).load(std::memory_order_acquire);
    };
    return issue(stream, std::move(command));
  });
}

Result cuCtxGetCurrent(Context* context) {
  *context = reinterpret_cast<Context>(static_cast<intptr_t>(context_of_thread()));
  return 0;
}

Result cuCtxSetCurrent(Context context) {
  // It waits for whoever has the context locked, as other calls do.
  std::unique_lock<std::mutex> lock(context_lock, std::defer_lock);
  if (simulated::served_here() == nullptr) lock.lock();
  current.context = static_cast<int>(reinterpret_cast<intptr_t>(context));
  if (current.context != 0) current.device = current.context - 1;
  return 0;
}

Result cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, current.capture_mode);
  return 0;
}

Result cuMemcpyAsync(Address to, Address from, size_t bytes, Stream handle) {
  return call_on(handle, [&](SimStream& stream) {
    ++counts[kCopies];
    return issue_copy(stream, copy_command("cuMemcpyAsync", to, from, bytes, 0),
                      [=] { copy_bytes(to, from, bytes, "cuMemcpyAsync"); });
  });
}

Result cuMemcpy2DAsync_v2(const Copy2D* given, Stream handle) {
  return call_on(handle, [&](SimStream& stream) -> Result {
    const Copy2D copy = *given;
    if (copy.from_type != kDeviceMemory || copy.to_type != kDeviceMemory) return 1;
    if (copy.width > copy.from_pitch || copy.width > copy.to_pitch) return 1;
    ++counts[k2d];
    auto command = copy_command("cuMemcpy2DAsync", copy.to_device, copy.from_device,
                                copy.width * copy.height, 0);
    return issue_copy(stream, std::move(command), [copy] {
      for (size_t row = 0; row < copy.height; ++row)
        copy_bytes(copy.to_device + row * copy.to_pitch, copy.from_device + row * copy.from_pitch,
                   copy.width, "cuMemcpy2DAsync");
    });
  });
}

// What all kinds of batched copies do. The library that is loaded has the one of its version.
Result simulated_batch(Address* to, Address* from, size_t* sizes, size_t count,
                       CopyAttributes* attributes, size_t* firsts, size_t kinds, Stream handle) {
  // What the driver checks.
  if (handle == nullptr || count == 0 || kinds == 0 || kinds > count || firsts[0] != 0) return 1;
  for (size_t i = 0; i < kinds; ++i) {
    if (i > 0 && (firsts[i] <= firsts[i - 1] || firsts[i] >= count)) return 1;
    const int order = attributes[i].source_order;
    if (order != kSourceInStreamOrder) return 1;
  }
  for (size_t i = 0; i < count; ++i)
    if (sizes[i] == 0 || to[i] == 0 || from[i] == 0) return 1;
  return call_on(handle, [&](SimStream& stream) -> Result {
    if (refused_batches > 0) {
      --refused_batches;
      return simulated::kOutOfMemory;
    }
    if (const Result result = simulated::refuse_in_capture(&stream)) return result;
    using namespace simulated;
    if (faulty(kFaultyBatch, kRefuses)) return simulated::kNotSupported;
    ++counts[kBatches];
    std::vector<size_t> order(count);
    for (size_t i = 0; i < count; ++i) order[i] = i;
    static std::mt19937 random(std::random_device{}());
    std::shuffle(order.begin(), order.end(), random);
    bool first = true;
    for (size_t i : order) {
      const size_t kind = std::upper_bound(firsts, firsts + kinds, i) - firsts - 1;
      auto command =
          copy_command("cuMemcpyBatchAsync", to[i], from[i], sizes[i], attributes[kind].flags);
      command.at_once = !std::exchange(first, false);
      std::function<void()> copy = [to = to[i], from = from[i], bytes = sizes[i]] {
        copy_bytes(to, from, bytes, "cuMemcpyBatchAsync");
      };
      if (faulty(kFaultyBatch, kIgnored)) copy = [] {};
      if (const Result result = issue_copy(stream, std::move(command), std::move(copy)))
        return result;
    }
    return 0;
  });
}

}  // extern "C"
