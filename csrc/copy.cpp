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

// From this on a row is worth a call.
constexpr int64_t kLongRow = 4096;

// Of a multiple of a vector.
template <bool kStreaming>
inline __attribute__((always_inline)) void copy_row(char* to, const char* from, int64_t bytes) {
  int64_t at = 0;
  for (; at + kBlock <= bytes; at += kBlock) copy_block<kStreaming>(to + at, from + at);
  for (; at < bytes; at += kVectorBytes) {
    if constexpr (kStreaming)
      stream_bytes(to + at, load_bytes(from + at));
    else
      store_bytes(to + at, load_bytes(from + at));
  }
}

// What is written to a plane whose rows follow one another before the next plane is.
constexpr int64_t kRun = 2048;

// A few rows of each plane in turn: where planes are side by side on one of the sides, its memory
// is passed about in order.
template <class CopyRow>
void copy_by_rows(Planes to, Planes from, int64_t planes, int64_t rows, int64_t row, CopyRow copy) {
  const int64_t most = to.pitch == row ? std::max<int64_t>(1, kRun / row) : 1;
  for (int64_t first = 0; first < rows; first += most)
    for (int64_t p = 0; p < planes; ++p)
      for (int64_t r = first; r < std::min(rows, first + most); ++r)
        copy(to.data + p * to.plane + r * to.pitch, from.data + p * from.plane + r * from.pitch);
}

}  // namespace

void copy_planes(Planes to, Planes from, int64_t planes, int64_t rows, int64_t row,
                 bool streaming) {
  if (row == 0) return;
  if (planes > 1 && to.plane == row && from.plane == row)
    return copy_planes({to.data, 0, to.pitch}, {from.data, 0, from.pitch}, 1, rows, planes * row,
                       streaming);
  if (to.pitch == row && from.pitch == row) {
    for (int64_t p = 0; p < planes; ++p)
      copy_bytes(to.data + p * to.plane, from.data + p * from.plane, rows * row, streaming);
    return;
  }
  if (row >= kLongRow)
    return copy_by_rows(to, from, planes, rows, row,
                        [&](char* out, const char* in) { copy_bytes(out, in, row, streaming); });
  if (row % kVectorBytes != 0)
    return copy_by_rows(to, from, planes, rows, row, [&](char* out, const char* in) {
      std::memcpy(out, in, static_cast<size_t>(row));
    });
  const bool aligned =
      (reinterpret_cast<intptr_t>(to.data) | to.plane | to.pitch) % kVectorBytes == 0;
  if (!streaming || !aligned)
    return copy_by_rows(to, from, planes, rows, row,
                        [&](char* out, const char* in) { copy_row<false>(out, in, row); });
  copy_by_rows(to, from, planes, rows, row,
               [&](char* out, const char* in) { copy_row<true>(out, in, row); });
  finish_streams();
}

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
