// Compares csrc/cuda/driver.h and driver.cpp, which are written by hand, with a cuda.h.
// test_driver_types.py compiles it; driver_names.inc is made by it from what driver.h and
// driver.cpp name.
#define __CUDA_API_VERSION_INTERNAL  // declares functions by the names that the library exports
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "cuda/driver.h"

using namespace symm_cp::driver;

// --- functions: what a caller puts into registers and memory must be the same ------------------

template <class Ours, class Theirs>
struct Mirrors : std::false_type {};
template <>
struct Mirrors<MemOp, CUstreamBatchMemOpParams> : std::true_type {};
template <>
struct Mirrors<Copy2D, CUDA_MEMCPY2D> : std::true_type {};

template <class Type>
constexpr bool kNumber = std::is_integral_v<Type> || std::is_enum_v<Type>;

// Numbers of one size.
template <class Ours, class Theirs>
struct Alike
    : std::bool_constant<kNumber<Ours> && kNumber<Theirs> && sizeof(Ours) == sizeof(Theirs)> {};

// What pointers point to: the same, numbers of one size, or a struct that mirrors the other.
template <class Ours, class Theirs>
struct Pointees
    : std::disjunction<std::is_same<Ours, Theirs>, Mirrors<Ours, Theirs>, Alike<Ours, Theirs>> {};
// Handles, which are pointers to the driver's own structs.
template <class Theirs>
struct Pointees<void, Theirs> : std::negation<std::is_arithmetic<Theirs>> {};
template <class Ours, class Theirs>
struct Pointees<const Ours, const Theirs> : Pointees<Ours, Theirs> {};

template <class Ours, class Theirs>
struct Alike<Ours*, Theirs*> : Pointees<Ours, Theirs> {};

template <class Ours, class Theirs>
struct SameFunction : std::false_type {};
template <class Result, class... Ours, class... Theirs>
  requires(sizeof...(Ours) == sizeof...(Theirs))
struct SameFunction<Result (*)(Ours...), CUresult(Theirs...)>
    : std::conjunction<Alike<Result, CUresult>, Alike<Ours, Theirs>...> {};

#define FUNCTION(name, member)                                              \
  static_assert(SameFunction<decltype(Api::member), decltype(name)>::value, \
                "Api::" #member " is not declared as " #name)

// --- types and constants ------------------------------------------------------------------------

#define SAME(a, b) static_assert((a) == (b), #a " is not " #b)
#define CONSTANT(ours, theirs) SAME((long long)ours, (long long)theirs)

using W = CUstreamBatchMemOpParams::CUstreamMemOpWaitValueParams_st;
using V = CUstreamBatchMemOpParams::CUstreamMemOpWriteValueParams_st;
SAME(sizeof(MemOp), sizeof(CUstreamBatchMemOpParams));
SAME(offsetof(MemOp, operation), offsetof(W, operation));
SAME(offsetof(MemOp, address), offsetof(W, address));
SAME(offsetof(MemOp, value), offsetof(W, value));
SAME(offsetof(MemOp, flags), offsetof(W, flags));
SAME(offsetof(MemOp, alias), offsetof(W, alias));
SAME(offsetof(MemOp, operation), offsetof(V, operation));
SAME(offsetof(MemOp, address), offsetof(V, address));
SAME(offsetof(MemOp, value), offsetof(V, value));
SAME(offsetof(MemOp, flags), offsetof(V, flags));
CONSTANT(kWaitValue32, CU_STREAM_MEM_OP_WAIT_VALUE_32);
CONSTANT(kWriteValue32, CU_STREAM_MEM_OP_WRITE_VALUE_32);
CONSTANT(kWaitGeq, CU_STREAM_WAIT_VALUE_GEQ);
CONSTANT(kWaitEq, CU_STREAM_WAIT_VALUE_EQ);
CONSTANT(2, CU_EVENT_DISABLE_TIMING);

SAME(sizeof(Copy2D), sizeof(CUDA_MEMCPY2D));
SAME(offsetof(Copy2D, from_x), offsetof(CUDA_MEMCPY2D, srcXInBytes));
SAME(offsetof(Copy2D, from_y), offsetof(CUDA_MEMCPY2D, srcY));
SAME(offsetof(Copy2D, from_type), offsetof(CUDA_MEMCPY2D, srcMemoryType));
SAME(offsetof(Copy2D, from_device), offsetof(CUDA_MEMCPY2D, srcDevice));
SAME(offsetof(Copy2D, from_pitch), offsetof(CUDA_MEMCPY2D, srcPitch));
SAME(offsetof(Copy2D, to_x), offsetof(CUDA_MEMCPY2D, dstXInBytes));
SAME(offsetof(Copy2D, to_y), offsetof(CUDA_MEMCPY2D, dstY));
SAME(offsetof(Copy2D, to_type), offsetof(CUDA_MEMCPY2D, dstMemoryType));
SAME(offsetof(Copy2D, to_device), offsetof(CUDA_MEMCPY2D, dstDevice));
SAME(offsetof(Copy2D, to_pitch), offsetof(CUDA_MEMCPY2D, dstPitch));
SAME(offsetof(Copy2D, width), offsetof(CUDA_MEMCPY2D, WidthInBytes));
SAME(offsetof(Copy2D, height), offsetof(CUDA_MEMCPY2D, Height));

#if CUDA_VERSION >= 12080  // batches of copies
template <>
struct Mirrors<CopyAttributes, CUmemcpyAttributes> : std::true_type {};
SAME(sizeof(Location), sizeof(CUmemLocation));
SAME(offsetof(Location, type), offsetof(CUmemLocation, type));
SAME(offsetof(Location, id), offsetof(CUmemLocation, id));
SAME(sizeof(CopyAttributes), sizeof(CUmemcpyAttributes));
SAME(offsetof(CopyAttributes, source_order), offsetof(CUmemcpyAttributes, srcAccessOrder));
SAME(offsetof(CopyAttributes, source), offsetof(CUmemcpyAttributes, srcLocHint));
SAME(offsetof(CopyAttributes, to), offsetof(CUmemcpyAttributes, dstLocHint));
SAME(offsetof(CopyAttributes, flags), offsetof(CUmemcpyAttributes, flags));
#endif

#include "driver_names.inc"
