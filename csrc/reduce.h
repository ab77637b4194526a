// One pass over W sources: out = sum (or mean) of them, accumulated in rank order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "wire.h"

namespace symm_cp {

// Adds in float32 for the 16-bit and 32-bit floating types, in float64 for float64, in the type
// itself for integers (which wrap, and for which `mean` is refused by the caller). `out` may be
// one of the sources. Each element is read once from every source and written once.
int64_t element_bytes(DType dtype);

// By pages: memcpy of a large block uses string instructions, which page faults slow down.
void copy_bytes(void* to, const void* from, int64_t bytes, bool streaming);

void reduce(void* out, const void* const* sources, int count, int64_t elements, DType dtype,
            ReduceOp op, bool streaming);

void reduce(void* out, const void* const* sources, int count, int64_t elements, DType dtype,
            bool mean);

}  // namespace symm_cp
