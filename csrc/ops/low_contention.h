// The memory of low-contention collectives whose results nobody waited for.
#pragma once

namespace symm_cp {

// Frees the memory of results that were dropped before they were waited for, once their transfers
// have ended. Each transfer does this first, and so does `symm_cp.empty_cache`.
void release_dropped_results();

}  // namespace symm_cp
