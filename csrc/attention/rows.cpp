#include "attention/rows.h"

#include <algorithm>
#include <array>
#include <type_traits>

#include "attention/vector_math.h"

namespace symm_cp {

namespace {

// Returns the bits of 16 columns from `column` on. Reads up to 3 bytes beyond their last bit.
inline uint32_t bits_at(const uint8_t* bits, int64_t column) {
  uint32_t word;
  std::memcpy(&word, bits + column / 8, sizeof(word));
  return word >> (column % 8);
}

// Calls `step(column, count)` for each vector of columns; the last may be partial.
template <class A, class Step>
inline __attribute__((always_inline)) void for_columns(int64_t begin, int64_t end,
                                                       const Step& step) {
  int64_t column = begin;
  for (; column + kLanesOf<A> <= end; column += kLanesOf<A>)
    step(column, std::integral_constant<int64_t, kLanesOf<A>>{});
  if (column < end) step(column, end - column);
}

template <class A>
inline __attribute__((always_inline)) Vector<A> load_columns(
    const A* from, std::integral_constant<int64_t, kLanesOf<A>>, A = 0) {
  return load(from);
}
template <class A>
inline __attribute__((always_inline)) Vector<A> load_columns(const A* from, int64_t count,
                                                             A fill = 0) {
  return load_part(from, count, fill);
}
template <class A, class To>
inline __attribute__((always_inline)) void store_columns(
    To* to, Vector<A> vector, std::integral_constant<int64_t, kLanesOf<A>>) {
  store(to, vector);
}
template <class A, class To>
inline __attribute__((always_inline)) void store_columns(To* to, Vector<A> vector, int64_t count) {
  store_part(to, vector, count);
}

// Applies soft cap, bias and mask to scaled products; `slope` becomes the soft cap's derivative.
template <class A, class Count>
inline __attribute__((always_inline)) Vector<A> finish_scores(Vector<A> score,
                                                              const RowTerms<A>& terms,
                                                              int64_t column, Count count,
                                                              Vector<A>* slope) {
  if (terms.softcap != 0) {
    const Vector<A> capped = hyperbolic_tangent(score * (1 / terms.softcap));
    if (slope != nullptr) *slope = 1 - capped * capped;
    score = capped * terms.softcap;
  }
  if (terms.bias != nullptr) score += load_columns<A>(terms.bias + column, count);
  if (terms.mask != nullptr)
    score +=
        terms.mask_step == 0 ? broadcast(*terms.mask) : load_columns<A>(terms.mask + column, count);
  return score;
}

template <class A>
inline Vector<A> after_dropout(Vector<A> value, const RowTerms<A>& terms, int64_t column) {
  const auto kept = lanes_of<A>(bits_at(terms.kept, column));
  return kept ? value * terms.kept_factor : broadcast<A>(0);
}

template <class Weight>
void clear_unseen(Weight* row, int64_t begin, int64_t end, int64_t columns) {
  std::fill(row, row + begin, Weight{});
  std::fill(row + end, row + columns, Weight{});
}

// Transposes work on squares of 16 x 16 numbers of 32 bits, and on parts of squares at the ends.
constexpr int64_t kBlock = 16;

template <class Run>
void for_blocks(int64_t rows, int64_t columns, const Run& run) {
  for (int64_t row = 0; row < rows; row += kBlock)
    for (int64_t column = 0; column < columns; column += kBlock)
      run(row, column, std::min(kBlock, rows - row), std::min(kBlock, columns - column));
}

#if defined(__AVX512F__)
using Square = std::array<__m512i, kBlock>;

inline __attribute__((always_inline)) Square load_square(const uint32_t* from, int64_t stride) {
  Square rows;
  for (size_t i = 0; i < rows.size(); ++i)
    rows[i] = _mm512_loadu_si512(from + static_cast<int64_t>(i) * stride);
  return rows;
}

// Exchanges pairs of numbers, then pairs of pairs within 128 bits, then 4 rows, then 8.
inline __attribute__((always_inline)) Square transposed(const Square& rows) {
  Square a, b;
  for (size_t i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (size_t i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (size_t i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
  }
  for (size_t i = 0; i < 8; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
    b[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
  }
  return b;
}
#endif

}  // namespace

template <class A, class Weight>
A weigh_row(A* scores, Weight* weights, const RowTerms<A>& terms, RowState<A>& state) {
  constexpr A kNothing = -std::numeric_limits<A>::infinity();
  const int64_t begin = terms.begin, end = std::max(begin, terms.end);
  const bool scales_only = terms.scales_only();
  Vector<A> top = broadcast(kNothing);
  for_columns<A>(begin, end, [&](int64_t column, auto count) {
    // Columns beyond the end are set to -inf after scaling: before it, a scale of 0 or less would
    // turn -inf into NaN or inf.
    Vector<A> score = load_columns<A>(scores + column, count) * terms.scale;
    if (!scales_only) {
      score = finish_scores<A>(score, terms, column, count, nullptr);
      store_columns<A>(scores + column, score, count);
    }
    if constexpr (std::is_same_v<decltype(count), int64_t>) {
      const auto inside = lanes_of<A>((1u << count) - 1);
      score = inside ? score : broadcast(kNothing);
    }
    top = score > top ? score : top;
  });
  const A before = state.largest;
  state.largest = std::max(before, largest_of<A>(top));
  const A base = state.largest == kNothing ? 0 : state.largest;
  const A scale = scales_only ? terms.scale : 1;
  Vector<A> sum{};
  for_columns<A>(begin, end, [&](int64_t column, auto count) {
    Vector<A> weight = exponential(load_columns<A>(scores + column, count) * scale - base);
    if constexpr (std::is_same_v<decltype(count), int64_t>) {
      const auto inside = lanes_of<A>((1u << count) - 1);
      weight = inside ? weight : broadcast<A>(0);
    }
    sum += weight;
    if (terms.kept != nullptr) weight = after_dropout<A>(weight, terms, column);
    store_columns<A>(weights + column, weight, count);
  });
  clear_unseen(weights, begin, end, terms.columns);
  const A factor = std::exp(before - base);
  state.sum = state.sum * factor + sum_of<A>(sum);
  return factor;
}

template <class A, class Weight>
void gradient_row(const A* scores, const A* through, Weight* weights, Weight* grads, A* grad_bias,
                  const RowTerms<A>& terms, A lse, A inner) {
  const int64_t begin = terms.begin, end = std::max(begin, terms.end);
  for_columns<A>(begin, end, [&](int64_t column, auto count) {
    Vector<A> slope = broadcast<A>(1);
    const Vector<A> product = load_columns<A>(scores + column, count) * terms.scale;
    const Vector<A> score = finish_scores<A>(product, terms, column, count, &slope);
    Vector<A> weight = exponential(score - lse);
    Vector<A> back = load_columns<A>(through + column, count);
    if (terms.kept != nullptr) back = after_dropout<A>(back, terms, column);
    Vector<A> grad = weight * (back - inner);
    if (grad_bias != nullptr) store_columns<A>(grad_bias + column, grad, count);
    if (terms.softcap != 0) grad *= slope;
    if (terms.kept != nullptr) weight = after_dropout<A>(weight, terms, column);
    store_columns<A>(weights + column, weight, count);
    store_columns<A>(grads + column, grad * terms.scale, count);
  });
  clear_unseen(weights, begin, end, terms.columns);
  clear_unseen(grads, begin, end, terms.columns);
}

template <class A>
A product_of_rows(const void* left, const void* right, DType dtype, int64_t count) {
  const auto add = [&](auto type) {
    using T = decltype(type);
    constexpr int64_t kSums = 16;  // independent sums: a single sum in order could not use vectors
    const T *a = static_cast<const T*>(left), *b = static_cast<const T*>(right);
    const auto product = [&](int64_t i) {
      return static_cast<A>(Conversion<T>::load(a[i])) * static_cast<A>(Conversion<T>::load(b[i]));
    };
    A sums[kSums] = {};
    int64_t first = 0;
    for (; first + kSums <= count; first += kSums)
      for (int64_t i = 0; i < kSums; ++i) sums[i] += product(first + i);
    for (; first < count; ++first) sums[first % kSums] += product(first);
    for (int64_t width = kSums / 2; width > 0; width /= 2)
      for (int64_t i = 0; i < width; ++i) sums[i] += sums[i + width];
    return sums[0];
  };
  switch (dtype) {
    case DType::kFloat64: return add(double{});
    case DType::kBfloat16: return add(BFloat16{});
    case DType::kFloat16: return add(_Float16{});
    default: return add(float{});
  }
}

template <class A>
void store_row(const A* from, A factor, A share, void* to, DType dtype, int64_t count) {
  const auto write = [&](auto type) {
    using T = decltype(type);
    using Sum = typename Conversion<T>::Sum;
    T* row = static_cast<T*>(to);
    if (share == 0) {
      for (int64_t i = 0; i < count; ++i)
        row[i] = Conversion<T>::store(static_cast<Sum>(from[i] * factor));
      return;
    }
    for (int64_t i = 0; i < count; ++i)
      row[i] = Conversion<T>::store(
          static_cast<Sum>(static_cast<A>(Conversion<T>::load(row[i])) * share + from[i] * factor));
  };
  switch (dtype) {
    case DType::kFloat64: return write(double{});
    case DType::kBfloat16: return write(BFloat16{});
    case DType::kFloat16: return write(_Float16{});
    default: return write(float{});
  }
}

template <class A>
void scale_row(A* row, A factor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) row[i] *= factor;
}

void copy_rows(const uint16_t* in, int64_t in_stride, int64_t rows, int64_t columns, uint16_t* out,
               int64_t out_stride) {
  for (int64_t row = 0; row < rows; ++row) {
    std::copy_n(in + row * in_stride, columns, out + row * out_stride);
    std::fill(out + row * out_stride + columns, out + (row + 1) * out_stride, uint16_t{0});
  }
}

void interleave_rows(const uint16_t* in, int64_t in_stride, int64_t rows, int64_t columns,
                     uint16_t* out, int64_t out_stride, int64_t padded) {
  for (int64_t row = 0; row < padded; row += 2) {
    uint16_t* pairs = out + row / 2 * out_stride * 2;
    if (row >= rows) {
      std::fill(pairs, pairs + 2 * columns, uint16_t{0});
      continue;
    }
    const uint16_t *low = in + row * in_stride, *high = low + in_stride;
    const bool both = row + 1 < rows;
    for (int64_t c = 0; c < columns; ++c) {
      const uint32_t pair = low[c] | (both ? uint32_t{high[c]} << 16 : 0u);
      std::memcpy(pairs + 2 * c, &pair, sizeof(pair));
    }
  }
}

void transpose(const uint32_t* in, int64_t in_stride, int64_t rows, int64_t columns, uint32_t* out,
               int64_t out_stride) {
  for_blocks(rows, columns, [&](int64_t row, int64_t column, int64_t height, int64_t width) {
    const uint32_t* from = in + row * in_stride + column;
    uint32_t* to = out + column * out_stride + row;
#if defined(__AVX512F__)
    if (height == kBlock && width == kBlock) {
      // Prefetches: rows often come from memory, and the processor predicts this order of reads
      // badly.
      constexpr int64_t kAhead = 4 * kBlock;
      for (int64_t r = 0; r < kBlock; ++r) __builtin_prefetch(from + (r + kAhead) * in_stride);
      const Square square = transposed(load_square(from, in_stride));
      for (int64_t c = 0; c < kBlock; ++c) _mm512_storeu_si512(to + c * out_stride, square[c]);
      return;
    }
#endif
    for (int64_t r = 0; r < height; ++r)
      for (int64_t c = 0; c < width; ++c) to[c * out_stride + r] = from[r * in_stride + c];
  });
}

void transpose(const uint16_t* in, int64_t in_stride, int64_t rows, int64_t columns, uint16_t* out,
               int64_t out_stride, int64_t padded) {
  const bool even = in_stride % 2 == 0 && reinterpret_cast<uintptr_t>(in) % 4 == 0;
  for_blocks(rows, columns / 2, [&](int64_t row, int64_t pair, int64_t height, int64_t width) {
    const uint16_t* from = in + row * in_stride + 2 * pair;
    uint16_t* to = out + 2 * pair * out_stride + row;
#if defined(__AVX512F__) && defined(__AVX512BW__)
    if (even && height == kBlock && width == kBlock) {
      const Square square =
          transposed(load_square(reinterpret_cast<const uint32_t*>(from), in_stride / 2));
      for (int64_t c = 0; c < kBlock; ++c) {
        const __m256i low = _mm512_cvtepi32_epi16(square[c]);
        const __m256i high = _mm512_cvtepi32_epi16(_mm512_srli_epi32(square[c], 16));
        std::memcpy(to + 2 * c * out_stride, &low, sizeof(low));
        std::memcpy(to + (2 * c + 1) * out_stride, &high, sizeof(high));
      }
      return;
    }
#endif
    static_cast<void>(even);
    for (int64_t r = 0; r < height; ++r)
      for (int64_t c = 0; c < 2 * width; ++c) to[c * out_stride + r] = from[r * in_stride + c];
  });
  if (columns % 2 != 0)
    for (int64_t r = 0; r < rows; ++r)
      out[(columns - 1) * out_stride + r] = in[r * in_stride + columns - 1];
  for (int64_t c = 0; c < columns; ++c)
    std::fill(out + c * out_stride + rows, out + c * out_stride + padded, uint16_t{0});
}

void add_transposed(const float* in, int64_t in_stride, int64_t rows, int64_t columns, float* out,
                    int64_t out_stride) {
  for_blocks(rows, columns, [&](int64_t row, int64_t column, int64_t height, int64_t width) {
    const float* from = in + row * in_stride + column;
    float* to = out + column * out_stride + row;
#if defined(__AVX512F__)
    if (height == kBlock && width == kBlock) {
      const Square square =
          transposed(load_square(reinterpret_cast<const uint32_t*>(from), in_stride));
      for (int64_t c = 0; c < kBlock; ++c) {
        float* sums = to + c * out_stride;
        _mm512_storeu_ps(sums, _mm512_loadu_ps(sums) + _mm512_castsi512_ps(square[c]));
      }
      return;
    }
#endif
    for (int64_t c = 0; c < width; ++c)
      for (int64_t r = 0; r < height; ++r) to[c * out_stride + r] += from[r * in_stride + c];
  });
}

void transpose_pairs(const uint16_t* in, int64_t in_stride, int64_t rows, int64_t columns,
                     uint16_t* out, int64_t out_stride, int64_t padded) {
  int64_t done = 0;
  if (in_stride % 2 == 0 && reinterpret_cast<uintptr_t>(in) % 4 == 0) {
    done = columns / 2 * 2;
    transpose(reinterpret_cast<const uint32_t*>(in), in_stride / 2, rows, columns / 2,
              reinterpret_cast<uint32_t*>(out), out_stride);
  }
  for (int64_t c = done; c < padded; c += 2) {
    uint16_t* to = out + c / 2 * out_stride * 2;
    for (int64_t r = 0; r < rows; ++r) {
      const uint16_t* from = in + r * in_stride + c;
      to[2 * r] = c < columns ? from[0] : uint16_t{0};
      to[2 * r + 1] = c + 1 < columns ? from[1] : uint16_t{0};
    }
  }
}

template float weigh_row(float*, float*, const RowTerms<float>&, RowState<float>&);
template float weigh_row(float*, BFloat16*, const RowTerms<float>&, RowState<float>&);
template double weigh_row(double*, double*, const RowTerms<double>&, RowState<double>&);
template void gradient_row(const float*, const float*, float*, float*, float*,
                           const RowTerms<float>&, float, float);
template void gradient_row(const float*, const float*, BFloat16*, BFloat16*, float*,
                           const RowTerms<float>&, float, float);
template void gradient_row(const double*, const double*, double*, double*, double*,
                           const RowTerms<double>&, double, double);
template float product_of_rows(const void*, const void*, DType, int64_t);
template double product_of_rows(const void*, const void*, DType, int64_t);
template void store_row(const float*, float, float, void*, DType, int64_t);
template void store_row(const double*, double, double, void*, DType, int64_t);
template void scale_row(float*, float, int64_t);
template void scale_row(double*, double, int64_t);

}  // namespace symm_cp
