#include "copy.h"

#include <algorithm>
#include <cstring>

#include "vectors.h"

namespace symm_cp {

namespace {

constexpr int64_t kBlock = 4 * kVectorBytes;

template <bool kStreaming>
inline __attribute__((always_inline)) void copy_block(char* to, const char* from) {
  Bytes block[4];
  for (int v = 0; v < 4; ++v) block[v] = load_bytes(from + v * kVectorBytes);
  for (int v = 0; v < 4; ++v) {
    if constexpr (kStreaming)
      stream_bytes(to + v * kVectorBytes, block[v]);
    else
      store_bytes(to + v * kVectorBytes, block[v]);
  }
}

// Returns how much it has copied. Two pages at a time: the processor fetches ahead within a page
// only, so that it fetches twice as far ahead.
int64_t stream_pages(char* to, const char* from, int64_t bytes) {
  constexpr int64_t kPage = 4096;
  int64_t at = 0;
  for (; at + 2 * kPage <= bytes; at += 2 * kPage) {
    for (int64_t in_page = at; in_page < at + kPage; in_page += kBlock) {
      copy_block<true>(to + in_page, from + in_page);
      copy_block<true>(to + in_page + kPage, from + in_page + kPage);
    }
  }
  return at;
}

}  // namespace

// Not memcpy: it uses string instructions for large blocks, which page faults slow down, and page
// by page it takes longer.
void copy_bytes(void* to, const void* from, int64_t bytes, bool streaming) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  int64_t at = 0;
  const bool large = bytes >= 2 * kBlock;
  if (large) {
    // Streams need the alignment, and stores across two cache lines take longer.
    at = -reinterpret_cast<intptr_t>(out) & (kVectorBytes - 1);
    std::memcpy(out, in, static_cast<size_t>(at));
  }
  if (large && streaming) {
    at += stream_pages(out + at, in + at, bytes - at);
    for (; at + kBlock <= bytes; at += kBlock) copy_block<true>(out + at, in + at);
    finish_streams();
  }
  for (; at + kBlock <= bytes; at += kBlock) copy_block<false>(out + at, in + at);
  std::memcpy(out + at, in + at, static_cast<size_t>(bytes - at));
}

}  // namespace symm_cp
