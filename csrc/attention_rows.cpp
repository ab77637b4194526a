#include "attention_rows.h"

#include <algorithm>
#include <type_traits>

#include "vector_math.h"

namespace symm_cp {

namespace {

// The bits of 16 columns from `column` on. Reads up to 3 bytes behind the last of them.
inline uint32_t bits_at(const uint8_t* bits, int64_t column) {
  uint32_t word;
  std::memcpy(&word, bits + column / 8, sizeof(word));
  return word >> (column % 8);
}

// Calls `step(column, count)` for each vector of columns; the last may be a part of one.
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

// Soft cap, bias and mask on scaled products; `slope` becomes the derivative of the soft cap.
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

}  // namespace

template <class A, class Weight>
A weigh_row(A* scores, Weight* weights, const RowTerms<A>& terms, RowState<A>& state) {
  constexpr A kNothing = -std::numeric_limits<A>::infinity();
  const int64_t begin = terms.begin, end = std::max(begin, terms.end);
  const bool scales_only = terms.scales_only();
  Vector<A> top = broadcast(kNothing);
  for_columns<A>(begin, end, [&](int64_t column, auto count) {
    // Columns beyond the end repeat nothing: -inf times a scale that is not positive would count.
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
    const T *a = static_cast<const T*>(left), *b = static_cast<const T*>(right);
    A sum = 0;
    for (int64_t i = 0; i < count; ++i)
      sum += static_cast<A>(Conversion<T>::load(a[i])) * static_cast<A>(Conversion<T>::load(b[i]));
    return sum;
  };
  switch (dtype) {
    case DType::kFloat64: return add(double{});
    case DType::kBfloat16: return add(BFloat16{});
    case DType::kFloat16: return add(_Float16{});
    default: return add(float{});
  }
}

template <class A>
void store_row(const A* from, A factor, void* to, DType dtype, int64_t count) {
  const auto write = [&](auto type) {
    using T = decltype(type);
    using Sum = typename Conversion<T>::Sum;
    for (int64_t i = 0; i < count; ++i)
      static_cast<T*>(to)[i] = Conversion<T>::store(static_cast<Sum>(from[i] * factor));
  };
  switch (dtype) {
    case DType::kFloat64: return write(double{});
    case DType::kBfloat16: return write(BFloat16{});
    case DType::kFloat16: return write(_Float16{});
    default: return write(float{});
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
  int64_t row = 0;
#if defined(__AVX512F__)
  const __m512i steps =
      _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                         _mm512_set1_epi32(static_cast<int>(in_stride)));
  for (; row + 16 <= rows; row += 16)
    for (int64_t c = 0; c < columns; ++c)
      _mm512_storeu_si512(out + c * out_stride + row,
                          _mm512_i32gather_epi32(steps, in + row * in_stride + c, 4));
#endif
  for (; row < rows; ++row)
    for (int64_t c = 0; c < columns; ++c) out[c * out_stride + row] = in[row * in_stride + c];
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
template void store_row(const float*, float, void*, DType, int64_t);
template void store_row(const double*, double, void*, DType, int64_t);

}  // namespace symm_cp
