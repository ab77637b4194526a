#include "reduce.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "float16.h"

namespace symm_cp {

namespace {

// Small enough to stay in the first-level cache while W sources pass over it.
constexpr int64_t kBlock = 1024;

template <class T>
void reduce_typed(T* out, const void* const* sources, int count, int64_t elements, bool mean) {
  using C = Conversion<T>;
  using Sum = typename C::Sum;
  Sum sum[kBlock];
  for (int64_t begin = 0; begin < elements; begin += kBlock) {
    const int64_t n = std::min(kBlock, elements - begin);
    const T* first = static_cast<const T*>(sources[0]) + begin;
    for (int64_t i = 0; i < n; ++i) sum[i] = C::load(first[i]);
    for (int s = 1; s < count; ++s) {
      const T* source = static_cast<const T*>(sources[s]) + begin;
      for (int64_t i = 0; i < n; ++i) sum[i] += C::load(source[i]);
    }
    if (mean)
      for (int64_t i = 0; i < n; ++i) sum[i] /= static_cast<Sum>(count);
    for (int64_t i = 0; i < n; ++i) out[begin + i] = C::store(sum[i]);
  }
}

}  // namespace

void reduce(void* out, const void* const* sources, int count, int64_t elements, DType dtype,
            bool mean) {
  const auto run = [&](auto* typed) { reduce_typed(typed, sources, count, elements, mean); };
  switch (dtype) {
    case DType::kUint8: return run(static_cast<uint8_t*>(out));
    case DType::kInt8: return run(static_cast<int8_t*>(out));
    case DType::kInt16: return run(static_cast<int16_t*>(out));
    case DType::kInt32: return run(static_cast<int32_t*>(out));
    case DType::kInt64: return run(static_cast<int64_t*>(out));
    case DType::kFloat16: return run(static_cast<_Float16*>(out));
    case DType::kFloat32: return run(static_cast<float*>(out));
    case DType::kFloat64: return run(static_cast<double*>(out));
    case DType::kBfloat16: return run(static_cast<BFloat16*>(out));
  }
  throw std::invalid_argument("reduce: unknown scalar type " +
                              std::to_string(static_cast<int>(dtype)));
}

}  // namespace symm_cp
