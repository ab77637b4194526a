// Merging of attention over parts of the keys, by log-sum-exp.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

namespace symm_cp {

namespace {

// One row: out and lse take in `part`. A part with lse = -inf has seen no key and changes nothing,
// also where nothing has been seen before; NaN spreads.
template <class Out, class Part, class Wide>
inline void merge_row(Out* out, Wide& lse, const Part* part, Wide part_lse, int64_t features) {
  constexpr Wide kNothing = -std::numeric_limits<Wide>::infinity();
  if (part_lse == kNothing) return;
  if (lse == kNothing) {
    for (int64_t d = 0; d < features; ++d) out[d] = static_cast<Out>(static_cast<Wide>(part[d]));
    lse = part_lse;
    return;
  }
  const Wide top = std::max(lse, part_lse);
  Wide old_weight = std::exp(lse - top), weight = std::exp(part_lse - top);
  const Wide sum = old_weight + weight;
  old_weight /= sum;
  weight /= sum;
  for (int64_t d = 0; d < features; ++d) {
    const Wide merged =
        static_cast<Wide>(out[d]) * old_weight + static_cast<Wide>(part[d]) * weight;
    out[d] = static_cast<Out>(merged);
  }
  lse = top + std::log(sum);
}

template <class Out, class Part, class Wide>
void merge_typed(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part,
                 const at::Tensor& part_lse) {
  const int64_t heads = part.size(1), rows = part.size(2), features = part.size(3);
  Out* const o = out.mutable_data_ptr<Out>();
  Wide* const l = lse.mutable_data_ptr<Wide>();
  const Part* const p = part.const_data_ptr<Part>();
  const Wide* const pl = part_lse.const_data_ptr<Wide>();
  // Row by row and head by head, as the kernel's output lies in memory.
  const int64_t count = part.size(0) * rows * heads;
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, features));
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t h = i % heads, s = i / heads % rows, b = i / heads / rows;
      merge_row<Out, Part, Wide>(
          o + b * out.stride(0) + h * out.stride(1) + s * out.stride(2),
          l[b * lse.stride(0) + h * lse.stride(1) + s * lse.stride(2)],
          p + b * part.stride(0) + h * part.stride(1) + s * part.stride(2),
          pl[b * part_lse.stride(0) + h * part_lse.stride(1) + s * part_lse.stride(2)], features);
    }
  });
}

template <class Part>
void merge_into(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part,
                const at::Tensor& part_lse) {
  if (out.scalar_type() == at::kFloat)
    merge_typed<float, Part, float>(out, lse, part, part_lse);
  else
    merge_typed<Part, Part, float>(out, lse, part, part_lse);
}

// out (B, H, S, E) and lse (B, H, S) take in attention over more keys, `part` and `part_lse`, in
// place. Any strides, but each row of features is contiguous. Both lse are float32, for float64
// parts float64; `out` is of the dtype of lse, or of the parts where they are merged but once.
void merge_attention(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part,
                     const at::Tensor& part_lse) {
  TORCH_CHECK(out.sizes() == part.sizes() && lse.sizes() == part_lse.sizes(),
              "merge_attention: ", out.sizes(), " and ", part.sizes());
  TORCH_CHECK(part.size(3) == 1 || (out.stride(3) == 1 && part.stride(3) == 1),
              "merge_attention: rows are not contiguous");
  switch (part.scalar_type()) {
    case at::kFloat: return merge_typed<float, float, float>(out, lse, part, part_lse);
    case at::kDouble: return merge_typed<double, double, double>(out, lse, part, part_lse);
    case at::kBFloat16: return merge_into<at::BFloat16>(out, lse, part, part_lse);
    case at::kHalf: return merge_into<at::Half>(out, lse, part, part_lse);
    default: TORCH_CHECK(false, "merge_attention: ", part.scalar_type(), " is not supported");
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(symm_cp, m) {
  m.def("merge_attention(Tensor(a!) out, Tensor(b!) lse, Tensor part, Tensor part_lse) -> ()",
        torch::dispatch(c10::DispatchKey::CPU, merge_attention));
}

}  // namespace symm_cp
