// The functions of the CUDA driver that streams.cpp calls. They are found at run time, so nothing
// here needs a CUDA toolkit; the types mirror cuda.h (tests/cuda/ compares them with it).
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace symm_cp::driver {

using Result = int;
using Stream = void*;
using Event = void*;
using Context = void*;
using Address = uint64_t;

// A failure that the driver reported, or a missing driver.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// From this driver version on, streams may wait for values in cuMemCreate memory, such as symmetric
// memory; on older drivers such waits fail or never end. NCCL requires the same version for its
// copy-engine collectives.
constexpr int kStreamSignalsVersion = 12050;

enum MemOpKind : int { kWaitValue32 = 1, kWriteValue32 = 2 };
enum WaitFlags : unsigned { kWaitGeq = 0, kWaitEq = 1 };

// CUstreamBatchMemOpParams: the two used members of its union, which have the same layout.
struct MemOp {
  int operation;
  Address address;
  uint64_t value;
  unsigned flags;
  Address alias;  // the driver's own
  uint64_t padding;
};
static_assert(sizeof(MemOp) == 48);
constexpr size_t kMostMemOps = 255;  // per batch

struct Location {  // CUmemLocation
  int type;
  int id;
};

struct CopyAttributes {  // CUmemcpyAttributes
  int source_order;
  Location source;
  Location to;
  unsigned flags;
};
static_assert(sizeof(CopyAttributes) == 24);

constexpr int kSourceInStreamOrder = 1;      // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
constexpr unsigned kOverlapWithCompute = 1;  // CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
constexpr int kDeviceMemory = 2;             // CU_MEMORYTYPE_DEVICE
constexpr Result kNotReady = 600;            // CUDA_ERROR_NOT_READY
constexpr unsigned kNonBlocking = 1;         // CU_STREAM_NON_BLOCKING
constexpr int kCapturing = 1;                // CU_STREAM_CAPTURE_STATUS_ACTIVE
constexpr int kRelaxed = 2;                  // CU_STREAM_CAPTURE_MODE_RELAXED

struct Copy2D {  // CUDA_MEMCPY2D
  size_t from_x, from_y;
  int from_type;
  const void* from_host;
  Address from_device;
  void* from_array;
  size_t from_pitch;
  size_t to_x, to_y;
  int to_type;
  void* to_host;
  Address to_device;
  void* to_array;
  size_t to_pitch;
  size_t width, height;
};
static_assert(sizeof(Copy2D) == 128);

// To the streams of a simulated device; where they went before, after a call that issued all its
// work, or that failed.
enum HostedOps { kOpsToStreams, kOpsIssued, kOpsFailed };

struct Api {
  Result (*get_version)(int*);
  Result (*error_name)(Result, const char**);
  Result (*event_create)(Event*, unsigned);
  Result (*event_destroy)(Event);
  Result (*event_record)(Event, Stream);
  Result (*event_query)(Event);
  Result (*stream_wait_event)(Stream, Event, unsigned);
  Result (*mem_ops)(Stream, unsigned, MemOp*, unsigned);
  Result (*copy)(Address, Address, size_t, Stream);
  Result (*copy_2d)(const Copy2D*, Stream);
  Result (*copy_to_host)(void*, Address, size_t, Stream);
  Result (*host_alloc)(void**, size_t);
  Result (*host_free)(void*);
  Result (*stream_create)(Stream*, unsigned);
  Result (*stream_query)(Stream);
  Result (*context_get)(Context*);
  Result (*context_set)(Context);
  Result (*capture_mode)(int*);
  // May be missing. The second form has been there since CUDA 11.3.
  Result (*capture_info)(Stream, int* status, uint64_t* id, void* graph, void* dependencies,
                         size_t* dependency_count);
  // At most one of these two is set: batches came with CUDA 12.8, and lost an argument in 13.0.
  Result (*copy_batch)(Address*, Address*, size_t*, size_t, CopyAttributes*, size_t*, size_t,
                       Stream);
  Result (*copy_batch_12)(Address*, Address*, size_t*, size_t, CopyAttributes*, size_t*, size_t,
                          size_t*, Stream);

  // Only in drivers that tests substitute: returns the calling thread's stream; makes another
  // stream that, and returns the one before; says where torch's ops in this thread go, by
  // HostedOps.
  Stream (*hosted_stream)(int device);
  Stream (*hosted_use)(Stream);
  void (*hosted_ops)(int);

  // Returns 12050 for CUDA 12.5. Throws Error.
  int version() const;
  bool batches() const { return copy_batch != nullptr || copy_batch_12 != nullptr; }
  // Throws Error naming `what` unless `result` is success.
  void expect(Result result, const char* what) const;
};

// Loads the driver's library (`path` as for dlopen), once for each path. Throws Error.
const Api& load(const std::string& path);

}  // namespace symm_cp::driver
