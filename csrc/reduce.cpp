#include "reduce.h"

#include <algorithm>
#include <cstring>
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
    default: break;
  }
  throw std::invalid_argument("reduce: unknown scalar type " +
                              std::to_string(static_cast<int>(dtype)));
}

void reduce(void* out, const void* const* sources, int count, int64_t elements, DType dtype,
            ReduceOp op, bool /*streaming*/) {
  if (op != ReduceOp::kSum && op != ReduceOp::kAvg) throw std::invalid_argument("reduce: op");
  reduce(out, sources, count, elements, dtype, op == ReduceOp::kAvg);
}

int64_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
    case DType::kBool:
    case DType::kInt8: return 1;
    case DType::kInt16:
    case DType::kFloat16:
    case DType::kBfloat16: return 2;
    case DType::kInt32:
    case DType::kFloat32: return 4;
    case DType::kComplex128: return 16;
    default: return 8;
  }
}

void copy_bytes(void* to, const void* from, int64_t bytes, bool /*streaming*/) {
  constexpr int64_t kPage = 4096;
  for (int64_t at = 0; at < bytes; at += kPage)
    std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at,
                static_cast<size_t>(std::min(kPage, bytes - at)));
}

}  // namespace symm_cp
