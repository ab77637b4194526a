"""Fused ops against the same collectives and kernels, one after the other, from 1 row on.

    python benchmarks/never_behind.py --ranks 2 --json benchmarks/results/never_behind.json

The unfused form runs over this project's own backend and keeps its buffers. Prints the cases in
which the fused op is furthest behind it, worst first.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp
from benchmarks.harness import Case, main
from benchmarks.rivals import groups_over
from symm_cp.commands.harness.measure import FUSED, LIMIT, Row
from symm_cp.commands.harness.report import Written

UNFUSED = "unfused (symm_cp)"
#: Rows of each rank, inner dimension, columns.
SHAPES = [
    (rows, inner, columns)
    for rows, sizes in {
        1: ((64, 64), (1024, 1024), (4096, 4096)),
        16: ((64, 64), (256, 256), (1024, 1024), (1024, 4096)),
        64: ((256, 256), (1024, 1024), (4096, 1024)),
        256: ((256, 256), (1024, 1024), (1024, 4096)),
        1024: ((256, 256), (1024, 1024)),
        2048: ((2048, 2048),),
    }.items()
    for inner, columns in sizes
]

#: For float8 products, whose kernel takes ten times as long where processors only convert float8.
SCALED_SHAPES = [(1, 64, 64), (16, 256, 256), (64, 256, 256), (64, 1024, 1024), (1024, 1024, 1024)]

#: For forward and backward passes.
TRAINED_SHAPES = [
    (1, 64, 64),
    (16, 256, 256),
    (64, 1024, 1024),
    (256, 256, 256),
    (1024, 1024, 1024),
]

#: On each rank; 8 heads of 64 features.
TOKENS = (16, 64, 256, 1024)

# Renamed in torch 2.13, where the old names warn.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    (over,) = groups_over(group, "symm_cp").values()
    for dtype in (torch.float32, torch.bfloat16):
        for rows, inner, columns in SHAPES:
            yield _gather(group, over, dtype, rows, inner, columns)
            yield _scatter(group, over, dtype, rows, inner, columns)
            yield _reduce(group, over, dtype, rows, inner, columns)
        for shape in TRAINED_SHAPES:
            for op in (_gather, _scatter, _reduce):
                yield op(group, over, dtype, *shape, trained=True)
        for by_row in (False, True):
            for shape in _scaled_shapes(by_row):
                yield _scaled_gather(group, over, dtype, by_row, *shape)
                yield _scaled_scatter(group, over, dtype, by_row, *shape)
        for tokens in TOKENS:
            for causal in (False, True):
                for trained in (False, True):
                    yield _attention(group, over, dtype, tokens, causal, trained)


def _scaled_shapes(by_row: bool) -> list[tuple[int, int, int]]:
    """Returns `SCALED_SHAPES`, or two of them where torch takes seconds for the others.

    oneDNN has only a reference kernel for one scale of a tensor on some processors (8 MFLOP in 80
    ms on an Intel Xeon with AMX); the fused ops do without it.
    """
    operands = _float8(*SCALED_SHAPES[1], by_row)
    seconds = min(timeit.repeat(lambda: torch._scaled_mm(*operands), number=1, repeat=3))
    return SCALED_SHAPES[:2] if seconds > 0.02 else SCALED_SHAPES


class _Gathered(torch.autograd.Function):
    """Gathers shards along the first dimension; reduce-scatters the gradient."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, over: dist.ProcessGroup) -> torch.Tensor:
        ctx.over = over
        whole = shard.new_empty(over.size() * shard.shape[0], *shard.shape[1:])
        _gather_into(whole, shard, group=over)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        part = grad.new_empty(grad.shape[0] // ctx.over.size(), *grad.shape[1:])
        _scatter_into(part, grad.contiguous(), group=ctx.over)
        return part, None


class _Scattered(torch.autograd.Function):
    """This rank's rows of the sum over ranks; gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, over: dist.ProcessGroup) -> torch.Tensor:
        ctx.over = over
        part = whole.new_empty(whole.shape[0] // over.size(), *whole.shape[1:])
        _scatter_into(part, whole, group=over)
        return part

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        whole = grad.new_empty(ctx.over.size() * grad.shape[0], *grad.shape[1:])
        _gather_into(whole, grad, group=ctx.over)
        return whole, None


class _Summed(torch.autograd.Function):
    """The sum over ranks; gradients are summed likewise."""

    @staticmethod
    def forward(ctx: Any, product: torch.Tensor, over: dist.ProcessGroup) -> torch.Tensor:
        ctx.over = over
        dist.all_reduce(product, group=over)
        ctx.mark_dirty(product)
        return product

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.over)
        return grad, None


def _case(
    op: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    forwards: dict[str, Callable[[], torch.Tensor]],
    trained: Sequence[torch.Tensor] = (),
    trained_alone: Sequence[torch.Tensor] = (),
) -> Case:
    """Makes a case: with gradients if there are `trained` inputs (`trained_alone`: the limit's)."""
    variants: dict[str, Callable[[], object]] = {**forwards}
    if trained:
        op += ", both passes"
        for name, forward in forwards.items():
            variants[name] = _with_gradients(forward, trained_alone if name == LIMIT else trained)

    def check() -> None:
        near = {torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(variants[FUSED](), variants[UNFUSED](), rtol=near, atol=near)

    name = f"{op}, {' x '.join(map(str, shape))}, {str(dtype)[6:]}"
    return Case(name, variants, check, inner=0, after=_behind)


def _behind(row: Row) -> dict[str, object]:
    """Returns the ratio of fused to unfused time, and the microseconds above the limit."""
    over = {name: (row.median(name) - row.median(LIMIT)) * 1e6 for name in (FUSED, UNFUSED)}
    return {"behind": row.median(FUSED) / row.median(UNFUSED), "us_above": over}


def _with_gradients(
    forward: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Callable[[], object]:
    grad = torch.ones_like(forward().detach())
    return lambda: torch.autograd.grad(forward(), inputs, grad)


def _tensors(
    dtype: torch.dtype, rows: int, inner: int, columns: int, *, trained: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = torch.randn(rows, inner), torch.randn(inner, columns) * inner**-0.5
    return x.to(dtype).requires_grad_(trained), weight.to(dtype).requires_grad_(trained)


def _gather(
    group: dist.ProcessGroup,
    over: dist.ProcessGroup,
    dtype: torch.dtype,
    *shape: int,
    trained: bool = False,
) -> Case:
    x_shard, weight = inputs = _tensors(dtype, *shape, trained=trained)
    gathered = x_shard.new_empty(group.size() * shape[0], shape[1])

    def unfused() -> torch.Tensor:
        if trained:
            return _Gathered.apply(x_shard, over) @ weight  # type: ignore[no-any-return]
        _gather_into(gathered, x_shard, group=over)
        return gathered @ weight

    whole = torch.cat([x_shard] * group.size()).detach().requires_grad_(trained)
    variants: dict[str, Callable[[], torch.Tensor]] = {
        LIMIT: lambda: whole @ weight,
        FUSED: lambda: symm_cp.all_gather_matmul(x_shard, weight, group=group),
        UNFUSED: unfused,
    }
    given = (inputs, (whole, weight)) if trained else ()
    return _case("all-gather-matmul", dtype, shape, variants, *given)


def _scatter(
    group: dist.ProcessGroup,
    over: dist.ProcessGroup,
    dtype: torch.dtype,
    *shape: int,
    trained: bool = False,
) -> Case:
    rows, inner, columns = shape
    x, weight = inputs = _tensors(dtype, rows * group.size(), inner, columns, trained=trained)
    part = x.new_empty(rows, columns)

    def unfused() -> torch.Tensor:
        if trained:
            return _Scattered.apply(x @ weight, over)  # type: ignore[no-any-return]
        _scatter_into(part, x @ weight, group=over)
        return part

    variants: dict[str, Callable[[], torch.Tensor]] = {
        LIMIT: lambda: x @ weight,
        FUSED: lambda: symm_cp.matmul_reduce_scatter(x, weight, group=group),
        UNFUSED: unfused,
    }
    given = (inputs, inputs) if trained else ()
    return _case("matmul-reduce-scatter", dtype, shape, variants, *given)


def _reduce(
    group: dist.ProcessGroup,
    over: dist.ProcessGroup,
    dtype: torch.dtype,
    *shape: int,
    trained: bool = False,
) -> Case:
    x, weight = inputs = _tensors(dtype, *shape, trained=trained)

    def unfused() -> torch.Tensor:
        total = x @ weight
        if trained:
            return _Summed.apply(total, over)  # type: ignore[no-any-return]
        dist.all_reduce(total, group=over)
        return total

    variants: dict[str, Callable[[], torch.Tensor]] = {
        LIMIT: lambda: x @ weight,
        FUSED: lambda: symm_cp.matmul_all_reduce(x, weight, group=group),
        UNFUSED: unfused,
    }
    given = (inputs, inputs) if trained else ()
    return _case("matmul-all-reduce", dtype, shape, variants, *given)


def _float8(rows: int, inner: int, columns: int, by_row: bool) -> tuple[torch.Tensor, ...]:
    """Returns two matrices, the second by columns, and their scales."""
    x, weight = torch.randn(rows, inner), torch.randn(columns, inner) * inner**-0.5
    shapes = ((rows, 1), (1, columns)) if by_row else ((), ())
    scales = [torch.rand(shape) + 0.5 for shape in shapes]
    return x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).t(), *scales


def _scaled_gather(
    group: dist.ProcessGroup, over: dist.ProcessGroup, dtype: torch.dtype, by_row: bool, *shape: int
) -> Case:
    rows, inner, _ = shape
    x_shard, weight, x_scale, scale = _float8(*shape, by_row)
    gathered = torch.empty(group.size() * rows, inner, dtype=x_shard.dtype)
    all_scales = torch.empty(group.size() * rows, 1) if by_row else x_scale

    def unfused() -> torch.Tensor:
        _gather_into(gathered.view(torch.uint8), x_shard.view(torch.uint8), group=over)
        if by_row:
            _gather_into(all_scales, x_scale, group=over)
        return torch._scaled_mm(gathered, weight, all_scales, scale, out_dtype=dtype)

    whole = torch.cat([x_shard] * group.size())
    of_whole = torch.cat([x_scale] * group.size()) if by_row else x_scale
    variants: dict[str, Callable[[], torch.Tensor]] = {
        LIMIT: lambda: torch._scaled_mm(whole, weight, of_whole, scale, out_dtype=dtype),
        FUSED: lambda: symm_cp.scaled_all_gather_matmul(
            x_shard, weight, x_scale, scale, group=group, out_dtype=dtype
        )[1],
        UNFUSED: unfused,
    }
    op = f"scaled all-gather-matmul ({'rows' if by_row else 'tensor'})"
    return _case(op, dtype, shape, variants)


def _scaled_scatter(
    group: dist.ProcessGroup, over: dist.ProcessGroup, dtype: torch.dtype, by_row: bool, *shape: int
) -> Case:
    rows, inner, columns = shape
    operands = _float8(rows * group.size(), inner, columns, by_row)
    part = torch.empty(rows, columns, dtype=dtype)

    def unfused() -> torch.Tensor:
        _scatter_into(part, torch._scaled_mm(*operands, out_dtype=dtype), group=over)
        return part

    variants: dict[str, Callable[[], torch.Tensor]] = {
        LIMIT: lambda: torch._scaled_mm(*operands, out_dtype=dtype),
        FUSED: lambda: symm_cp.scaled_matmul_reduce_scatter(
            *operands, group=group, out_dtype=dtype
        ),
        UNFUSED: unfused,
    }
    op = f"scaled matmul-reduce-scatter ({'rows' if by_row else 'tensor'})"
    return _case(op, dtype, shape, variants)


def _attention(
    group: dist.ProcessGroup,
    over: dist.ProcessGroup,
    dtype: torch.dtype,
    tokens: int,
    causal: bool,
    trained: bool,
) -> Case:
    ranks = group.size()
    q, k, v = (torch.randn(1, 8, tokens, 64).to(dtype).requires_grad_(trained) for _ in range(3))
    balancer = symm_cp.HeadTail(tokens * ranks, ranks)
    positions = torch.tensor(
        [[*balancer.layout.positions(rank)] for rank in range(ranks)], dtype=torch.int64
    )
    hidden = positions.flatten() > positions[group.rank()].unsqueeze(1)
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf).to(dtype) if causal else None
    gathered = [torch.empty(ranks, *k.shape, dtype=dtype) for _ in range(2)]

    def attend(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    def unfused() -> torch.Tensor:
        if trained:
            parts = (_Gathered.apply(t, over).view(ranks, *t.shape) for t in (k, v))
            return attend(*(t.permute(1, 2, 0, 3, 4).flatten(2, 3) for t in parts))
        for whole, shard in zip(gathered, (k, v), strict=True):
            _gather_into(whole, shard, group=over)
        return attend(*(t.permute(1, 2, 0, 3, 4).flatten(2, 3) for t in gathered))

    whole = [torch.cat([t] * ranks, 2).detach().requires_grad_(trained) for t in (k, v)]
    variants: dict[str, Callable[[], torch.Tensor]] = {
        LIMIT: lambda: attend(*whole),
        FUSED: lambda: symm_cp.all_gather_attention(
            q, k, v, group=group, is_causal=causal, load_balancer=balancer if causal else None
        ),
        UNFUSED: unfused,
    }
    op = "causal attention" if causal else "attention"
    given = ((q, k, v), (q, *whole)) if trained else ()
    return _case(op, dtype, (tokens, 8, 64), variants, *given)


def worst(rows: list[Written]) -> str:
    """Returns the cases in which the fused op is furthest behind, worst first."""
    behind = sorted(rows, key=lambda row: -row["behind"])
    lines = [f"{row['behind']:.2f} of the unfused form: {row['case']}" for row in behind[:10]]
    return "\n".join(["", *lines])


if __name__ == "__main__":
    main(cases, __doc__, summary=worst)
