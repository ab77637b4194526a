// One pass over W sources: out = sum (or mean) of them, accumulated in rank order.
#pragma once

#include <cstddef>
#include <cstdint>

namespace symm_cp {

// Numbered as torch numbers its scalar types.
enum class DType : int32_t {
  kUInt8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kFloat32 = 6,
  kFloat64 = 7,
  kBFloat16 = 15,
};

// Adds in float32 for the 16-bit and 32-bit floating types, in float64 for float64, in the type
// itself for integers (which wrap, and for which `mean` is refused by the caller). `out` may be
// one of the sources. Each element is read once from every source and written once.
void reduce(void* out, const void* const* sources, int count, int64_t elements, DType dtype,
            bool mean);

}  // namespace symm_cp
