// What the kernels of symm_cp/ops/experts/ do to the rows of each of a rank's experts: torch's
// matmuls, one after the other. The routing's table tells how many rows an expert has, so a loop in
// Python would read it in each call.
//
// All rows of an expert are multiplied at once. Multiplying a rank's own tokens first would not
// hide the transfer, as nothing copies in the background, and a matmul in two parts packs its
// weights twice: two parts of 512 rows take 2 to 5% longer than one matmul (float32 and bfloat16,
// 1024 by 2048, AMD Zen 4).
#include <ATen/Functions.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "base/parallel.h"
#include "exchange/row_sums.h"
#include "ops/kernels.h"
#include "ops/routing.h"

namespace symm_cp::experts {

namespace {

using kernels::new_output;

// Calls body(expert, first row, number of rows) for each expert of a rank, whose rows `rows` has.
template <class Body>
void for_each_expert(const at::Tensor& rows, const at::Tensor& table, int64_t experts, int64_t rank,
                     int64_t ranks, const Body& body) {
  constexpr const char* op = "grouped matmul";
  check_table(op, table, experts, ranks);
  const at::Tensor on_host = table.cpu();
  const int64_t *counts = on_host.const_data_ptr<int64_t>(), local = experts / ranks;
  std::vector<int64_t> each(static_cast<size_t>(local));
  for (int64_t r = 0; r < ranks; ++r)
    for (int64_t e = 0; e < local; ++e) each[e] += counts[r * experts + rank * local + e];
  int64_t total = 0;
  for (const int64_t count : each) total += count;
  TORCH_CHECK_VALUE(rows.size(0) == total, op, ": rows ", rows.sizes(), " must have ", total,
                    ", as dispatch returned");
  int64_t begin = 0;
  for (int64_t e = 0; e < local; begin += each[e++]) body(e, begin, each[e]);
}

at::Tensor multiply(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& table,
                    int64_t experts, int64_t rank, int64_t ranks) {
  at::Tensor out = new_output(rows, {rows.size(0), weight.size(2)});
  for_each_expert(rows, table, experts, rank, ranks, [&](int64_t e, int64_t begin, int64_t count) {
    at::Tensor to = out.narrow(0, begin, count);
    if (count > 0) at::mm_out(to, rows.narrow(0, begin, count), weight.select(0, e));
  });
  return out;
}

void multiply_add(const at::Tensor& to, const at::Tensor& rows, const at::Tensor& weight,
                  const at::Tensor& table, int64_t experts, int64_t rank, int64_t ranks) {
  for_each_expert(rows, table, experts, rank, ranks, [&](int64_t e, int64_t begin, int64_t count) {
    if (count > 0)
      to.narrow(0, begin, count).addmm_(rows.narrow(0, begin, count), weight.select(0, e));
  });
}

void multiply_transposed(const at::Tensor& to, const at::Tensor& left, const at::Tensor& right,
                         const at::Tensor& table, int64_t experts, int64_t rank, int64_t ranks) {
  for_each_expert(left, table, experts, rank, ranks, [&](int64_t e, int64_t begin, int64_t count) {
    at::Tensor out = to.select(0, e);  // zeros for an expert without rows
    at::mm_out(out, left.narrow(0, begin, count).t(), right.narrow(0, begin, count));
  });
}

void weigh(const at::Tensor& to, const at::Tensor& others, const at::Tensor& factors,
           const at::Tensor& dots) {
  const TokenRows other(others);
  const WeighedRows rows{to.mutable_data_ptr(),
                         other.data,
                         other.pitch,
                         factors.const_data_ptr(),
                         dots.mutable_data_ptr(),
                         to.size(1),
                         static_cast<DType>(to.scalar_type())};
  const int64_t grain =
      std::max<int64_t>(1, (int64_t{32} << 10) / std::max<int64_t>(1, rows.width));
  parallel_for(0, to.size(0), grain,
               [&](int64_t first, int64_t last) { weigh_rows(rows, first, last); });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(symm_cp, m) {
  constexpr auto everywhere = c10::DispatchKey::CompositeExplicitAutograd;
  // Rows of each expert @ its weight.
  m.def(
      "experts_mm(Tensor rows, Tensor weight, Tensor table, int num_experts, int rank, int ranks) "
      "-> Tensor",
      torch::dispatch(everywhere, multiply));
  // The same, added to `to`.
  m.def(
      "experts_addmm_(Tensor(a!) to, Tensor rows, Tensor weight, Tensor table, int num_experts, "
      "int rank, int ranks) -> ()",
      torch::dispatch(everywhere, multiply_add));
  // For each expert, sets its matrix of `to` to left^T @ right, of its rows of both.
  m.def(
      "experts_mm_transposed_(Tensor(a!) to, Tensor left, Tensor right, Tensor table, "
      "int num_experts, int rank, int ranks) -> ()",
      torch::dispatch(everywhere, multiply_transposed));
  // Adds the dot products of the rows of `to` and `others` to `dots` (N, 1), and multiplies `to` by
  // `factors` (N, 1), which like `dots` have the dtype of sums. `to` and `dots` are contiguous.
  m.def("weigh_rows_(Tensor(a!) to, Tensor others, Tensor factors, Tensor(b!) dots) -> ()",
        torch::dispatch(c10::DispatchKey::CPU, weigh));
}

}  // namespace symm_cp::experts
