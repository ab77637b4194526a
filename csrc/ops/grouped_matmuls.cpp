// The kernels of symm_cp/ops/experts/fused.py: send tokens to their experts and multiply them by
// the experts' weights, and the reverse.
//
// All rows of an expert are multiplied at once. Multiplying a rank's own tokens first would not
// hide the transfer, as nothing copies in the background, and a matmul in two parts packs its
// weights twice: two parts of 512 rows take 2 to 5% longer than one matmul (float32 and bfloat16,
// 1024 by 2048, AMD Zen 4). In the reverse direction, products are written directly to the slot,
// where the peers read them.
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "ops/grouped_matmuls.h"
#include "ops/kernels.h"

namespace symm_cp::experts {

using namespace kernels;
using torch::jit::Stack;

void multiply(const Routing& routing, const at::Tensor& rows, const at::Tensor& weight,
              const at::Tensor& to, bool add) {
  for_each_expert(routing, [&](int64_t expert, int64_t begin, int64_t count) {
    if (count == 0) return;
    at::Tensor out = to.narrow(0, begin, count);
    const at::Tensor left = rows.narrow(0, begin, count), right = weight.select(0, expert);
    if (add)
      out.addmm_(left, right);
    else
      at::mm_out(out, left, right);
  });
}

void check_matrix(const char* op, const std::string& name, const at::Tensor& rows) {
  const auto dtype = rows.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
      op, ": ", name, " is ", name_dtype(dtype),
      ", must be torch.float64, torch.float32, torch.bfloat16 or torch.float16");
  TORCH_CHECK_VALUE(rows.dim() == 2, op, ": ", name, " ", rows.sizes(),
                    " must have 2 dimensions: (rows, columns)");
}

std::string numbered(const char* name, size_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

namespace {

constexpr const char* kDispatchMatmul = "fused_dispatch_grouped_matmul";
constexpr const char* kMatmulCombine = "fused_grouped_matmul_combine";

// Raises ValueError or TypeError unless `weight` fits this rank's experts and rows like `like`.
void check_weight(const char* op, const std::string& name, const at::Tensor& weight,
                  const at::Tensor& like, int64_t local) {
  TORCH_CHECK_TYPE(weight.scalar_type() == like.scalar_type(), op, ": ", name, " is ",
                   name_dtype(weight.scalar_type()), ", must be ", name_dtype(like.scalar_type()),
                   " as the rows are");
  TORCH_CHECK_VALUE(weight.dim() == 3 && weight.size(0) == local && weight.size(1) == like.size(1),
                    op, ": ", name, " ", weight.sizes(), " must be (", local, ", ", like.size(1),
                    ", columns): one matrix for each expert of a rank");
}

// --- fused_dispatch_grouped_matmul -------------------------------------------------------------

struct DispatchArguments {
  at::Tensor tokens;
  Tensors weights;
  at::Tensor table;
  int64_t rows, top_k, experts;
};

struct DispatchResults {
  at::Tensor rows;
  Tensors products;
};

DispatchResults dispatch_matmul(Group& group, const DispatchArguments& given) {
  check_matrix(kDispatchMatmul, "tokens", given.tokens);
  const Routing routing(kDispatchMatmul, given.table, given.experts, group);
  check_dispatch(kDispatchMatmul, given.tokens, given.rows, given.top_k, routing);
  TORCH_CHECK_VALUE(!given.weights.empty(), kDispatchMatmul,
                    ": weights is empty, needs at least one");
  DispatchResults results;
  for (size_t i = 0; i < given.weights.size(); ++i) {
    const at::Tensor& weight = given.weights[i];
    check_weight(kDispatchMatmul, numbered("weights", i), weight, given.tokens, routing.local());
    results.products.push_back(new_output(given.tokens, {given.rows, weight.size(2)}));
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  results.rows = dispatch_rows(group, given.tokens, given.table, given.rows, given.top_k,
                               given.experts, kDispatchMatmul);
  after_exchange(group, kDispatchMatmul, [&] {
    for (size_t i = 0; i < given.weights.size(); ++i)
      multiply(routing, results.rows, given.weights[i], results.products[i], /*add=*/false);
  });
  return results;
}

// Arguments: tokens, weights, table, rows, top_k, num_experts, group name.
void dispatch_matmul_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  DispatchResults results;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    results =
        dispatch_matmul(*group, {arguments.tensor(0), arguments.tensors(1), arguments.tensor(2),
                                 arguments.number(3), arguments.number(4), arguments.number(5)});
  };
  if (!guarded(kDispatchMatmul, arguments, 6, kSync, body)) return call_python(op, stack);
  arguments.end(std::move(results.rows), std::move(results.products));
}

// --- fused_grouped_matmul_combine --------------------------------------------------------------

// Writes the sum of the products of rows and weights, plus the addend if there is one, to `to`.
void multiply_all(const Routing& routing, const CombineArguments& given, const at::Tensor& to) {
  for (size_t i = 0; i < given.rows.size(); ++i)
    multiply(routing, given.rows[i], given.weights[i], to, /*add=*/i > 0);
  if (given.addend.defined()) at::Tensor(to).add_(given.addend);
}

class CombinedMatmul : public Combination {
 public:
  CombinedMatmul(const Routing& routing, const CombineArguments& given, at::Tensor factors,
                 at::Tensor out)
      : Combination(routing, std::move(factors), given.top_k, out),
        given_(given),
        columns_(out.size(1)) {}

 protected:
  void write(int, char* slot, SlotStores&) override {
    if (products_.defined()) return;  // computed for all peers at once
    products_ = at::from_blob(slot, {routing_.rows(), columns_}, given_.rows.front().options());
    multiply_all(routing_, given_, products_);
  }
  void work() override {
    own_rows_at(static_cast<const char*>(products_.const_data_ptr()), row_bytes());
  }

 private:
  const CombineArguments& given_;
  int64_t columns_;
  at::Tensor products_;  // in the slot
};

}  // namespace

void check_products(const char* op, const CombineArguments& given, int64_t local) {
  TORCH_CHECK_VALUE(!given.rows.empty() && given.rows.size() == given.weights.size(), op, ": got ",
                    given.rows.size(), " rows and ", given.weights.size(),
                    " weights, counts must match and be at least 1");
  const at::Tensor &first = given.rows.front(), &weight = given.weights.front();
  for (size_t i = 0; i < given.rows.size(); ++i) {
    const at::Tensor& rows = given.rows[i];
    check_matrix(op, numbered("rows", i), rows);
    TORCH_CHECK_VALUE(rows.size(0) == first.size(0), op, ": ", numbered("rows", i), " ",
                      rows.sizes(), " must have ", first.size(0), " rows as rows[0] has");
    check_weight(op, numbered("weights", i), given.weights[i], rows, local);
    TORCH_CHECK_TYPE(rows.scalar_type() == first.scalar_type(), op, ": ", numbered("rows", i),
                     " is ", name_dtype(rows.scalar_type()), ", must be ",
                     name_dtype(first.scalar_type()), " as rows[0] is");
    TORCH_CHECK_VALUE(given.weights[i].size(2) == weight.size(2), op, ": ", numbered("weights", i),
                      " ", given.weights[i].sizes(), " must have ", weight.size(2),
                      " columns as weights[0] has");
  }
}

at::Tensor matmul_combine(const char* op, Group& group, const CombineArguments& given) {
  const Routing routing(op, given.table, given.experts, group);
  check_products(op, given, routing.local());
  const at::Tensor& like = given.rows.front();
  check_combine(op, like, given.factors, routing, given.top_k);
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor factors = factors_for(given.factors, like.scalar_type());
  const int64_t columns = given.weights.front().size(2);
  at::Tensor out = new_output(like, {routing.pairs() / given.top_k, columns});
  CombinedMatmul call(routing, given, factors, out);
  if (group.world_size() > 1 && routing.most_rows() * call.row_bytes() <= kMostSlotBytes) {
    call.run(group, name_of_rows(op, out, given.experts));
    return out;
  }
  const at::Tensor products = new_output(like, {routing.rows(), columns});
  multiply_all(routing, given, products);
  return combine_rows(group, products, given.factors, given.table, given.top_k, given.experts, op);
}

namespace {

// Arguments: rows, weights, factors, table, top_k, num_experts, group name.
void matmul_combine_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  at::Tensor out;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    out = matmul_combine(kMatmulCombine, *group,
                         {arguments.tensors(0), arguments.tensors(1), arguments.optional_tensor(2),
                          arguments.tensor(3), arguments.number(4), arguments.number(5)});
  };
  if (!guarded(kMatmulCombine, arguments, 6, kSync, body)) return call_python(op, stack);
  arguments.end(std::move(out));
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  m.impl(kDispatchMatmul, torch::CppFunction::makeFromBoxedFunction<&dispatch_matmul_kernel>());
  m.impl(kMatmulCombine, torch::CppFunction::makeFromBoxedFunction<&matmul_combine_kernel>());
}

}  // namespace symm_cp::experts
