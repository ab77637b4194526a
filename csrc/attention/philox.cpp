#include "attention/philox.h"

#include <algorithm>

namespace symm_cp {

namespace {

constexpr int64_t kLanes = kVectorBytes / 4;

// Sets a bit for each lane whose number is at least `threshold`; numbers have 16 bits.
inline uint32_t lanes_from(Vector<uint32_t> numbers, uint32_t threshold) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_cmpge_epu32_mask(as<long long>(numbers),
                                 as<long long>(Vector<uint32_t>{} + threshold));
#elif defined(__AVX2__)
  const auto holds = as<int32_t>(numbers) >= as<int32_t>(Vector<uint32_t>{} + threshold);
  return static_cast<uint32_t>(_mm256_movemask_ps(as<float>(holds)));
#else
  uint32_t bits = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane)
    bits |= static_cast<uint32_t>(numbers[lane] >= threshold) << lane;
  return bits;
#endif
}

}  // namespace

void Dropout::keep(uint32_t sample, uint32_t head, uint32_t query, int64_t number,
                   uint16_t* bits) const {
  std::fill_n(bits, kPhiloxKeys / 16, 0);
  Vector<uint32_t> lane{};
  for (int64_t i = 0; i < kLanes; ++i) lane[i] = static_cast<uint32_t>(i);
  const Vector<uint32_t> none{};
  for (int64_t first = 0; first < 16; first += kLanes) {
    const auto counter = static_cast<uint32_t>(number * 16 + first);
    std::array<Vector<uint32_t>, 4> words{lane + counter, none + query, none + head, none + sample};
    philox(words, seed, kPhiloxRounds);
    for (int word = 0; word < 4; ++word) {
      const auto index = static_cast<size_t>(word);
      const uint32_t low = lanes_from(words[index] & 0xffff, threshold);
      const uint32_t high = lanes_from(words[index] >> 16, threshold);
      bits[word] = static_cast<uint16_t>(bits[word] | low << first);
      bits[word + 4] = static_cast<uint16_t>(bits[word + 4] | high << first);
    }
  }
}

}  // namespace symm_cp
