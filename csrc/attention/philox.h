// Random bits by position: Philox4x32 with 7 rounds (Salmon et al., 2011).
// symm_cp/ops/attention/philox.py, which computes the same bits, describes the counter of each
// attention weight.
#pragma once

#include <array>
#include <cstdint>

#include "exchange/vectors.h"

namespace symm_cp {

inline constexpr int kPhiloxRounds = 7;
// Keys whose numbers are computed together.
inline constexpr int64_t kPhiloxKeys = 128;

struct Products32 {
  Vector<uint32_t> high, low;
};

// The 64 bits of products, in two halves.
inline Products32 multiply_wide(Vector<uint32_t> a, uint32_t factor) {
  const Vector<uint32_t> factors = Vector<uint32_t>{} + factor;
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const auto multiply = [&](Vector<uint64_t> x) {
    return as<uint64_t>(_mm512_maskz_mul_epu32(0xff, as<long long>(x), as<long long>(factors)));
  };
#elif defined(__AVX2__)
  const auto multiply = [&](Vector<uint64_t> x) {
    return as<uint64_t>(_mm256_mul_epu32(as<long long>(x), as<long long>(factors)));
  };
#elif defined(__x86_64__)
  const auto multiply = [&](Vector<uint64_t> x) {
    return as<uint64_t>(_mm_mul_epu32(as<long long>(x), as<long long>(factors)));
  };
#else
  const auto multiply = [&](Vector<uint64_t> x) {
    return (x & uint64_t{0xffffffff}) * (as<uint64_t>(factors) & uint64_t{0xffffffff});
  };
#endif
  // Lanes 0, 2, 4 ... are the lower halves of 64 bits: the processors that run this are
  // little-endian.
  constexpr uint64_t kLower = 0xffffffff;
  const Vector<uint64_t> even = multiply(as<uint64_t>(a)), odd = multiply(as<uint64_t>(a) >> 32);
  return {as<uint32_t>((even >> 32) | (odd & ~kLower)),
          as<uint32_t>((even & kLower) | (odd << 32))};
}

// Random words for the counters in the lanes.
inline void philox(std::array<Vector<uint32_t>, 4>& words, uint64_t seed, int rounds) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < rounds; ++round) {
    const Products32 first = multiply_wide(words[0], 0xd2511f53);
    const Products32 second = multiply_wide(words[2], 0xcd9e8d57);
    words = {second.high ^ words[1] ^ key0, second.low, first.high ^ words[3] ^ key1, first.low};
    key0 += 0x9e3779b9;
    key1 += 0xbb67ae85;
  }
}

// Decides which weights dropout keeps.
struct Dropout {
  uint64_t seed;
  uint32_t threshold;  // a weight is kept if its number, 0 to 65535, is at least this

  // Writes a bit for each of the 128 keys from `number` * 128 on, for one query of one head of one
  // sample; 1 keeps the weight.
  void keep(uint32_t sample, uint32_t head, uint32_t query, int64_t number, uint16_t* bits) const;
};

}  // namespace symm_cp
