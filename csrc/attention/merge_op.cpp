// The op that merges attention over parts of the keys (merge.h).
#include <ATen/core/Tensor.h>
#include <torch/library.h>
#include "base/parallel.h"

#include <algorithm>

#include "attention/merge.h"

namespace symm_cp {

namespace {

DType dtype_of(const at::Tensor& tensor) { return static_cast<DType>(tensor.scalar_type()); }

Rows rows_of(const at::Tensor& tensor, const void* data) {
  return {const_cast<void*>(data), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

// Merges attention over more keys, `part` and `part_lse`, into out (B, H, S, E) and lse (B, H, S).
// Strides are arbitrary, but the features of a row are contiguous. Both lse are float64 for float64
// parts, else float32; `out` has the dtype of lse, or the dtype of the parts when they are merged
// only once.
void merge_attention(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part,
                     const at::Tensor& part_lse) {
  TORCH_CHECK(out.sizes() == part.sizes() && lse.sizes() == part_lse.sizes(),
              "merge_attention: ", out.sizes(), " and ", part.sizes());
  TORCH_CHECK(part.size(3) == 1 || (out.stride(3) == 1 && part.stride(3) == 1),
              "merge_attention: rows are not contiguous");
  const auto wide = part.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK(lse.scalar_type() == wide && part_lse.scalar_type() == wide,
              "merge_attention: lse must be ", wide, ", not ", lse.scalar_type());
  const MergeSizes sizes{part.size(1), part.size(2), part.size(3)};
  const Rows to = rows_of(out, out.mutable_data_ptr()),
             to_lse = rows_of(lse, lse.mutable_data_ptr());
  const Rows from = rows_of(part, part.const_data_ptr());
  const Rows from_lse = rows_of(part_lse, part_lse.const_data_ptr());
  const auto merge = [&](int64_t begin, int64_t end) {
    const bool supported =
        merge_rows(to, dtype_of(out), to_lse, from, dtype_of(part), from_lse, sizes, begin, end);
    TORCH_CHECK(supported, "merge_attention: ", part.scalar_type(), " into ", out.scalar_type(),
                " is not supported");
  };
  const int64_t count = part.size(0) * sizes.rows * sizes.heads;
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, sizes.features));
  parallel_for(0, count, grain, merge);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(symm_cp, m) {
  m.def("merge_attention(Tensor(a!) out, Tensor(b!) lse, Tensor part, Tensor part_lse) -> ()",
        torch::dispatch(c10::DispatchKey::CPU, merge_attention));
}

}  // namespace symm_cp
