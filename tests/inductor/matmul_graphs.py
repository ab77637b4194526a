"""Functions whose graphs have matmuls of gathered tensors, and products that are scattered."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from symm_cp.inductor.options import Options
from tests.inductor.graphs import AG, RS, GraphCase, gather, scatter


def gather_rows(group: Any, x: Any, w: Any) -> Any:
    return gather(x, 0, group) @ w


def gather_middle(group: Any, x: Any, w: Any) -> Any:
    return gather(x, 1, group) @ w


def gather_columns(group: Any, x: Any, w: Any) -> Any:
    return gather(x, 2, group) @ w


def gather_negative(group: Any, x: Any, w: Any) -> Any:
    return gather(x, -2, group) @ w


def gather_for_many(group: Any, x: Any, w: Any, u: Any) -> Any:
    full = gather(x, 1, group)
    return full @ w, (full @ u).relu()


def gather_in_turn(group: Any, x: Any, w: Any, u: Any) -> Any:
    full = gather(x, 0, group)
    first = full @ w
    return first, full @ (u + first.sum())  # the second needs the first


def gather_with_bias(group: Any, x: Any, w: Any, b: Any) -> Any:
    return F.linear(gather(x, 1, group), w.mT, b)


def gather_used_elsewhere(group: Any, x: Any, w: Any) -> Any:
    full = gather(x, 1, group)
    return full @ w, full.exp()


def gather_then_heads(group: Any, x: Any, w: Any) -> Any:
    # (B, S, H, E) as attention has it, heads flattened for a projection.
    return gather(x, 1, group).transpose(1, 2).transpose(1, 2).flatten(2) @ w


def gather_transposed(group: Any, x: Any, w: Any) -> Any:
    return gather(x, 0, group).transpose(0, 1) @ w  # sequence first, batch first for the matmul


def gather_cast(group: Any, x: Any, w: Any) -> Any:
    return gather(x, 0, group).float() @ w.float()


def gather_cast_both(group: Any, x: Any, w: Any) -> Any:
    full = gather(x, 0, group)
    return full.float() @ w.float(), full * 2


def gather_by_slices(group: Any, x: Any, w: Any) -> Any:
    full = funcol.all_gather_tensor(x, 0, group)
    parts = full.split(x.shape[0])
    return torch.cat(list(parts), 1) @ w


def gather_swapped(group: Any, x: Any, w: Any) -> Any:
    parts = funcol.all_gather_tensor(x, 0, group).split(x.shape[0])
    return torch.cat(list(parts)[::-1], 1) @ w


def gather_twice_the_same(group: Any, x: Any, w: Any) -> Any:
    parts = funcol.all_gather_tensor(x, 0, group).split(x.shape[0])
    return torch.cat([parts[0] for _ in parts], 1) @ w


def gather_squared(group: Any, x: Any) -> Any:
    full = funcol.all_gather_tensor(x, 0, group)
    return full @ full


def gather_by_its_transpose(group: Any, x: Any) -> Any:
    full = funcol.all_gather_tensor(x, 0, group)
    return full @ full.t()


def gather_by_its_transpose_and_weights(group: Any, x: Any, w: Any) -> Any:
    full = funcol.all_gather_tensor(x, 0, group)
    return full @ full.t() @ full, full @ w


def gather_overlapping(group: Any, x: Any, w: Any) -> Any:
    full, n = funcol.all_gather_tensor(x, 0, group), x.shape[0]
    return torch.cat([full[i : i + n] for i in range(full.shape[0] // n)], 1) @ w


def gather_halves(group: Any, x: Any, w: Any) -> Any:
    full = funcol.all_gather_tensor(x, 0, group)
    return full[: full.shape[0] // 2] @ w


def gather_on_the_right(group: Any, x: Any, w: Any) -> Any:
    return w @ funcol.all_gather_tensor(x, 0, group)


def gather_summed_over(group: Any, x: Any, w: Any) -> Any:
    return funcol.all_gather_tensor(x, 0, group).mT @ w


def gather_alone(group: Any, x: Any) -> Any:
    return funcol.all_gather_tensor(x, 0, group).exp()


def gather_for_experts(group: Any, x: Any, w: Any) -> Any:
    rows = gather(x, 0, group)
    ends = torch.tensor([3, len(rows)], dtype=torch.int32)
    return scatter(torch._grouped_mm(rows, w, offs=ends), 0, group)


def gather_two(group: Any, x: Any, y: Any, w: Any) -> Any:
    return gather(x, 0, group) @ w, gather(y, 0, group) @ w


def scatter_rows(group: Any, x: Any, w: Any) -> Any:
    return scatter(x @ w, 0, group)


def scatter_middle(group: Any, x: Any, w: Any) -> Any:
    return scatter(x @ w, 1, group)


def scatter_columns(group: Any, x: Any, w: Any) -> Any:
    return scatter(x @ w, 2, group)


def scatter_mean(group: Any, x: Any, w: Any) -> Any:
    if torch.compiler.is_compiling():
        return funcol.reduce_scatter_tensor(x @ w, "avg", 1, group)
    return scatter(x @ w, 1, group) / group.size()  # torch 2.11's gloo only sums


def scatter_bias(group: Any, x: Any, w: Any, b: Any) -> Any:
    return scatter(F.linear(x, w.mT, b), 1, group)


def scatter_used_elsewhere(group: Any, x: Any, w: Any) -> Any:
    product = x @ w
    return funcol.reduce_scatter_tensor(product, "sum", 0, group), product.exp()


def scatter_narrowed(group: Any, x: Any, w: Any) -> Any:
    return funcol.reduce_scatter_tensor((x @ w).float(), "sum", 0, group)


def scatter_widened(group: Any, x: Any, w: Any) -> Any:
    return funcol.reduce_scatter_tensor((x @ w).double(), "sum", 0, group)


def scatter_of_a_sum(group: Any, x: Any, w: Any) -> Any:
    return funcol.reduce_scatter_tensor((x @ w).relu(), "sum", 0, group)


def scatter_largest(group: Any, x: Any, w: Any) -> Any:
    return funcol.reduce_scatter_tensor(x @ w, "max", 0, group)


def block(group: Any, x: Any, w: Any, u: Any) -> Any:
    return scatter(torch.relu(gather(x, 1, group) @ w) @ u, 1, group)


def block_recomputed(group: Any, x: Any, w: Any, u: Any) -> Any:
    return checkpoint(lambda *a: block(group, *a), x, w, u, use_reentrant=False)


def mixed_precision(group: Any, x: Any, w: Any) -> Any:
    # Parameters and communication in float32, products in bfloat16.
    full = gather(x, 0, group).bfloat16()
    return (full @ w.bfloat16()).float()


def keep_scattered(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    kept = op is torch.ops._c10d_functional.reduce_scatter_tensor.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def block_selectively_recomputed(group: Any, x: Any, w: Any, u: Any) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_scattered)
    return checkpoint(
        lambda *a: block(group, *a), x, w, u, use_reentrant=False, context_fn=contexts
    )


X3, W2 = (2, 4, 6), (6, 5)
small = Options(min_flops=1e6)


def graphs(W: int) -> dict[str, GraphCase]:
    return {
        "rows": GraphCase(gather_rows, ((4, 6), W2), (AG, RS), grad=True),
        "middle": GraphCase(gather_middle, (X3, W2), (AG, RS), grad=True),
        "columns": GraphCase(gather_columns, (X3, (6 * W, 5)), (AG, RS), grad=True),
        "negative": GraphCase(gather_negative, (X3, W2), (AG,)),
        "many": GraphCase(gather_for_many, (X3, W2, (6, 3)), (AG, RS), grad=True),
        "in turn": GraphCase(gather_in_turn, ((4, 6), W2, W2), (AG,)),
        "bias": GraphCase(gather_with_bias, (X3, W2, (5,)), (AG, RS), grad=True),
        "used elsewhere": GraphCase(gather_used_elsewhere, (X3, W2), (AG,)),
        "heads": GraphCase(gather_then_heads, ((2, 4, 3, 2), W2), (AG,)),
        "transposed": GraphCase(gather_transposed, (X3, W2), (AG,)),
        "cast": GraphCase(gather_cast, ((4, 6), W2), (AG,)),
        "cast, both": GraphCase(gather_cast_both, ((4, 6), W2), reasons=("used as torch.float64",)),
        "slices": GraphCase(gather_by_slices, (X3, W2), (AG,)),
        "swapped": GraphCase(gather_swapped, (X3, W2), reasons=("which is not followed",)),
        "the same twice": GraphCase(
            gather_twice_the_same, (X3, W2), reasons=("which is not followed",)
        ),
        "squared": GraphCase(gather_squared, ((4, 4 * W),), reasons=("sums over",)),
        "on both sides": GraphCase(
            gather_by_its_transpose, ((4, 6),), reasons=("as its right operand",)
        ),
        "on both sides, and by weights": GraphCase(
            gather_by_its_transpose_and_weights, ((4, 6), W2), (AG,)
        ),
        "overlapping": GraphCase(gather_overlapping, (X3, W2), reasons=("which is not followed",)),
        "halves": GraphCase(gather_halves, ((4, 6), W2), reasons=("which is not followed",)),
        "on the right": GraphCase(
            gather_on_the_right, ((4, 6), (5, 4 * W)), reasons=("sums over",)
        ),
        "summed over": GraphCase(gather_summed_over, ((4, 6), (4 * W, 5)), (AG,)),
        "alone": GraphCase(gather_alone, ((4, 6),), reasons=("feeds no matmul",)),
        "experts": GraphCase(
            gather_for_experts,
            ((4, 16), (2, 16, 16)),
            reasons=("it feeds _grouped_mm, which has", "_grouped_mm feeds it, which has"),
            grad=True,
            dtype=torch.bfloat16,
        ),
        "two": GraphCase(gather_two, ((4, 6), (3, 6), W2), (AG, AG)),
        "small": GraphCase(gather_rows, ((4, 6), W2), reasons=("is too small",), options=small),
        "scatter rows": GraphCase(scatter_rows, ((4 * W, 6), W2), (RS, AG), grad=True),
        "scatter middle": GraphCase(scatter_middle, ((2, 4 * W, 6), W2), (RS, AG), grad=True),
        "scatter columns": GraphCase(scatter_columns, (X3, (6, 3 * W)), (RS, AG), grad=True),
        "mean": GraphCase(scatter_mean, ((2, 4 * W, 6), W2), (RS,)),
        "scatter bias": GraphCase(scatter_bias, ((2, 4 * W, 6), W2, (5,)), (RS, AG), grad=True),
        "product used elsewhere": GraphCase(
            scatter_used_elsewhere, ((4 * W, 6), W2), reasons=("is used elsewhere",)
        ),
        "narrowed": GraphCase(scatter_narrowed, ((4 * W, 6), W2), (RS,)),
        "widened": GraphCase(
            scatter_widened, ((4 * W, 6), W2), reasons=("wider than",), dtype=torch.float32
        ),
        "of a function": GraphCase(
            scatter_of_a_sum, ((4 * W, 6), W2), reasons=("not the product of a matmul",)
        ),
        "largest": GraphCase(scatter_largest, ((4 * W, 6), W2), reasons=("reduces by max",)),
        "block": GraphCase(block, (X3, W2, (5, 6)), (AG, RS, AG, RS), grad=True),
        "mixed precision": GraphCase(
            mixed_precision,
            ((8, 16), (16, 8)),
            (AG,),
            reasons=("which is wider",),  # the gradient, which is reduced in float32
            grad=True,
            dtype=torch.float32,
        ),
        "block, selectively recomputed": GraphCase(
            block_selectively_recomputed, (X3, W2, (5, 6)), (AG, RS), grad=True
        ),
        "block, recomputed": GraphCase(block_recomputed, (X3, W2, (5, 6)), (AG, RS), grad=True),
    }
