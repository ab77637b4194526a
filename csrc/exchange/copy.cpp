#include "exchange/copy.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/team.h"
#include "exchange/vectors.h"
#include "memory/slot_stores.h"

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

// Returns the number of copied bytes. Copies two pages at a time: the processor prefetches only
// within a page, so it then prefetches twice as far.
int64_t stream_pages(char* to, const char* from, int64_t bytes) {
  int64_t at = 0;
  for (; at + 2 * kPage <= bytes; at += 2 * kPage) {
    for (int64_t in_page = at; in_page < at + kPage; in_page += kBlock) {
      copy_block<true>(to + in_page, from + in_page);
      copy_block<true>(to + in_page + kPage, from + in_page + kPage);
    }
  }
  return at;
}

// From this many bytes on, a row is worth a call of `copy_bytes`.
constexpr int64_t kLongRow = 4096;

// Copies a row whose size is a multiple of a vector.
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

using CopyRow = void (*)(char* to, const char* from, int64_t bytes);

CopyRow row_copy_of(const PlaneCopy& copy) {
  if (copy.row % kVectorBytes != 0)
    return [](char* to, const char* from, int64_t bytes) {
      std::memcpy(to, from, static_cast<size_t>(bytes));
    };
  const auto& [data, plane, pitch] = copy.to;
  const bool aligned = (reinterpret_cast<intptr_t>(data) | plane | pitch) % kVectorBytes == 0;
  return copy.streaming && aligned ? copy_row<true> : copy_row<false>;
}

// Merges planes that are side by side in source and destination into one.
PlaneCopy merged(const PlaneCopy& copy) {
  const auto& [to, from, planes, rows, row, streaming] = copy;
  if (to.plane != row || from.plane != row) return copy;
  return {{to.data, 0, to.pitch}, {from.data, 0, from.pitch}, 1, rows, planes * row, streaming};
}

// The bytes written to a plane of contiguous rows before the next plane's turn. Planes are often a
// power of two apart, so that all writes fall into a few sets of the nearest cache: with runs of
// 256 bytes, packing 256 KiB took 1.6 times as long as a copy on an Intel Xeon, with 1024 1.15
// times. Copying all rows of a plane in one run took longer from 1 MiB on.
constexpr int64_t kRun = 1024;

// Copies a few rows of each plane in turn: if the planes are side by side in source or destination,
// its memory is traversed roughly in order.
template <class Copy>
void copy_by_rows(const PlaneCopy& all, Copy copy) {
  const auto& [to, from, planes, rows, row, streaming] = all;
  const int64_t most = to.pitch == row ? std::max<int64_t>(1, kRun / row) : 1;
  for (int64_t first = 0; first < rows; first += most)
    for (int64_t p = 0; p < planes; ++p)
      for (int64_t r = first; r < std::min(rows, first + most); ++r)
        copy(to.data + p * to.plane + r * to.pitch, from.data + p * from.plane + r * from.pitch);
}

// Some rows of each plane.
PlaneCopy rows_of(PlaneCopy copy, int64_t first, int64_t last) {
  copy.to.data += first * copy.to.pitch;
  copy.from.data += first * copy.from.pitch;
  copy.rows = last - first;
  return copy;
}

// Whether the copies read (or write, depending on `side`) parts of the same rows. Sorts them by
// part.
bool share_rows(std::vector<PlaneCopy>& copies, Planes PlaneCopy::* side) {
  const PlaneCopy& one = copies.front();
  for (const PlaneCopy& copy : copies)
    if (copy.rows != one.rows || (copy.*side).pitch != (one.*side).pitch) return false;
  std::sort(copies.begin(), copies.end(), [&](const PlaneCopy& a, const PlaneCopy& b) {
    return (a.*side).data < (b.*side).data;
  });
  return (copies.back().*side).data - (copies.front().*side).data < (copies.front().*side).pitch;
}

}  // namespace

void copy_planes(PlaneCopy copy) {
  copy = merged(copy);
  const auto& [to, from, planes, rows, row, streaming] = copy;
  if (row == 0) return;
  if (to.pitch == row && from.pitch == row) {
    divide_rows(planes, copy.bytes(), [&](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; ++p)
        copy_bytes(copy.to.data + p * copy.to.plane, copy.from.data + p * copy.from.plane,
                   copy.rows * copy.row, copy.streaming);
    });
    return;
  }
  divide_rows(rows, copy.bytes(), [&](int64_t first, int64_t last) {
    const PlaneCopy part = rows_of(copy, first, last);
    if (part.row >= kLongRow)
      return copy_by_rows(
          part, [&](char* out, const char* in) { copy_bytes(out, in, part.row, part.streaming); });
    const CopyRow copy_one = row_copy_of(part);
    copy_by_rows(part, [&](char* out, const char* in) { copy_one(out, in, part.row); });
    if (part.streaming) finish_streams();
  });
}

// If each copy took its part of all rows before the next copy, memory would be read nearly twice:
// the processor prefetches past a part's end.
void copy_all_planes(std::vector<PlaneCopy> copies) {
  const bool one_pass = copies.size() > 1 && (share_rows(copies, &PlaneCopy::from) ||
                                              share_rows(copies, &PlaneCopy::to));
  if (!one_pass) {
    for (const PlaneCopy& copy : copies) copy_planes(copy);
    return;
  }
  std::vector<CopyRow> copy_one;
  int64_t bytes = 0;
  for (PlaneCopy& copy : copies) {
    copy = merged(copy);
    copy_one.push_back(row_copy_of(copy));
    bytes += copy.bytes();
  }
  divide_rows(copies.front().rows, bytes, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      for (size_t i = 0; i < copies.size(); ++i) {
        const auto& [to, from, planes, rows, row, streaming] = copies[i];
        for (int64_t p = 0; p < planes; ++p)
          copy_one[i](to.data + p * to.plane + r * to.pitch,
                      from.data + p * from.plane + r * from.pitch, row);
      }
    finish_streams();
  });
}

namespace {

// Avoids memcpy, which uses string instructions for large blocks: page faults slow these down, and
// memcpy page by page takes longer.
void copy_part(char* out, const char* in, int64_t bytes, bool streaming, bool to_slot) {
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
  for (; at + kBlock <= bytes; at += kBlock) {
    if (to_slot) claim_ahead(out, at, bytes, kBlock);
    copy_block<false>(out + at, in + at);
  }
  std::memcpy(out + at, in + at, static_cast<size_t>(bytes - at));
}

}  // namespace

void copy_bytes(void* to, const void* from, int64_t bytes, bool streaming, bool to_slot) {
  divide_bytes(to, bytes, 1, [&](int64_t begin, int64_t end) {
    copy_part(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, end - begin,
              streaming, to_slot);
  });
}

void copy_result(void* to, const void* from, int64_t bytes) {
  ResultStores::of_thread().run(
      bytes, [&](bool past_caches) { copy_bytes(to, from, bytes, past_caches); });
}

}  // namespace symm_cp
