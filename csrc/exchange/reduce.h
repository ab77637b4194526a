// One pass over the data of all ranks: out = source 0 op source 1 op ..., in rank order.
#pragma once

#include <cstdint>

#include "channel/wire.h"

namespace symm_cp {

// Bytes of an element. Throws std::invalid_argument for a type that DType does not name.
int64_t element_bytes(DType dtype);

// Sums, products, minima and maxima of all types but the complex ones, which have sums only;
// averages of the floating and complex types; band, bor and bxor of integers and bool.
bool reducible(DType dtype, ReduceOp op);

// Reduces `count` sources, 1 or more, of `elements` each. Addresses may have any alignment. `out`
// may be one of the sources; else it overlaps none. Each element is read once from every source and
// written once. Large reductions are divided among the threads that the calling thread has
// (base/team.h), which changes no bit of the results. Throws std::invalid_argument unless
// `reducible`.
//
// float16 and bfloat16 are widened to float32, and rounded once, to nearest even; other types are
// reduced in the type itself. Averages are sums divided by `count`. Integers wrap. Minima and
// maxima are NaN if a source is NaN, as in torch.minimum, and the lowest rank's zero if zeros of
// both signs meet. The sum of bools is their `or`, and the product their `and`, as in gloo.
//
// `streaming` writes `out` past the caches, for results that they cannot hold; either way, other
// threads may read `out` once this has returned and they have been signalled. `to_slot` says that
// peers have read that memory.
void reduce(void* out, const void* const* sources, int count, int64_t elements, DType dtype,
            ReduceOp op, bool streaming, bool to_slot = false);

}  // namespace symm_cp
