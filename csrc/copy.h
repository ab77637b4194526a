#pragma once

#include <cstdint>

namespace symm_cp {

// Copies between addresses of any alignment that do not overlap. `streaming` writes past the
// caches, for what they cannot hold; other threads may read it once this has returned and they were
// told, as without.
void copy_bytes(void* to, const void* from, int64_t bytes, bool streaming);

}  // namespace symm_cp
