// csrc/attention/philox.cpp as a library of its own, for test_native_tiles.py.
#include "attention/philox.h"

extern "C" void kept_bits(uint64_t seed, uint32_t threshold, uint32_t sample, uint32_t head,
                          uint32_t query, int64_t number, uint16_t* bits) {
  symm_cp::Dropout{seed, threshold}.keep(sample, head, query, number, bits);
}
