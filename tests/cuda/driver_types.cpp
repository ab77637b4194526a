// Compares the types of csrc/driver.h, which are declared by hand, with those of cuda.h.
#include <cuda.h>
#include <cstddef>
#include "../../csrc/driver.h"
using namespace symm_cp::driver;
#define SAME(a, b) static_assert(a == b, #a " " #b)
using W = CUstreamBatchMemOpParams::CUstreamMemOpWaitValueParams_st;
using V = CUstreamBatchMemOpParams::CUstreamMemOpWriteValueParams_st;
SAME(sizeof(MemOp), sizeof(CUstreamBatchMemOpParams));
SAME(offsetof(MemOp, address), offsetof(W, address));
SAME(offsetof(MemOp, value), offsetof(W, value));
SAME(offsetof(MemOp, flags), offsetof(W, flags));
SAME(offsetof(MemOp, alias), offsetof(W, alias));
SAME(offsetof(MemOp, address), offsetof(V, address));
SAME(offsetof(MemOp, value), offsetof(V, value));
SAME(offsetof(MemOp, flags), offsetof(V, flags));
SAME((int)kWaitValue32, (int)CU_STREAM_MEM_OP_WAIT_VALUE_32);
SAME((int)kWriteValue32, (int)CU_STREAM_MEM_OP_WRITE_VALUE_32);
SAME((int)kWaitGeq, (int)CU_STREAM_WAIT_VALUE_GEQ);
SAME((int)kWaitEq, (int)CU_STREAM_WAIT_VALUE_EQ);
SAME(sizeof(CopyAttributes), sizeof(CUmemcpyAttributes));
SAME(offsetof(CopyAttributes, flags), offsetof(CUmemcpyAttributes, flags));
SAME(offsetof(CopyAttributes, to), offsetof(CUmemcpyAttributes, dstLocHint));
SAME((int)kSourceInStreamOrder, (int)CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
SAME((int)kOverlapWithCompute, (int)CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
SAME(sizeof(Copy2D), sizeof(CUDA_MEMCPY2D));
SAME(offsetof(Copy2D, from_device), offsetof(CUDA_MEMCPY2D, srcDevice));
SAME(offsetof(Copy2D, from_pitch), offsetof(CUDA_MEMCPY2D, srcPitch));
SAME(offsetof(Copy2D, to_device), offsetof(CUDA_MEMCPY2D, dstDevice));
SAME(offsetof(Copy2D, to_type), offsetof(CUDA_MEMCPY2D, dstMemoryType));
SAME(offsetof(Copy2D, to_pitch), offsetof(CUDA_MEMCPY2D, dstPitch));
SAME(offsetof(Copy2D, width), offsetof(CUDA_MEMCPY2D, WidthInBytes));
SAME(offsetof(Copy2D, height), offsetof(CUDA_MEMCPY2D, Height));
SAME((int)kDeviceMemory, (int)CU_MEMORYTYPE_DEVICE);
SAME((int)CU_EVENT_DISABLE_TIMING, 2);
SAME((int)kNotReady, (int)CUDA_ERROR_NOT_READY);
SAME((int)kNonBlocking, (int)CU_STREAM_NON_BLOCKING);
SAME((int)kCapturing, (int)CU_STREAM_CAPTURE_STATUS_ACTIVE);
SAME((int)kRelaxed, (int)CU_STREAM_CAPTURE_MODE_RELAXED);
// signatures
CUresult (*a)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned) = cuStreamBatchMemOp;
CUresult (*b)(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t,
              CUstream) = cuMemcpyBatchAsync;
CUresult (*c)(CUdeviceptr, CUdeviceptr, size_t, CUstream) = cuMemcpyAsync;
CUresult (*d)(CUstream, CUevent, unsigned) = cuStreamWaitEvent;
CUresult (*e)(CUevent, CUstream) = cuEventRecord;
CUresult (*f)(CUevent*, unsigned) = cuEventCreate;
CUresult (*g)(const CUDA_MEMCPY2D*, CUstream) = cuMemcpy2DAsync;
CUresult (*h)(void*, CUdeviceptr, size_t, CUstream) = cuMemcpyDtoHAsync;
CUresult (*i)(void**, size_t) = cuMemAllocHost;
CUresult (*j)(CUstream*, unsigned) = cuStreamCreate;
CUresult (*k)(CUstream) = cuStreamQuery;
CUresult (*l)(CUcontext*) = cuCtxGetCurrent;
CUresult (*m)(CUcontext) = cuCtxSetCurrent;
CUresult (*n)(CUstreamCaptureMode*) = cuThreadExchangeStreamCaptureMode;
