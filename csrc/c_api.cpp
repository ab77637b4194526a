// The functions that symm_cp/native/library.py calls through ctypes. They only translate: each
// returns 0 (or a value) on success and -1 on failure; symm_cp_error() in the same thread returns
// the failure's text.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "base/error.h"
#include "base/pauses.h"
#include "base/probe.h"
#include "base/team.h"
#include "channel/channel.h"
#include "channel/group.h"
#include "channel/groups.h"
#include "channel/wire.h"
#include "cuda/streams.h"
#include "exchange/copy.h"
#include "exchange/exchange.h"
#include "exchange/reduce.h"
#include "exchange/trace.h"
#include "memory/blocks.h"
#include "memory/mapping.h"
#include "memory/slot_stores.h"
#include "ops/low_contention.h"

namespace {

using namespace symm_cp;

thread_local std::string last_error;

template <class F>
int64_t guarded(F body) {
  try {
    return body();
  } catch (const std::exception& error) {
    last_error = error.what();
    return -1;
  }
}

Group& of(void* group) { return **static_cast<std::shared_ptr<Group>*>(group); }

}  // namespace

extern "C" {

const char* symm_cp_error() { return last_error.c_str(); }

// See wire.h.
int64_t symm_cp_flag_offset(int flag, int writer, int world_size) {
  return flag_offset(flag, writer, world_size);
}
int64_t symm_cp_sent_offset(int word, int rank, int world_size) {
  return sent_offset(word, rank, world_size);
}

// Opens a group in which this process is rank `rank`. Not collective. `timeout_ms`: 0 for the
// process group's time-out. `offset`: moves the slots by this many bytes, for tests. Null on
// failure.
void* symm_cp_group_open(const char* name, int rank, int world_size, int64_t timeout_ms,
                         int64_t offset) {
  void* result = nullptr;
  guarded([&]() -> int64_t {
    result = new std::shared_ptr<Group>(std::make_shared<Group>(
        name, rank, world_size, std::chrono::milliseconds(timeout_ms), offset));
    return 0;
  });
  return result;
}

// Transfers not yet waited for keep their own reference to the group.
void symm_cp_group_close(void* group) { delete static_cast<std::shared_ptr<Group>*>(group); }

// Lets C++ find the group by its name.
void symm_cp_group_known(void* group) { known_as(*static_cast<std::shared_ptr<Group>*>(group)); }

void symm_cp_release_groups() { release_groups(); }

// Sets how long later calls wait for their peers. For tests.
void symm_cp_set_timeout(void* group, int64_t timeout_ms) {
  of(group).set_timeout(std::chrono::milliseconds(timeout_ms));
}

// Makes the group refuse later calls, on this rank and its peers: a wait in Python has timed out.
void symm_cp_timed_out(void* group, const char* why) { of(group).note_time_out(TimedOut(why)); }

void symm_cp_refuse(void* group, int channel, const char* reason) {
  of(group).refuse(channel, reason);
}

// Makes slots of at least `slot_bytes` on a channel. Collective unless such slots exist.
int64_t symm_cp_reserve(void* group, int channel, int64_t slot_bytes) {
  return guarded([&]() -> int64_t {
    Group& all = of(group);
    all.check_owned("reserve");
    if (channel == kAsync) all.lane().wait(INT64_MAX);
    Workspace& workspace = all.workspace(channel);
    workspace.reserve(slot_bytes);
    if (workspace.channel() != nullptr && workspace.slot_bytes() >= slot_bytes) return 0;
    const std::string call_name = "reserve " + std::to_string(slot_bytes) + " bytes";
    const int64_t number = all.next(channel);
    if (channel == kAsync) {
      all.lane().submit({number, call_name, slot_bytes}, false);
      all.lane().wait(number);
      return 0;
    }
    try {
      workspace.begin(number, slot_bytes, call_name);
    } catch (const std::exception& error) {
      all.failed(channel, number, error);
      throw;
    }
    return 0;
  });
}

// Returns the bytes of a workspace with slots of at least `slot_bytes`.
int64_t symm_cp_bytes_for(int world_size, int64_t slot_bytes) {
  return layout_of(world_size, slot_bytes).end();
}

int64_t symm_cp_slot_bytes(void* group, int channel) {
  return of(group).workspace(channel).slot_bytes();
}

// Returns the bytes of a channel's memory on this rank; 0 without memory.
int64_t symm_cp_workspace_bytes(void* group, int channel) {
  return of(group).workspace(channel).bytes();
}

int64_t symm_cp_epoch(void* group, int channel) { return of(group).workspace(channel).epoch(); }

void symm_cp_skip(void* group, int channel, int64_t calls) {
  of(group).workspace(channel).skip(calls);
}

// Releases a channel's memory; moves the slots of its next memory by `offset` bytes.
void symm_cp_move(void* group, int channel, int64_t offset) {
  of(group).set_offset(offset);
  of(group).workspace(channel).drop();
}

// Sets the steps of a kind of exchange in a group.
void symm_cp_set_loop(void* group, int channel, int kind, int loop_kind, const Command* steps,
                      int count, const Place* sources, int source_count) {
  Loop loop({steps, steps + count}, {sources, sources + source_count});
  of(group).set_loop(channel, static_cast<ExchangeKind>(kind), static_cast<LoopKind>(loop_kind),
                     std::move(loop));
}

// Runs an exchange in the calling thread (channel `sync`), or in the background and waits for it.
int64_t symm_cp_exchange(void* group, int channel, int kind, int in_place, const char* call_name,
                         void* const* input, const int64_t* input_bytes, int inputs,
                         void* const* output, const int64_t* output_bytes, int outputs, int dtype,
                         int reduce_op) {
  return guarded([&]() -> int64_t {
    Exchange exchange{static_cast<ExchangeKind>(kind), call_name};
    for (int i = 0; i < inputs; ++i) exchange.input.push_back({input[i], input_bytes[i]});
    for (int i = 0; i < outputs; ++i) exchange.output.push_back({output[i], output_bytes[i]});
    exchange.dtype = static_cast<DType>(dtype);
    exchange.reduce_op = static_cast<ReduceOp>(reduce_op);
    exchange.in_place = in_place != 0;
    if (channel == kSync) {
      run(of(group), std::move(exchange));
    } else {
      const Started started = start(of(group), std::move(exchange), false);
      of(group).lane().wait(started.number);
    }
    return 0;
  });
}

// Sets whether all ranks of the group share this host's memory.
void symm_cp_set_on_one_host(void* group, int all) { of(group).set_on_one_host(all != 0); }

// Takes the lock of the calls on the channel `sync`; -1 when a signal handler raised meanwhile.
int64_t symm_cp_lock(void* group) {
  return guarded([&]() -> int64_t {
    of(group).lock_calls();
    return 0;
  });
}

// Takes that lock and returns 1; 0 while another thread has it.
int symm_cp_try_lock(void* group) { return of(group).try_lock_calls() ? 1 : 0; }

void symm_cp_unlock(void* group) { of(group).unlock_calls(); }

// Sets the function that C++ calls with a group's name when it lacks facts about the group: see
// on_unknown_group.
void symm_cp_on_unknown_group(int (*find)(const char* name, int ask)) { on_unknown_group(find); }
void symm_cp_explain(const char* why) { explain(why); }
void symm_cp_explain_interruption(void* group, void* exception) {
  auto* const known = static_cast<std::shared_ptr<Group>*>(group);
  explain_interruption(known == nullptr ? nullptr : *known, exception);
}

// Exchanges `rounds` signals with another rank and returns the nanoseconds that they took,
// for benchmarks; -1 if one did not come for 10 seconds. Each rank passes the address of its word
// and of the other's. Words count the signals so far, `last`.
int64_t symm_cp_signal_time(void* own, void* other, uint32_t last, uint32_t rounds) {
  auto *word = static_cast<Word*>(own), *theirs = static_cast<Word*>(other);
  const auto begin = Clock::now();
  for (uint32_t round = last + 1; round - last <= rounds; ++round) {
    theirs->store(round, std::memory_order_release);
    // The peer may be one signal ahead.
    for (int spins = 1; word->load(std::memory_order_acquire) - round > 1; ++spins) {
      if (spins % 1000 != 0) {
        cpu_relax();
        continue;
      }
      if (Clock::now() - begin > std::chrono::seconds(10)) return -1;
      sched_yield();
    }
  }
  return std::chrono::nanoseconds(Clock::now() - begin).count();
}

// Sets how many bytes of freed results the process keeps; negative: the default.
void symm_cp_keep_results(int64_t bytes) { Blocks::instance().set_limit(bytes); }

// Unmaps the memory of freed results; returns its size.
int64_t symm_cp_empty_cache() {
  release_dropped_results();
  return static_cast<int64_t>(Blocks::instance().empty());
}

void symm_cp_result_memory(BlockUsage* usage) { *usage = Blocks::instance().usage(); }

// See reduce.h and copy.h.
int64_t symm_cp_reduce(void* out, const void* const* sources, int count, int64_t elements,
                       int dtype, int op, int streaming) {
  return guarded([&]() -> int64_t {
    const Team team(own_cores());
    reduce(out, sources, count, elements, static_cast<DType>(dtype), static_cast<ReduceOp>(op),
           streaming != 0);
    return 0;
  });
}

// See team.h; `threads` is a value of its enumeration.
void symm_cp_set_threads(int threads, int background) {
  set_threads(static_cast<Threads>(threads));
  set_background_threads(background);
}

// Returns how often threads divided a copy or a reduction. For tests.
int64_t symm_cp_divisions() { return Team::divisions(); }

int symm_cp_reducible(int dtype, int op) {
  return reducible(static_cast<DType>(dtype), static_cast<ReduceOp>(op)) ? 1 : 0;
}

void symm_cp_copy(void* to, const void* from, int64_t bytes, int streaming) {
  const Team team(own_cores());
  copy_bytes(to, from, bytes, streaming != 0);
}

// Copies `heads` matrices of `rows` rows of `row` bytes, which lie side by side in `from`, to
// contiguous matrices.
void symm_cp_pack_heads(void* to, const void* from, int64_t heads, int64_t rows, int64_t row) {
  const Team team(own_cores());
  ResultStores::of_thread().run(heads * rows * row, [&](bool past_caches) {
    auto* source = static_cast<char*>(const_cast<void*>(from));
    copy_planes({{static_cast<char*>(to), rows * row, row},
                 {source, row, heads * row},
                 heads,
                 rows,
                 row,
                 past_caches});
  });
}

// Copies a result, with the faster kind of stores.
void symm_cp_copy_result(void* to, const void* from, int64_t bytes) {
  const Team team(own_cores());
  copy_result(to, from, bytes);
}

// See slot_stores.h: sets `past_caches[i]` to whether store i of `bytes` bypasses the caches, when
// it takes `usual[i]` seconds a byte through the caches and `past[i]` past them. For tests.
void symm_cp_slot_stores(int64_t bytes, const double* usual, const double* past, int64_t count,
                         uint8_t* past_caches) {
  SlotStores stores;
  for (int64_t i = 0; i < count; ++i) {
    past_caches[i] = stores.next(bytes) ? 1 : 0;
    const double pace = past_caches[i] != 0 ? past[i] : usual[i];
    const std::chrono::duration<double> time(pace * static_cast<double>(bytes));
    stores.add(bytes, past_caches[i] != 0, time);
  }
}

// Loads the driver's library with the functions that streams need: returns 1, or 2 when it can also
// copy in batches; -1 on failure.
int64_t symm_cp_driver(const char* path) {
  return guarded([&]() -> int64_t { return driver::load(path).batches() ? 2 : 1; });
}

// Returns the driver's version, such as 12050 for CUDA 12.5; -1 on failure.
int64_t symm_cp_driver_version(const char* path) {
  return guarded([&]() -> int64_t { return driver::load(path).version(); });
}

// Returns the first driver version on which streams can signal.
int symm_cp_stream_signals_version() { return driver::kStreamSignalsVersion; }

// `bases[r]` is the address at which rank r's workspace is mapped; `processes[r]` a pidfd of rank
// r, which closes with the streams, or -1. Null on failure.
void* symm_cp_streams_open(const char* driver, char* const* bases, int world_size, int rank,
                           const WorkspaceLayout* layout, int reset_flags, int events,
                           const char* group, int64_t timeout_ms, const int* processes) {
  void* result = nullptr;
  guarded([&]() -> int64_t {
    std::vector<Descriptor> owned;
    for (int peer = 0; peer < world_size; ++peer) owned.emplace_back(processes[peer]);
    std::vector<char*> all(bases, bases + world_size);
    result = new Streams(driver, std::move(all), rank, *layout, reset_flags != 0, events, group,
                         std::chrono::milliseconds(timeout_ms), std::move(owned));
    return 0;
  });
  return result;
}

void symm_cp_streams_close(void* streams) { delete static_cast<Streams*>(streams); }

int64_t symm_cp_streams_run(void* streams, const Command* commands, int count,
                            void* const* operands, void* const* lanes, uint32_t epoch,
                            int capturing, const char* call_name) {
  return guarded([&]() -> int64_t {
    auto* to = static_cast<Streams*>(streams);
    to->run(commands, count, operands, lanes, epoch, capturing != 0, call_name);
    return 0;
  });
}

void symm_cp_streams_expect(void* streams, int peer, int flag, uint32_t needed, uint32_t epoch,
                            const char* call_name) {
  static_cast<Streams*>(streams)->expect(peer, flag, needed, epoch, call_name);
}

int64_t symm_cp_streams_give_up(void* streams) {
  return guarded([&]() -> int64_t {
    static_cast<Streams*>(streams)->give_up();
    return 0;
  });
}

// Returns 1 once the streams have passed the point of symm_cp_streams_give_up, else 0; -1 on
// failure.
int64_t symm_cp_streams_ended(void* streams) {
  return guarded([&]() -> int64_t { return static_cast<Streams*>(streams)->ended() ? 1 : 0; });
}

int64_t symm_cp_streams_epoch(void* streams) { return static_cast<Streams*>(streams)->epoch(); }
int64_t symm_cp_streams_next_epoch(void* streams) {
  return static_cast<Streams*>(streams)->next_epoch();
}
void symm_cp_streams_set_epoch(void* streams, int64_t epoch) {
  static_cast<Streams*>(streams)->set_epoch(epoch);
}
// Returns 1 if the last call's caller stream was not `stream`.
int symm_cp_streams_moved(void* streams, void* stream) {
  const auto last = static_cast<Streams*>(streams)->last_stream();
  return last && *last != stream ? 1 : 0;
}

void symm_cp_streams_set_single_copies(void* streams, int single) {
  static_cast<Streams*>(streams)->set_single_copies(single != 0);
}

// Returns the calling thread's context, for another thread to make current; null on failure.
void* symm_cp_context(const char* driver) {
  driver::Context context = nullptr;
  guarded([&]() -> int64_t { return driver::load(driver).context_get(&context); });
  return context;
}

int64_t symm_cp_set_context(const char* driver, void* context) {
  return guarded([&]() -> int64_t {
    const driver::Api& api = driver::load(driver);
    api.expect(api.context_set(context), "cuCtxSetCurrent");
    return 0;
  });
}

// Opens a driver stream that waits for no other stream and is never destroyed; null on failure.
void* symm_cp_stream_open(const char* driver) {
  driver::Stream stream = nullptr;
  guarded([&]() -> int64_t {
    const driver::Api& api = driver::load(driver);
    api.expect(api.stream_create(&stream, driver::kNonBlocking), "cuStreamCreate");
    return 0;
  });
  return stream;
}

// Returns 1 when all work on a stream has ended, 0 when not, -1 when it failed. Never waits.
int64_t symm_cp_stream_ended(const char* driver, void* stream) {
  return guarded([&]() -> int64_t {
    const driver::Api& api = driver::load(driver);
    const driver::Result result = api.stream_query(stream);
    if (result == driver::kNotReady) return 0;
    api.expect(result, "cuStreamQuery");
    return 1;
  });
}

// Returns the number of the stream's capture, from 1; 0 when it is not capturing or the driver does
// not number captures; -1 on failure.
int64_t symm_cp_capture_id(const char* driver, void* stream) {
  return guarded([&]() -> int64_t {
    const driver::Api& api = driver::load(driver);
    if (api.capture_info == nullptr) return 0;
    int status = 0;
    uint64_t id = 0;
    api.expect(api.capture_info(stream, &status, &id, nullptr, nullptr, nullptr),
               "cuStreamGetCaptureInfo");
    return status == driver::kCapturing ? static_cast<int64_t>(id) : 0;
  });
}

// Ends the threads that watch the waits of streams.
void symm_cp_watch_stop() { Watcher::instance().stop(); }

// Starts or ends the recording of steps.
void symm_cp_record(int on) { Recorder::instance().record(on != 0); }

// The recorded steps, in memory that symm_cp_recorded_free frees; `count`: their number.
TraceEvent* symm_cp_recorded(int64_t* count) {
  const auto events = Recorder::instance().take();
  auto* copy = new TraceEvent[events.size()];
  std::copy(events.begin(), events.end(), copy);
  *count = static_cast<int64_t>(events.size());
  return copy;
}

void symm_cp_recorded_free(TraceEvent* events) { delete[] events; }

void symm_cp_probe_begin(uint64_t seed, int64_t delay_us, int64_t fatal) {
  Probe::instance().begin(seed, delay_us, fatal);
}

int64_t symm_cp_probe_end() { return Probe::instance().end(); }

// From now on threads pause at random around waits, for up to `longest_us`; 0 ends that.
void symm_cp_set_pauses(uint64_t seed, int64_t longest_us) { set_pauses(seed, longest_us); }

// Sets the number of the rendezvous with the group that made the symmetric memory of `address`, and
// the offset in it. Returns 0 for other memory, else 1.
int symm_cp_symmetric_place(const void* address, const char* group, int64_t* place) {
  const auto mapping = find_mapping(address, std::string(group));
  if (mapping == nullptr) return 0;
  place[0] = mapping->sequence();
  place[1] = static_cast<const char*>(address) -
             static_cast<const char*>(mapping->data()[mapping->rank()]);
  return 1;
}

// Returns the address of such a place of a rank; null if this rank has freed the memory.
void* symm_cp_symmetric_address(void* group, int rank, int64_t sequence, int64_t offset) {
  void* result = nullptr;
  guarded([&]() -> int64_t {
    const auto peers = of(group).known_peers();
    const auto mapping = peers == nullptr ? nullptr : find_mapping(*peers, sequence);
    if (mapping == nullptr)
      throw PeerError("rank " + std::to_string(rank) + " gave a symmetric tensor that rank " +
                      std::to_string(of(group).rank()) + " has freed");
    result = static_cast<char*>(mapping->data()[rank]) + offset;
    return 0;
  });
  return result;
}

}  // extern "C"
