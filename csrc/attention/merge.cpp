#include "attention/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "exchange/float16.h"

namespace symm_cp {

namespace {

// A part with lse = -inf has seen no key and changes nothing, even if `lse` is also -inf. NaN
// propagates.
template <class Out, class Part, class Wide>
inline void merge_row(Out* out, Wide& lse, const Part* part, Wide part_lse, int64_t features) {
  constexpr Wide kNothing = -std::numeric_limits<Wide>::infinity();
  using ToOut = Conversion<Out>;
  using FromPart = Conversion<Part>;
  if (part_lse == kNothing) return;
  if (lse == kNothing) {
    for (int64_t d = 0; d < features; ++d) out[d] = ToOut::store(FromPart::load(part[d]));
    lse = part_lse;
    return;
  }
  const Wide top = std::max(lse, part_lse);
  Wide old_weight = std::exp(lse - top), weight = std::exp(part_lse - top);
  const Wide sum = old_weight + weight;
  old_weight /= sum;
  weight /= sum;
  for (int64_t d = 0; d < features; ++d)
    out[d] = ToOut::store(ToOut::load(out[d]) * old_weight + FromPart::load(part[d]) * weight);
  lse = top + std::log(sum);
}

template <class T>
T* row_of(const Rows& tensor, int64_t b, int64_t h, int64_t s) {
  return static_cast<T*>(tensor.data) + b * tensor.batch_stride + h * tensor.head_stride +
         s * tensor.row_stride;
}

template <class Out, class Part, class Wide>
void merge_typed(const Rows& out, const Rows& lse, const Rows& part, const Rows& part_lse,
                 const MergeSizes& sizes, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t h = i % sizes.heads, s = i / sizes.heads % sizes.rows,
                  b = i / sizes.heads / sizes.rows;
    merge_row<Out, Part, Wide>(row_of<Out>(out, b, h, s), *row_of<Wide>(lse, b, h, s),
                               row_of<const Part>(part, b, h, s),
                               *row_of<const Wide>(part_lse, b, h, s), sizes.features);
  }
}

}  // namespace

bool merge_rows(const Rows& out, DType out_dtype, const Rows& lse, const Rows& part,
                DType part_dtype, const Rows& part_lse, const MergeSizes& sizes, int64_t begin,
                int64_t end) {
  const auto merge = [&](auto out_type, auto part_type, auto lse_type) {
    merge_typed<decltype(out_type), decltype(part_type), decltype(lse_type)>(
        out, lse, part, part_lse, sizes, begin, end);
    return true;
  };
  const bool into_float32 = out_dtype == DType::kFloat32;
  if (!into_float32 && out_dtype != part_dtype) return false;
  switch (part_dtype) {
    case DType::kFloat32: return merge(float{}, float{}, float{});
    case DType::kFloat64: return !into_float32 && merge(double{}, double{}, double{});
    case DType::kBfloat16:
      return into_float32 ? merge(float{}, BFloat16{}, float{})
                          : merge(BFloat16{}, BFloat16{}, float{});
    case DType::kFloat16:
      return into_float32 ? merge(float{}, _Float16{}, float{})
                          : merge(_Float16{}, _Float16{}, float{});
    default: return false;
  }
}

}  // namespace symm_cp
