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

}  // namespace

void add_rows(const RowSums& given, int64_t first, int64_t last) {
  switch (given.dtype) {
    case DType::kFloat32: return add<float>(given, first, last);
    case DType::kFloat64: return add<double>(given, first, last);
    case DType::kBfloat16: return add<BFloat16>(given, first, last);
    default: return add<_Float16>(given, first, last);
  }
}

}  // namespace symm_cp
