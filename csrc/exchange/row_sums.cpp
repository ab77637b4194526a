#include "exchange/row_sums.h"

#include <algorithm>

#include "exchange/float16.h"

namespace symm_cp {

namespace {

// Elements that are added at a time: the sums stay in the first cache.
constexpr int64_t kBlock = 512;

template <class T>
void add(const RowSums& given, int64_t first, int64_t last) {
  using Sum = typename Conversion<T>::Sum;
  const auto* factors = static_cast<const Sum*>(given.factors);
  for (int64_t at = first; at < last; ++at)
    for (int64_t begin = 0; begin < given.width; begin += kBlock) {
      const int64_t length = std::min(kBlock, given.width - begin);
      Sum sum[kBlock] = {};
      for (int64_t term = at * given.terms; term < (at + 1) * given.terms; ++term) {
        if (given.rows[term] == nullptr) continue;
        const T* row = reinterpret_cast<const T*>(given.rows[term]) + begin;
        const Sum factor = factors == nullptr ? Sum{1} : factors[term];
        for (int64_t i = 0; i < length; ++i) sum[i] += factor * Conversion<T>::load(row[i]);
      }
      T* to = static_cast<T*>(given.sums) + at * given.width + begin;
      for (int64_t i = 0; i < length; ++i) to[i] = Conversion<T>::store(sum[i]);
    }
}

// The number of parts in which dots are added; the compiler keeps the parts in registers.
constexpr int64_t kParts = 32;

template <class T>
typename Conversion<T>::Sum dot(const T* row, const T* other, int64_t width) {
  using Sum = typename Conversion<T>::Sum;
  Sum parts[kParts] = {};
  int64_t begin = 0;
  for (; begin + kParts <= width; begin += kParts)
    for (int64_t i = 0; i < kParts; ++i)
      parts[i] += Conversion<T>::load(row[begin + i]) * Conversion<T>::load(other[begin + i]);
  for (int64_t i = 0; begin + i < width; ++i)
    parts[i] += Conversion<T>::load(row[begin + i]) * Conversion<T>::load(other[begin + i]);
  for (int64_t half = kParts / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) parts[i] += parts[i + half];
  return parts[0];
}

template <class T>
void weigh(const WeighedRows& given, int64_t first, int64_t last) {
  using Sum = typename Conversion<T>::Sum;
  for (int64_t at = first; at < last; ++at) {
    T* row = static_cast<T*>(given.rows) + at * given.width;
    static_cast<Sum*>(given.dots)[at] +=
        dot(row, reinterpret_cast<const T*>(given.others + at * given.pitch), given.width);
    const Sum factor = static_cast<const Sum*>(given.factors)[at];
    for (int64_t i = 0; i < given.width; ++i)
      row[i] = Conversion<T>::store(factor * Conversion<T>::load(row[i]));
  }
}

}  // namespace

void add_rows(const RowSums& given, int64_t first, int64_t last) {
  switch (given.dtype) {
    case DType::kFloat32: return add<float>(given, first, last);
    case DType::kFloat64: return add<double>(given, first, last);
    case DType::kBfloat16: return add<BFloat16>(given, first, last);
    default: return add<_Float16>(given, first, last);
  }
}

void weigh_rows(const WeighedRows& given, int64_t first, int64_t last) {
  switch (given.dtype) {
    case DType::kFloat32: return weigh<float>(given, first, last);
    case DType::kFloat64: return weigh<double>(given, first, last);
    case DType::kBfloat16: return weigh<BFloat16>(given, first, last);
    default: return weigh<_Float16>(given, first, last);
  }
}

}  // namespace symm_cp
