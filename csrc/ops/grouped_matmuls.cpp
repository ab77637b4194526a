// Tokens to their experts and times their weights, and the way back: the kernels of
// symm_cp/ops/experts/fused.py.
//
// Dispatch: a rank hands its peers their rows, multiplies its own tokens while theirs are on their
// way, and the rest once it is there. Combine: products are written where the peers read them,
// those for the peers first, and added up there. To multiply the rows of an expert in two parts
// costs more than it hides where there are few of them: then all are multiplied at once.
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <algorithm>

#include "base/team.h"
#include "exchange/copy.h"
#include "memory/slot_stores.h"
#include "ops/kernels.h"
#include "ops/routing.h"

namespace symm_cp::experts {

namespace {

using namespace kernels;
using torch::jit::Stack;

constexpr const char* kDispatchMatmul = "fused_dispatch_grouped_matmul";
constexpr const char* kMatmulCombine = "fused_grouped_matmul_combine";

// The fewest rows of a part. A matmul packs its weights once, however many rows there are: in two
// parts of 128 rows it takes 7 to 10% longer, in two of 512 up to 2% (float32 and bfloat16, 1024 by
// 2048, AMD Zen 4).
constexpr int64_t kPartRows = 512;

using Tensors = std::vector<at::Tensor>;

// Whether the rows of a rank's own tokens are multiplied apart from those of others.
bool apart(const Routing& routing, int64_t rank, int64_t expert) {
  int64_t before = 0, after = 0;
  for (int64_t r = 0; r < routing.ranks(); ++r)
    if (r != rank) (r < rank ? before : after) += routing.count(r, expert);
  const auto suffices = [](int64_t rows) { return rows == 0 || rows >= kPartRows; };
  return routing.count(rank, expert) >= kPartRows && before + after > 0 && suffices(before) &&
         suffices(after);
}

// Whether that is so anywhere: the same on all ranks.
bool any_apart(const Routing& routing) {
  for (int64_t e = 0; e < routing.experts(); ++e)
    if (apart(routing, e / routing.local(), e)) return true;
  return false;
}

// Rows of one of this rank's experts.
struct Block {
  int64_t expert;
  int64_t first;
  int64_t rows;
};

// The blocks of this rank's own tokens that are multiplied apart, and all others.
struct Blocks {
  std::vector<Block> own, others;

  explicit Blocks(const Routing& routing) {
    const int64_t rank = routing.rank();
    for (int64_t local = 0; local < routing.local(); ++local) {
      const int64_t expert = rank * routing.local() + local;
      const int64_t first = routing.first_row(0, expert);
      const int64_t last = routing.first_row(routing.ranks() - 1, expert) +
                           routing.count(routing.ranks() - 1, expert);
      if (!apart(routing, rank, expert)) {
        add(others, {local, first, last - first});
        continue;
      }
      const int64_t begin = routing.first_row(rank, expert), count = routing.count(rank, expert);
      add(own, {local, begin, count});
      add(others, {local, first, begin - first});
      add(others, {local, begin + count, last - begin - count});
    }
  }

 private:
  static void add(std::vector<Block>& to, const Block& block) {
    if (block.rows > 0) to.push_back(block);
  }
};

// to = rows @ weight of the expert, or += that.
void multiply(const at::Tensor& rows, const at::Tensor& weight, at::Tensor to, const Block& block,
              bool add) {
  at::Tensor out = to.narrow(0, block.first, block.rows);
  const at::Tensor left = rows.narrow(0, block.first, block.rows);
  const at::Tensor right = weight.select(0, block.expert);
  if (add)
    out.addmm_(left, right);
  else
    at::mm_out(out, left, right);
}

// Raises ValueError or TypeError unless `weight` is of this rank's experts, for rows of `like`.
void check_weight(const char* op, const std::string& name, const at::Tensor& weight,
                  const at::Tensor& like, int64_t local) {
  TORCH_CHECK_TYPE(weight.scalar_type() == like.scalar_type(), op, ": ", name, " is ",
                   name_dtype(weight.scalar_type()), ", must be ", name_dtype(like.scalar_type()),
                   " as the rows are");
  TORCH_CHECK_VALUE(weight.dim() == 3 && weight.size(0) == local && weight.size(1) == like.size(1),
                    op, ": ", name, " ", weight.sizes(), " must be (", local, ", ", like.size(1),
                    ", columns): one matrix for each expert of a rank");
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

void multiply_all(DispatchResults& results, const Tensors& weights,
                  const std::vector<Block>& blocks) {
  for (const Block& block : blocks)
    for (size_t i = 0; i < weights.size(); ++i)
      multiply(results.rows, weights[i], results.products[i], block, /*add=*/false);
}

class DispatchedMatmul : public SlotCall {
 public:
  DispatchedMatmul(const Routing& routing, const DispatchArguments& given, DispatchResults& results)
      : routing_(routing),
        weights_(given.weights),
        results_(results),
        blocks_(routing),
        input_(given.tokens),
        tokens_(routing.tokens(given.top_k)),
        rows_(static_cast<char*>(results.rows.mutable_data_ptr())) {}

  void run(Group& group, std::string call_name) {
    std::vector<int64_t> given, taken;
    for (int64_t peer = 0; peer < routing_.ranks(); ++peer) {
      const bool own = peer == routing_.rank();
      given.push_back(own ? 0 : routing_.given(peer) * input_.bytes);
      taken.push_back(own ? 0 : routing_.taken(peer) * input_.bytes);
    }
    SlotCall::run(group, std::move(call_name), routing_.most_sent() * input_.bytes, given, taken);
    after_exchange(group, kDispatchMatmul,
                   [&] { multiply_all(results_, weights_, blocks_.others); });
  }

 protected:
  void write(int peer, char* slot, SlotStores& stores) override {
    const int64_t begin = routing_.begin(peer), bytes = routing_.given(peer) * input_.bytes;
    stores.run(bytes, [&](bool past_caches) {
      divide_rows(routing_.given(peer), bytes, [&](int64_t first, int64_t last) {
        for (int64_t i = begin + first; i < begin + last; ++i)
          copy_bytes(slot + i * input_.bytes, token(i), input_.bytes, past_caches);
      });
      return bytes;
    });
  }
  void work() override {
    const int64_t rank = routing_.rank(), begin = routing_.begin(rank);
    const int64_t* numbers = routing_.arriving(rank);
    divide_rows(routing_.given(rank), routing_.given(rank) * input_.bytes,
                [&](int64_t first, int64_t last) {
                  for (int64_t i = first; i < last; ++i)
                    copy_bytes(rows_ + numbers[i] * input_.bytes, token(begin + i), input_.bytes,
                               false);
                });
    multiply_all(results_, weights_, blocks_.own);
  }
  // What a peer sends lies in the order of experts in its slot.
  void read(int peer, const char* slot) override {
    const int64_t mine = routing_.rank() * routing_.local();
    for (int64_t e = 0; e < mine; ++e) slot += routing_.count(peer, e) * input_.bytes;
    for (int64_t e = mine; e < mine + routing_.local(); ++e) {
      const int64_t bytes = routing_.count(peer, e) * input_.bytes;
      copy_bytes(rows_ + routing_.first_row(peer, e) * input_.bytes, slot, bytes, false);
      slot += bytes;
    }
  }

 private:
  const char* token(int64_t place) const { return input_.data + tokens_[place] * input_.pitch; }

  const Routing& routing_;
  const Tensors& weights_;
  DispatchResults& results_;
  Blocks blocks_;
  TokenRows input_;
  std::vector<int64_t> tokens_;
  char* rows_;
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
  const int64_t row_bytes = given.tokens.size(1) * static_cast<int64_t>(given.tokens.itemsize());
  if (any_apart(routing) && routing.most_sent() * row_bytes <= kMostSlotBytes) {
    results.rows = new_output(given.tokens, {given.rows, given.tokens.size(1)});
    DispatchedMatmul(routing, given, results)
        .run(group, name_of_rows(kDispatchMatmul, given.tokens, given.experts));
    return results;
  }
  results.rows = dispatch_rows(group, given.tokens, given.table, given.rows, given.top_k,
                               given.experts, kDispatchMatmul);
  after_exchange(group, kDispatchMatmul, [&] {
    const Blocks blocks(routing);  // as above: the same bits, however the rows travel
    multiply_all(results, given.weights, blocks.own);
    multiply_all(results, given.weights, blocks.others);
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

struct CombineArguments {
  Tensors rows, weights;
  at::Tensor factors, table;
  int64_t top_k, experts;
};

// Products of rows and weights, added up to `to`, which holds the rows of all experts.
void multiply_all(const CombineArguments& given, const at::Tensor& to,
                  const std::vector<Block>& blocks) {
  for (const Block& block : blocks)
    for (size_t i = 0; i < given.rows.size(); ++i)
      multiply(given.rows[i], given.weights[i], to, block, /*add=*/i > 0);
}

class CombinedMatmul : public Combination {
 public:
  CombinedMatmul(const Routing& routing, const CombineArguments& given, at::Tensor factors,
                 at::Tensor out)
      : Combination(routing, std::move(factors), given.top_k, out),
        given_(given),
        blocks_(routing),
        columns_(out.size(1)) {}

 protected:
  void write(int peer, char* slot, SlotStores&) override {
    if (products_.defined()) return;  // those for all peers are there
    products_ = at::from_blob(slot, {routing_.rows(), columns_}, given_.rows.front().options());
    multiply_all(given_, products_, blocks_.others);
  }
  void work() override {
    multiply_all(given_, products_, blocks_.own);
    own_rows_at(static_cast<const char*>(products_.const_data_ptr()), row_bytes());
  }

 private:
  const CombineArguments& given_;
  Blocks blocks_;
  int64_t columns_;
  at::Tensor products_;  // in the slot
};

void check_products(const CombineArguments& given, int64_t local) {
  TORCH_CHECK_VALUE(!given.rows.empty() && given.rows.size() == given.weights.size(),
                    kMatmulCombine, ": got ", given.rows.size(), " rows and ", given.weights.size(),
                    " weights, needs as many of both, at least one");
  const at::Tensor &first = given.rows.front(), &weight = given.weights.front();
  for (size_t i = 0; i < given.rows.size(); ++i) {
    const at::Tensor& rows = given.rows[i];
    check_matrix(kMatmulCombine, numbered("rows", i), rows);
    TORCH_CHECK_VALUE(rows.size(0) == first.size(0), kMatmulCombine, ": ", numbered("rows", i), " ",
                      rows.sizes(), " must have ", first.size(0), " rows as rows[0] has");
    check_weight(kMatmulCombine, numbered("weights", i), given.weights[i], rows, local);
    TORCH_CHECK_TYPE(rows.scalar_type() == first.scalar_type(), kMatmulCombine, ": ",
                     numbered("rows", i), " is ", name_dtype(rows.scalar_type()), ", must be ",
                     name_dtype(first.scalar_type()), " as rows[0] is");
    TORCH_CHECK_VALUE(given.weights[i].size(2) == weight.size(2), kMatmulCombine, ": ",
                      numbered("weights", i), " ", given.weights[i].sizes(), " must have ",
                      weight.size(2), " columns as weights[0] has");
  }
}

at::Tensor matmul_combine(Group& group, const CombineArguments& given) {
  const Routing routing(kMatmulCombine, given.table, given.experts, group);
  check_products(given, routing.local());
  const at::Tensor& like = given.rows.front();
  check_combine(kMatmulCombine, like, given.factors, routing, given.top_k);
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor factors = factors_for(given.factors, like.scalar_type());
  const int64_t columns = given.weights.front().size(2);
  at::Tensor out = new_output(like, {routing.pairs() / given.top_k, columns});
  CombinedMatmul call(routing, given, factors, out);
  if (group.world_size() > 1 && routing.most_rows() * call.row_bytes() <= kMostSlotBytes) {
    call.run(group, name_of_rows(kMatmulCombine, out, given.experts));
    return out;
  }
  const at::Tensor products = new_output(like, {routing.rows(), columns});
  const Blocks blocks(routing);
  multiply_all(given, products, blocks.own);
  multiply_all(given, products, blocks.others);
  return combine_rows(group, products, given.factors, given.table, given.top_k, given.experts,
                      kMatmulCombine);
}

// Arguments: rows, weights, factors, table, top_k, num_experts, group name.
void matmul_combine_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  at::Tensor out;
  const auto body = [&](const std::shared_ptr<Group>& group) {
    out = matmul_combine(*group,
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
