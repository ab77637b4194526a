// What native.py calls through ctypes. Functions only translate: each returns 0 (or a value) on
// success and -1 on failure, whose text symm_cp_error() gives in the same thread.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "channel.h"
#include "error.h"
#include "mapping.h"
#include "plan.h"
#include "probe.h"
#include "streams.h"
#include "trace.h"
#include "workspace.h"

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

Workspace& of(void* workspace) { return *static_cast<Workspace*>(workspace); }

// A failure in the calling thread ends the channel for the peers too.
template <class F>
int64_t guarded_on(void* workspace, F body) {
  try {
    return body(*of(workspace).channel);
  } catch (const std::exception& error) {
    last_error = error.what();
    of(workspace).channel->abort(last_error);
    return -1;
  }
}

}  // namespace

extern "C" {

const char* symm_cp_error() { return last_error.c_str(); }

int symm_cp_abi() { return 7; }

// `address` is the start of a rendezvoused symmetric tensor. Null on failure.
void* symm_cp_open(void* address, const char* group, const Layout* layout, int64_t timeout_ms) {
  void* result = nullptr;
  guarded([&]() -> int64_t {
    auto mapping = find_mapping(address, std::string(group));
    if (mapping == nullptr) throw std::invalid_argument("not a rendezvoused symmetric tensor");
    auto channel =
        std::make_shared<Channel>(mapping, *layout, std::chrono::milliseconds(timeout_ms));
    result = new Workspace{channel, std::make_shared<Lane>(channel)};
    return 0;
  });
  return result;
}

void symm_cp_close(void* workspace) { delete static_cast<Workspace*>(workspace); }

void symm_cp_release_groups() { release_groups(); }

int64_t symm_cp_decline(const char* group, const char* reason) {
  return guarded([&]() -> int64_t {
    decline_rendezvous(group, reason);
    return 0;
  });
}

int64_t symm_cp_run(void* workspace, const Command* commands, int count,
                    const Reference* references, void* const* operands, uint32_t epoch,
                    const char* what) {
  return guarded_on(workspace, [&](Channel& channel) -> int64_t {
    channel.run(commands, count, references, operands, epoch, what);
    return 0;
  });
}

// A handle of a plan, for collectives.cpp.
void* symm_cp_plan(const Command* commands, int count, const Reference* references,
                   int reference_count, const char* what) {
  return new std::shared_ptr<const Plan>(std::make_shared<const Plan>(
      std::vector<Command>(commands, commands + count),
      std::vector<Reference>(references, references + reference_count), what));
}

void symm_cp_plan_free(void* plan) { delete static_cast<std::shared_ptr<const Plan>*>(plan); }

// Waits for all that was submitted.
int64_t symm_cp_lane_drain(void* workspace) {
  return guarded([&]() -> int64_t {
    of(workspace).lane->wait(INT64_MAX);
    return 0;
  });
}

// Address of a peer's shard in this call, or null on failure.
void* symm_cp_shard(void* workspace, int peer, uint32_t epoch, const char* what) {
  void* result = nullptr;
  guarded_on(workspace, [&](Channel& channel) -> int64_t {
    result = channel.shard_of(peer, epoch, what);
    return 0;
  });
  return result;
}

void* symm_cp_slot(void* workspace, int rank, uint32_t epoch) {
  return of(workspace).channel->slot(rank, epoch);
}

void symm_cp_abort(void* workspace, const char* reason) { of(workspace).channel->abort(reason); }

void symm_cp_prefault(void* address, int64_t bytes) {
  prefault(address, static_cast<size_t>(bytes));
}

// Whether the CUDA driver's library loads and has what streams need: 1, or 2 when it can also copy
// in batches; -1 on failure.
int64_t symm_cp_driver(const char* path) {
  return guarded([&]() -> int64_t { return driver::load(path).batches() ? 2 : 1; });
}

// `bases[r]` is where the workspace of rank r is mapped; `processes[r]` a pidfd of rank r, which is
// closed with the streams, or -1. Null on failure.
void* symm_cp_streams_open(const char* driver, char* const* bases, int world_size, int rank,
                           const Layout* layout, int take_back, int events, const char* group,
                           int64_t timeout_ms, const int* processes) {
  void* result = nullptr;
  guarded([&]() -> int64_t {
    std::vector<Descriptor> owned;
    for (int peer = 0; peer < world_size; ++peer) owned.emplace_back(processes[peer]);
    std::vector<char*> all(bases, bases + world_size);
    result = new Streams(driver, std::move(all), rank, *layout, take_back != 0, events, group,
                         std::chrono::milliseconds(timeout_ms), std::move(owned));
    return 0;
  });
  return result;
}

void symm_cp_streams_close(void* streams) { delete static_cast<Streams*>(streams); }

int64_t symm_cp_streams_run(void* streams, const StreamCommand* commands, int count,
                            void* const* operands, void* const* lanes, uint32_t epoch,
                            int capturing, const char* what) {
  return guarded([&]() -> int64_t {
    auto* to = static_cast<Streams*>(streams);
    to->run(commands, count, operands, lanes, epoch, capturing != 0, what);
    return 0;
  });
}

void symm_cp_streams_expect(void* streams, int peer, int flag, uint32_t needed, uint32_t epoch,
                            const char* what) {
  static_cast<Streams*>(streams)->expect(peer, flag, needed, epoch, what);
}

void symm_cp_streams_give_up(void* streams) { static_cast<Streams*>(streams)->give_up(); }

// Ends the thread that looks at what streams wait for.
void symm_cp_watch_stop() { Watch::instance().stop(); }

// Begins to record what steps take, or ends.
void symm_cp_record(int on) { Recorder::instance().record(on != 0); }

// What was recorded, in memory that symm_cp_recorded_free frees; `count` says how much.
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

// Before a step that Python carries out.
void symm_cp_probe_step() { Probe::instance().step(); }

// 1 when `address` lies in symmetric memory that was rendezvoused with the group.
int symm_cp_is_symmetric(const void* address, const char* group) {
  return find_mapping(address, std::string(group)) != nullptr ? 1 : 0;
}

}  // extern "C"
