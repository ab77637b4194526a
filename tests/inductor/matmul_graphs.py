"""Functions whose graphs have matmuls of gathered tensors, and products that are scattered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from symm_cp.inductor.options import Options
from tests.inductor.graphs import AG, RS, Case, gather, scatter


def gather_in_turn(group: Any, x: Any, w: Any, u: Any) -> Any:
    first = (full := gather(x, 0, group)) @ w
    return first, full @ (u + first.sum())  # the second needs the first


def gather_cut(parts: Callable[[Any], Any], group: Any, x: Any, w: Any) -> Any:
    """The chosen ranks' rows, side by side."""
    return torch.cat(parts(gather(x, 0, group).split(x.shape[0])), 1) @ w


def gather_overlapping(group: Any, x: Any, w: Any) -> Any:
    full, n = gather(x, 0, group), x.shape[0]
    return torch.cat([full[i : i + n] for i in range(full.shape[0] // n)], 1) @ w


def gather_for_experts(group: Any, x: Any, w: Any) -> Any:
    rows = gather(x, 0, group)
    ends = torch.tensor([3, len(rows)], dtype=torch.int32)
    return scatter(torch._grouped_mm(rows, w, offs=ends), 0, group)


def scatter_mean(group: Any, x: Any, w: Any) -> Any:
    if torch.compiler.is_compiling():
        return scatter(x @ w, 1, group, "avg")
    return scatter(x @ w, 1, group) / group.size()  # torch 2.11's gloo only sums


def block(group: Any, x: Any, w: Any, u: Any) -> Any:
    return scatter(torch.relu(gather(x, 1, group) @ w) @ u, 1, group)


def keep_scattered(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    kept = op is torch.ops._c10d_functional.reduce_scatter_tensor.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def block_recomputed(group: Any, *inputs: Any, **kwargs: Any) -> Any:
    return checkpoint(lambda *a: block(group, *a), *inputs, use_reentrant=False, **kwargs)


def block_selectively_recomputed(group: Any, *inputs: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, keep_scattered)
    return block_recomputed(group, *inputs, context_fn=contexts)


def graphs(W: int) -> dict[str, Case]:
    x2, x3, w2, w3 = (4, 6), (2, 4, 6), (6, 5), (6, 3)
    on_rows, on_middle = ((4 * W, 6), w2), ((2, 4 * W, 6), w2)
    not_followed = "which is not followed"
    return {
        "rows": Case(lambda g, x, w: gather(x, 0, g) @ w, (x2, w2), (AG, RS), grad=True),
        "middle": Case(lambda g, x, w: gather(x, 1, g) @ w, (x3, w2), (AG, RS), grad=True),
        "columns": Case(
            lambda g, x, w: gather(x, 2, g) @ w, (x3, (6 * W, 5)), (AG, RS), grad=True
        ),
        "negative": Case(lambda g, x, w: gather(x, -2, g) @ w, (x3, w2), (AG,)),
        "many": Case(
            lambda g, x, w, u: ((full := gather(x, 1, g)) @ w, (full @ u).relu()),
            (x3, w2, w3), (AG, RS), grad=True,
        ),
        "in turn": Case(gather_in_turn, (x2, w2, w2), (AG,)),
        "bias": Case(
            lambda g, x, w, b: F.linear(gather(x, 1, g), w.mT, b), (x3, w2, (5,)), (AG, RS),
            grad=True,
        ),
        "used elsewhere": Case(
            lambda g, x, w: ((full := gather(x, 1, g)) @ w, full.exp()), (x3, w2), (AG,)
        ),
        "heads": Case(  # (B, S, H, E) as attention has it, heads flattened for a projection
            lambda g, x, w: gather(x, 1, g).transpose(1, 2).transpose(1, 2).flatten(2) @ w,
            ((2, 4, 3, 2), w2), (AG,),
        ),
        "transposed": Case(  # sequence first, batch first for the matmul
            lambda g, x, w: gather(x, 0, g).transpose(0, 1) @ w, (x3, w2), (AG,)
        ),
        "cast": Case(lambda g, x, w: gather(x, 0, g).float() @ w.float(), (x2, w2), (AG,)),
        "cast, both": Case(
            lambda g, x, w: ((full := gather(x, 0, g)).float() @ w.float(), full * 2), (x2, w2),
            reasons=("used as torch.float64",),
        ),
        "slices": Case(partial(gather_cut, lambda parts: parts), (x3, w2), (AG,)),
        "swapped": Case(
            partial(gather_cut, lambda parts: parts[::-1]), (x3, w2), reasons=(not_followed,)
        ),
        "the same twice": Case(
            partial(gather_cut, lambda parts: [parts[0]] * W), (x3, w2), reasons=(not_followed,)
        ),
        "squared": Case(
            lambda g, x: (full := gather(x, 0, g)) @ full, ((4, 4 * W),), reasons=("sums over",)
        ),
        "on both sides": Case(
            lambda g, x: (full := gather(x, 0, g)) @ full.t(), (x2,),
            reasons=("as its right operand",),
        ),
        "on both sides, and by weights": Case(
            lambda g, x, w: ((full := gather(x, 0, g)) @ full.t() @ full, full @ w), (x2, w2), (AG,)
        ),
        "overlapping": Case(gather_overlapping, (x3, w2), reasons=(not_followed,)),
        "halves": Case(
            lambda g, x, w: gather(x, 0, g)[: 2 * W] @ w, (x2, w2), reasons=(not_followed,)
        ),
        "on the right": Case(
            lambda g, x, w: w @ gather(x, 0, g), (x2, (5, 4 * W)), reasons=("sums over",)
        ),
        "summed over": Case(lambda g, x, w: gather(x, 0, g).mT @ w, (x2, (4 * W, 5)), (AG,)),
        "alone": Case(lambda g, x: gather(x, 0, g).exp(), (x2,), reasons=("feeds no matmul",)),
        "experts": Case(
            gather_for_experts, ((4, 16), (2, 16, 16)), grad=True, dtype=torch.bfloat16,
            reasons=("it feeds _grouped_mm, which has", "_grouped_mm feeds it, which has"),
        ),
        "two": Case(
            lambda g, x, y, w: (gather(x, 0, g) @ w, gather(y, 0, g) @ w), (x2, (3, 6), w2),
            (AG, AG),
        ),
        "small": Case(
            lambda g, x, w: gather(x, 0, g) @ w, (x2, w2), reasons=("is too small",),
            options=Options(min_flops=1e6),
        ),
        "scatter rows": Case(lambda g, x, w: scatter(x @ w, 0, g), on_rows, (RS, AG), grad=True),
        "scatter middle": Case(
            lambda g, x, w: scatter(x @ w, 1, g), on_middle, (RS, AG), grad=True
        ),
        "scatter columns": Case(
            lambda g, x, w: scatter(x @ w, 2, g), (x3, (6, 3 * W)), (RS, AG), grad=True
        ),
        "mean": Case(scatter_mean, on_middle, (RS,)),
        "scatter bias": Case(
            lambda g, x, w, b: scatter(F.linear(x, w.mT, b), 1, g), (*on_middle, (5,)), (RS, AG),
            grad=True,
        ),
        "product used elsewhere": Case(
            lambda g, x, w: (scatter(y := x @ w, 0, g), y.exp()), on_rows,
            reasons=("is used elsewhere",),
        ),
        "narrowed": Case(lambda g, x, w: scatter((x @ w).float(), 0, g), on_rows, (RS,)),
        "widened": Case(
            lambda g, x, w: scatter((x @ w).double(), 0, g), on_rows, reasons=("wider than",),
            dtype=torch.float32,
        ),
        "of a function": Case(
            lambda g, x, w: scatter((x @ w).relu(), 0, g), on_rows,
            reasons=("not the product of a matmul",),
        ),
        "largest": Case(
            lambda g, x, w: scatter(x @ w, 0, g, "max"), on_rows, reasons=("reduces by max",)
        ),
        "block": Case(block, (x3, w2, (5, 6)), (AG, RS, AG, RS), grad=True),
        "mixed precision": Case(  # communication in float32, products in bfloat16
            lambda g, x, w: (gather(x, 0, g).bfloat16() @ w.bfloat16()).float(),
            ((8, 16), (16, 8)), (AG,), grad=True, dtype=torch.float32,
            reasons=("which is wider",),  # the gradient, which is reduced in float32
        ),
        "block, selectively recomputed": Case(
            block_selectively_recomputed, (x3, w2, (5, 6)), (AG, RS), grad=True
        ),
        "block, recomputed": Case(block_recomputed, (x3, w2, (5, 6)), (AG, RS), grad=True),
    }  # fmt: skip
