"""Fused ops against the same collectives and kernels, one after the other, from 1 row on.

    python benchmarks/never_behind.py --ranks 2 --json benchmarks/results/never_behind.json

The unfused form runs over this project's own backend and keeps its buffers. Prints the cases in
which the fused op is furthest behind it, worst first.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import symm_cp
from benchmarks.harness import Case, main
from symm_cp.commands.bench import jobs
from symm_cp.commands.bench.jobs import Setting
from symm_cp.commands.harness.measure import FUSED, LIMIT, Row, unfused_over
from symm_cp.commands.harness.report import Written

UNFUSED = unfused_over("symm_cp")
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


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields all cases."""
    for case in _cases(group):
        yield replace(case, after=_behind)


def _cases(group: dist.ProcessGroup) -> Iterator[Case]:
    over = jobs.groups_over(group, "symm_cp")
    matmuls = (jobs.gather_matmul, jobs.matmul_scatter, jobs.matmul_all_reduce)
    for dtype in (torch.float32, torch.bfloat16):
        forward = Setting(group, over, dtype)
        both = replace(forward, passes=jobs.BOTH)
        for setting, shapes in ((forward, SHAPES), (both, TRAINED_SHAPES)):
            for shape in shapes:
                yield from (make(setting, *shape) for make in matmuls)
        for by_row in (False, True):
            for shape in _scaled_shapes(by_row):
                yield _scaled_gather(forward, by_row, *shape)
                yield _scaled_scatter(forward, by_row, *shape)
        for tokens in TOKENS:
            for causal in (False, True):
                for setting in (forward, both):
                    yield jobs.attention(setting, tokens, 8, 8, 64, causal=causal)


def _scaled_shapes(by_row: bool) -> list[tuple[int, int, int]]:
    """Returns `SCALED_SHAPES`, or two of them where torch takes seconds for the others.

    oneDNN has only a reference kernel for one scale of a tensor on some processors (8 MFLOP in 80
    ms on an Intel Xeon with AMX); the fused ops do without it.
    """
    operands = _float8(*SCALED_SHAPES[1], by_row)
    seconds = min(timeit.repeat(lambda: torch._scaled_mm(*operands), number=1, repeat=3))
    return SCALED_SHAPES[:2] if seconds > 0.02 else SCALED_SHAPES


def _behind(row: Row) -> dict[str, object]:
    """Returns the ratio of fused to unfused time, and the microseconds above the limit."""
    over = {name: (row.median(name) - row.median(LIMIT)) * 1e6 for name in (FUSED, UNFUSED)}
    return {"behind": row.median(FUSED) / row.median(UNFUSED), "us_above": over}


def _float8(rows: int, inner: int, columns: int, by_row: bool) -> tuple[torch.Tensor, ...]:
    """Returns two matrices, the second by columns, and their scales."""
    x, weight = torch.randn(rows, inner), torch.randn(columns, inner) * inner**-0.5
    shapes = ((rows, 1), (1, columns)) if by_row else ((), ())
    scales = [torch.rand(shape) + 0.5 for shape in shapes]
    return x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).t(), *scales


def _scaled_gather(setting: Setting, by_row: bool, *shape: int) -> Case:
    group, dtype, over = setting.group, setting.dtype, setting.unfused["symm_cp"]
    rows, inner, _ = shape
    x_shard, weight, x_scale, scale = _float8(*shape, by_row)
    gathered = torch.empty(group.size() * rows, inner, dtype=x_shard.dtype)
    all_scales = torch.empty(group.size() * rows, 1) if by_row else x_scale

    def unfused() -> torch.Tensor:
        jobs.gather_into(gathered.view(torch.uint8), x_shard.view(torch.uint8), group=over)
        if by_row:
            jobs.gather_into(all_scales, x_scale, group=over)
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
    return setting.case(f"{op}, {' x '.join(map(str, shape))}", variants, inputs=())


def _scaled_scatter(setting: Setting, by_row: bool, *shape: int) -> Case:
    group, dtype, over = setting.group, setting.dtype, setting.unfused["symm_cp"]
    rows, inner, columns = shape
    operands = _float8(rows * group.size(), inner, columns, by_row)
    part = torch.empty(rows, columns, dtype=dtype)

    def unfused() -> torch.Tensor:
        jobs.scatter_into(part, torch._scaled_mm(*operands, out_dtype=dtype), group=over)
        return part

    variants: dict[str, Callable[[], torch.Tensor]] = {
        LIMIT: lambda: torch._scaled_mm(*operands, out_dtype=dtype),
        FUSED: lambda: symm_cp.scaled_matmul_reduce_scatter(
            *operands, group=group, out_dtype=dtype
        ),
        UNFUSED: unfused,
    }
    op = f"scaled matmul-reduce-scatter ({'rows' if by_row else 'tensor'})"
    return setting.case(f"{op}, {' x '.join(map(str, shape))}", variants, inputs=())


def worst(rows: list[Written]) -> str:
    """Returns the cases in which the fused op is furthest behind, worst first."""
    behind = sorted(rows, key=lambda row: -row["behind"])
    lines = [
        f"{row['behind']:.2f} of the unfused form: {row['case']}, signal "
        f"{max(row['signal_ns']):.0f} ns"
        for row in behind[:10]
    ]
    return "\n".join(["", *lines])


if __name__ == "__main__":
    main(cases, __doc__, summary=worst)
