// Vectors of the widest registers that the compiler may use: AVX-512, AVX2, else 16 bytes.
// Arithmetic on them is the compiler's own (its vector extension), whatever the processor.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace symm_cp {

// Compilers vectorize for 256 bits on processors with AVX-512 unless the width is spelt out.
#if defined(__AVX512F__) && defined(__AVX512BW__)
inline constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int64_t kVectorBytes = 32;
#else
inline constexpr int64_t kVectorBytes = 16;
#endif

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vector = typename VectorOf<T>::type;
using Bytes = Vector<uint8_t>;

// The same bits as numbers of another type.
template <class T, class V>
inline Vector<T> as(V vector) {
  return reinterpret_cast<Vector<T>>(vector);
}

// Loads from any address.
inline Bytes load_bytes(const char* from) {
  typedef uint8_t Anywhere __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
  return *reinterpret_cast<const Anywhere*>(from);
}

inline void store_bytes(char* to, Bytes bytes) {
  typedef uint8_t Anywhere __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
  *reinterpret_cast<Anywhere*>(to) = bytes;
}

// Prefetches for writing the block 4 KiB after `at`, or the last block. If a peer's core has read
// these lines, each store must first take ownership, and the processor alone requests few lines at
// a time: without this an all-reduce of 512 KiB took 10% longer on two cores of an Intel Xeon; with
// 2 or 8 KiB it took up to 5% longer. Call it for slots only: on pages that are not mapped yet,
// each prefetch costs a page walk and fetches nothing.
inline void claim_ahead(char* to, int64_t at, int64_t bytes, int64_t block) {
  char* ahead = to + std::min(at + 4096, bytes - block);
  for (int64_t line = 0; line < block; line += 64) __builtin_prefetch(ahead + line, 1);
}

// Stores past the caches, at a multiple of kVectorBytes; an ordinary store if the processor has no
// such instruction. Call `finish_streams` before any signal that the memory is written.
inline void stream_bytes(char* to, Bytes bytes) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), reinterpret_cast<__m512i>(bytes));
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(bytes));
#elif defined(__x86_64__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), reinterpret_cast<__m128i>(bytes));
#else
  store_bytes(to, bytes);
#endif
}

inline void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace symm_cp
