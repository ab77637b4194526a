// 16-bit floating types: numbers are widened to float32 to be added or multiplied.
#pragma once

#include <cstdint>
#include <cstring>

namespace symm_cp {

struct BFloat16 {
  uint16_t bits;
};

inline float widen(BFloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline BFloat16 narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return {static_cast<uint16_t>(is_nan ? 0x7fc0 : rounded)};
}

// Conversion of elements to and from the type in which they are added.
template <class T>
struct Conversion {
  using Sum = T;
  static Sum load(T x) { return x; }
  static T store(Sum x) { return x; }
};
template <>
struct Conversion<BFloat16> {
  using Sum = float;
  static Sum load(BFloat16 x) { return widen(x); }
  static BFloat16 store(Sum x) { return narrow(x); }
};
template <>
struct Conversion<_Float16> {
  using Sum = float;
  static Sum load(_Float16 x) { return static_cast<float>(x); }
  static _Float16 store(Sum x) { return static_cast<_Float16>(x); }
};

}  // namespace symm_cp
