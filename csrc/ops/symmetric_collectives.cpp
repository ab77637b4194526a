// torch's collectives that exist only for tensors in symmetric memory: reductions of tiles and
// blocks to one rank each, and NVSHMEM's and multicast's broadcast, all-gather and all-to-all.
// torch has these ops only on GPUs.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <set>

#include "ops/as_torch.h"
#include "ops/kernels.h"

namespace symm_cp {

namespace {

using namespace kernels;
using torch::jit::Stack;

Extent bytes_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr(), static_cast<int64_t>(tensor.nbytes())};
}

Exchange exchange_of(ExchangeKind kind, std::string name) {
  Exchange exchange{};
  exchange.kind = kind;
  exchange.call_name = std::move(name);
  return exchange;
}

// --- sums for one rank each ----------------------------------------------------------------------

// Blocks, their roots, and the tensors for the sums of the blocks whose root is this rank.
struct Reduction {
  std::vector<at::Tensor> blocks;
  std::vector<int64_t> roots;
  std::vector<at::Tensor> outs;
};

// Sums each block over the ranks, in rank order; the block's root gets the sum.
void reduce_to_roots(const char* op, Group& group, const std::string& detail,
                     const Reduction& reduction) {
  const auto& [blocks, roots, outs] = reduction;
  const at::Tensor& first = blocks.front();
  check_reduce_op(op, "input", first.scalar_type(), "sum");
  Exchange exchange = exchange_of(ExchangeKind::kReduceScatter,
                                  name_call(op, first.scalar_type(), first.sizes(), detail));
  set_reduction(exchange, first.scalar_type(), ReduceOp::kSum);
  std::vector<at::Tensor> packed;  // each rank's blocks
  for (int rank = 0; rank < group.world_size(); ++rank) {
    std::vector<at::Tensor> theirs;
    for (size_t i = 0; i < blocks.size(); ++i)
      if (roots[i] == rank) theirs.push_back(blocks[i].reshape(-1));
    packed.push_back(theirs.empty()       ? first.new_empty({0})
                     : theirs.size() == 1 ? theirs.front().contiguous()
                                          : at::cat(theirs));
    exchange.input.push_back(bytes_of(packed.back()));
  }
  const bool direct = outs.size() == 1 && outs.front().is_contiguous();
  at::Tensor sums = direct ? outs.front() : at::empty_like(packed[group.rank()]);
  if (outs.empty()) sums = first.new_empty({0});
  exchange.output.push_back(bytes_of(sums));
  run(group, std::move(exchange));
  if (direct) return;
  int64_t at = 0;
  for (const at::Tensor& out : outs) {
    out.copy_(sums.narrow(0, at, out.numel()).view(out.sizes()));
    at += out.numel();
  }
}

void check_tile(const char* op, const char* name, const at::Tensor& tile) {
  TORCH_CHECK_VALUE(tile.dim() == 2, op, ": ", name, " has ", tile.dim(),
                    " dimensions, must have 2");
  check_symmetric(op, name, tile);
}

void check_like(const char* op, const char* name, const at::Tensor& tensor, const char* other_name,
                const at::Tensor& other) {
  TORCH_CHECK_VALUE(tensor.sizes() == other.sizes() && tensor.scalar_type() == other.scalar_type(),
                    op, ": ", name, " is ", name_dtype(tensor.scalar_type()), " ", tensor.sizes(),
                    ", must match ", other_name, ": ", name_dtype(other.scalar_type()), " ",
                    other.sizes());
}

constexpr const char* kTile = "tile_reduce";
constexpr const char* kTiles = "multi_root_tile_reduce";
constexpr const char* kReduce = "multimem_one_shot_reduce_out";
constexpr const char* kBlocks = "nccl_reduce_scatter_offset";

void tile_reduce(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  if (!guarded_as_torch(kTile, arguments, 3, kSync, [&](const std::shared_ptr<Group>& group) {
        const at::Tensor &in = arguments.tensor(0), &out = arguments.tensor(1);
        const int64_t root = arguments.number(2);
        check_tile(kTile, "in_tile", in);
        check_tile(kTile, "out_tile", out);
        check_like(kTile, "out_tile", out, "in_tile", in);
        check_rank(kTile, "root", root, group->world_size());
        check_sum(kTile, "reduce_op", arguments.text(4));
        Reduction reduction{{in}, {root}, {}};
        if (root == group->rank()) reduction.outs.push_back(out);
        reduce_to_roots(kTile, *group, "root " + std::to_string(root), reduction);
      }))
    return call_python(op, stack);
  arguments.end();
}

void multi_root_tile_reduce(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  if (!guarded_as_torch(kTiles, arguments, 3, kSync, [&](const std::shared_ptr<Group>& group) {
        Reduction reduction{arguments.tensors(0), *arguments.numbers(2), {}};
        const auto& [tiles, roots, outs] = reduction;
        const at::Tensor& out = arguments.tensor(1);
        TORCH_CHECK_VALUE(!tiles.empty() && tiles.size() == roots.size(), kTiles, ": ",
                          tiles.size(), " in_tiles and ", roots.size(),
                          " roots were given, counts must match and be at least 1");
        std::string detail = "roots";
        std::set<int64_t> seen;
        for (size_t i = 0; i < tiles.size(); ++i) {
          check_tile(kTiles, "in_tiles", tiles[i]);
          check_like(kTiles, "in_tiles", tiles[i], "in_tiles[0]", tiles[0]);
          check_rank(kTiles, "roots", roots[i], group->world_size());
          TORCH_CHECK_VALUE(seen.insert(roots[i]).second, kTiles, ": rank ", roots[i],
                            " is the root of two tiles, must be of at most one");
          detail += " " + std::to_string(roots[i]);
        }
        check_sum(kTiles, "reduce_op", arguments.text(4));
        if (seen.count(group->rank()) > 0) {
          check_tile(kTiles, "out_tile", out);
          check_like(kTiles, "out_tile", out, "in_tiles[0]", tiles[0]);
          reduction.outs.push_back(out);
        }
        reduce_to_roots(kTiles, *group, detail, reduction);
      }))
    return call_python(op, stack);
  arguments.end();
}

void multimem_reduce(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const at::Tensor out = arguments.tensor(4);
  if (!guarded_as_torch(kReduce, arguments, 3, kSync, [&](const std::shared_ptr<Group>& group) {
        const at::Tensor& input = arguments.tensor(0);
        const int64_t root = arguments.number(2);
        kernels::check_dense(kReduce, "input", input);
        check_symmetric(kReduce, "input", input);
        check_sum(kReduce, "reduce_op", arguments.text(1));
        check_sum_on_gpus(kReduce, input, arguments.text(1));
        check_rank(kReduce, "root", root, group->world_size());
        Reduction reduction{{input}, {root}, {}};
        if (root == group->rank()) {
          check_out(kReduce, "out", out, input.sizes(), input.scalar_type());
          reduction.outs.push_back(out);
        }
        reduce_to_roots(kReduce, *group, "root " + std::to_string(root), reduction);
      }))
    return call_python(op, stack);
  arguments.end(out);
}

// The blocks of a matrix along `dim`, and their roots.
Reduction blocks_of(const at::Tensor& input, int64_t dim, std::optional<std::vector<int64_t>> ends,
                    std::optional<std::vector<int64_t>> roots, int ranks) {
  const int64_t length = input.size(dim);
  if (!ends) {
    TORCH_CHECK_VALUE(length % ranks == 0, kBlocks, ": dimension dim=", dim, " has length ", length,
                      ", which is not divisible by world size ", ranks, ": give offsets");
    ends.emplace();
    for (int64_t i = 1; i <= ranks; ++i) ends->push_back(i * (length / ranks));
  }
  if (!roots) {
    roots.emplace();
    for (size_t i = 0; i < ends->size(); ++i) roots->push_back(static_cast<int64_t>(i) % ranks);
  }
  TORCH_CHECK_VALUE(!ends->empty() && ends->size() == roots->size(), kBlocks, ": ", ends->size(),
                    " offsets and ", roots->size(),
                    " dst_ranks were given, counts must match and be at least 1");
  Reduction reduction{{}, *roots, {}};
  std::vector<size_t> owned(ranks, 0);  // number of blocks of each rank so far
  std::vector<int64_t> lengths;         // length of the first, second, ... block of every rank
  int64_t begin = 0;
  for (size_t i = 0; i < ends->size(); ++i) {
    const int64_t end = (*ends)[i], root = (*roots)[i];
    TORCH_CHECK_VALUE(begin <= end && end <= length, kBlocks, ": offsets[", i, "]=", end,
                      " must be at least ", begin, " and at most ", length,
                      ", the length of dimension dim=", dim);
    check_rank(kBlocks, "dst_ranks", root, ranks);
    reduction.blocks.push_back(input.narrow(dim, begin, end - begin));
    const size_t nth = owned[root]++;
    if (nth == lengths.size()) lengths.push_back(end - begin);
    TORCH_CHECK_VALUE(lengths[nth] == end - begin, kBlocks, ": block ", i, ", the ", nth,
                      "-th of rank ", root, ", has length ", end - begin,
                      ", must be as long as other ranks' ", nth, "-th: ", lengths[nth]);
    begin = end;
  }
  for (int rank = 0; rank < ranks; ++rank)
    TORCH_CHECK_VALUE(owned[rank] == lengths.size(), kBlocks, ": dst_ranks give rank ", rank, " ",
                      owned[rank], " of ", ends->size(),
                      " blocks, must give all ranks the same number");
  return reduction;
}

void reduce_scatter_offset(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  if (!guarded_as_torch(kBlocks, arguments, 2, kSync, [&](const std::shared_ptr<Group>& group) {
        const at::Tensor& input = arguments.tensor(0);
        const int64_t dim = arguments.number(3);
        TORCH_CHECK_VALUE(input.dim() == 2, kBlocks, ": input has ", input.dim(),
                          " dimensions, must have 2");
        TORCH_CHECK_VALUE(dim == 0 || dim == 1, kBlocks, ": dim=", dim, " must be 0 or 1");
        TORCH_CHECK_VALUE(input.stride(1) == 1, kBlocks, ": input has strides ", input.strides(),
                          ", the last must be 1");
        check_symmetric(kBlocks, "input", input);
        check_sum(kBlocks, "red_op", arguments.text(6));
        Reduction reduction =
            blocks_of(input, dim, arguments.numbers(4), arguments.numbers(5), group->world_size());
        reduction.outs = arguments.tensors(1);
        size_t owned = 0;
        for (size_t i = 0; i < reduction.blocks.size(); ++i) {
          if (reduction.roots[i] != group->rank()) continue;
          if (owned < reduction.outs.size())
            check_out(kBlocks, "out", reduction.outs[owned], reduction.blocks[i].sizes(),
                      input.scalar_type());
          ++owned;
        }
        TORCH_CHECK_VALUE(owned == reduction.outs.size(), kBlocks, ": ", reduction.outs.size(),
                          " tensors were given in out, must be one for each of ", owned, " blocks");
        std::string detail = "dim=" + std::to_string(dim) + " roots";
        for (const int64_t root : reduction.roots) detail += " " + std::to_string(root);
        reduce_to_roots(kBlocks, *group, detail, reduction);
      }))
    return call_python(op, stack);
  arguments.end();
}

// --- copies --------------------------------------------------------------------------------------

constexpr const char* kMulticastGather = "multimem_all_gather_out";
constexpr const char* kBroadcast = "nvshmem_broadcast";
constexpr const char* kAllToAll = "nvshmem_all_to_all";

std::vector<Extent> equal_parts(const at::Tensor& tensor, int ranks) {
  const int64_t bytes = static_cast<int64_t>(tensor.nbytes()) / ranks;
  std::vector<Extent> parts;
  for (int rank = 0; rank < ranks; ++rank)
    parts.push_back({static_cast<char*>(tensor.mutable_data_ptr()) + rank * bytes, bytes});
  return parts;
}

void multimem_all_gather(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const at::Tensor out = arguments.tensor(2);
  if (!guarded_as_torch(
          kMulticastGather, arguments, 1, kSync, [&](const std::shared_ptr<Group>& group) {
            const at::Tensor& input = arguments.tensor(0);
            check_has_dims(kMulticastGather, "input", input);
            kernels::check_dense(kMulticastGather, "input", input);
            check_symmetric(kMulticastGather, "out", out);
            at::DimVector sizes(input.sizes());
            sizes[0] *= group->world_size();
            check_out(kMulticastGather, "out", out, sizes, input.scalar_type());
            if (checks_as_gpus() && out.numel() > 0)
              alignment_on_gpus(kMulticastGather, "out", out);
            const at::Tensor given = overlap(input, out) ? input.clone() : input;
            Exchange exchange =
                exchange_of(ExchangeKind::kAllGather,
                            name_call(kMulticastGather, input.scalar_type(), input.sizes(), ""));
            exchange.input.push_back(bytes_of(given));
            exchange.output = equal_parts(out, group->world_size());
            run(*group, std::move(exchange));
          }))
    return call_python(op, stack);
  arguments.end(out);
}

void broadcast(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const at::Tensor input = arguments.tensor(0);
  if (!guarded_as_torch(kBroadcast, arguments, 2, kSync, [&](const std::shared_ptr<Group>& group) {
        const int64_t root = arguments.number(1);
        kernels::check_dense(kBroadcast, "input", input);
        check_symmetric(kBroadcast, "input", input);
        check_rank(kBroadcast, "root", root, group->world_size());
        Exchange exchange = exchange_of(ExchangeKind::kAllGather,
                                        name_call(kBroadcast, input.scalar_type(), input.sizes(),
                                                  "root " + std::to_string(root)));
        exchange.input.resize(1);
        exchange.output.resize(static_cast<size_t>(group->world_size()));
        (root == group->rank() ? exchange.input[0] : exchange.output[root]) = bytes_of(input);
        run(*group, std::move(exchange));
      }))
    return call_python(op, stack);
  arguments.end(input);
}

void exchange_equal_parts(const c10::OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, stack);
  const at::Tensor out = arguments.tensor(1);
  if (!guarded_as_torch(kAllToAll, arguments, 2, kSync, [&](const std::shared_ptr<Group>& group) {
        const at::Tensor& input = arguments.tensor(0);
        const int ranks = group->world_size();
        kernels::check_dense(kAllToAll, "input", input);
        kernels::check_dense(kAllToAll, "out", out);
        check_symmetric(kAllToAll, "input", input);
        check_symmetric(kAllToAll, "out", out);
        TORCH_CHECK_VALUE(input.numel() == out.numel() && input.scalar_type() == out.scalar_type(),
                          kAllToAll, ": out is ", name_dtype(out.scalar_type()), " of ",
                          out.numel(),
                          " elements, must match input: ", name_dtype(input.scalar_type()), " of ",
                          input.numel());
        TORCH_CHECK_VALUE(input.numel() % ranks == 0, kAllToAll, ": input has ", input.numel(),
                          " elements, which is not divisible by world size ", ranks);
        const at::Tensor given = overlap(input, out) ? input.clone() : input;
        Exchange exchange =
            exchange_of(ExchangeKind::kAllToAll,
                        name_call(kAllToAll, input.scalar_type(), {input.numel()}, ""));
        exchange.input = equal_parts(given, ranks);
        exchange.output = equal_parts(out, ranks);
        run(*group, std::move(exchange));
      }))
    return call_python(op, stack);
  arguments.end(out);
}

}  // namespace

TORCH_LIBRARY_IMPL(symm_mem, CPU, m) {
  m.impl("tile_reduce", torch::CppFunction::makeFromBoxedFunction<&tile_reduce>());
  m.impl("multi_root_tile_reduce",
         torch::CppFunction::makeFromBoxedFunction<&multi_root_tile_reduce>());
  m.impl("multimem_one_shot_reduce_out",
         torch::CppFunction::makeFromBoxedFunction<&multimem_reduce>());
  m.impl("nccl_reduce_scatter_offset",
         torch::CppFunction::makeFromBoxedFunction<&reduce_scatter_offset>());
  m.impl("multimem_all_gather_out",
         torch::CppFunction::makeFromBoxedFunction<&multimem_all_gather>());
  m.impl("nvshmem_broadcast", torch::CppFunction::makeFromBoxedFunction<&broadcast>());
  m.impl("nvshmem_all_to_all", torch::CppFunction::makeFromBoxedFunction<&exchange_equal_parts>());
}

}  // namespace symm_cp
