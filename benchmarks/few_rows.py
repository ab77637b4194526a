"""Matmuls of few rows with large weights: by shards, whole, and as the op chooses.

    python benchmarks/few_rows.py --ranks 2 --json benchmarks/results/few_rows.json

"chosen" is the bare call, which is native up to 64 MiB, and with an all-reduce at any size; the
ways that are forced are carried out by the kernels in Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import symm_cp
from benchmarks.harness import Case, main
from benchmarks.rivals import groups_over, unfused_groups
from symm_cp.commands.harness.measure import Row, forced
from symm_cp.ops.common import unfused_all_gather, unfused_reduce_scatter

ROWS, HIDDEN, FEED, REDUCED = 128, 4096, 14336, 1024


def ways(run: Callable[[], object]) -> dict[str, Callable[[], object]]:
    names = {"shards": "shards", "whole": "whole", "chosen": None}
    return {name: forced(way, run) for name, way in names.items()}


def _all_reduce_case(group: dist.ProcessGroup, dtype: torch.dtype, rows: int) -> Case:
    name, ops = group.group_name, torch.ops.symm_mem
    fused, one_shot = ops.fused_matmul_all_reduce.default, ops.one_shot_all_reduce.default
    x = torch.randn(rows, HIDDEN).to(dtype)
    weight = (torch.randn(REDUCED, HIDDEN) * HIDDEN**-0.5).to(dtype).t()
    run = partial(fused, x, weight, None, "sum", name)
    variants: dict[str, Callable[[], object]] = {
        "matmul alone": lambda: x @ weight,
        "chosen": run,
        "matmul, one_shot_all_reduce": lambda: one_shot(x @ weight, "sum", name),
    }
    if rows > 1:
        variants |= {way: forced(way, run) for way in ("shards", "whole")}
    for backend, over in {**groups_over(group, "symm_cp"), "gloo": group}.items():
        variants[f"unfused ({backend})"] = lambda over=over: dist.all_reduce(x @ weight, group=over)

    def check() -> None:
        want = x @ weight
        dist.all_reduce(want, group=group)
        for label in ("chosen", "matmul, one_shot_all_reduce"):
            torch.testing.assert_close(variants[label](), want, rtol=2e-2, atol=5e-2)

    kind = str(dtype)[6:]
    label = f"matmul-all-reduce, {rows} rows, {kind}"
    # A row is a timing of its own: the caches hold what the matmul left there.
    return Case(label, variants, check, most=1000, after=_microseconds)


def _microseconds(row: Row) -> dict[str, object]:
    """Returns the microseconds that each variant takes longer than the matmul alone."""
    limit = row.median(row.limit)
    return {"us_above": {name: (row.median(name) - limit) * 1e6 for name in row.seconds}}


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 16, 128, 512, 1024):
            yield _all_reduce_case(group, dtype, rows)
    yield from _gather_and_scatter_cases(group)


def _gather_and_scatter_cases(group: dist.ProcessGroup) -> Iterator[Case]:
    W, name = group.size(), group.group_name
    ops, baselines = torch.ops.symm_mem, unfused_groups(group)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(ROWS, HIDDEN).to(dtype)
        up = torch.randn(HIDDEN, FEED // W).to(dtype)
        full, grad = unfused_all_gather(x, 0, name), torch.randn(W * ROWS, FEED // W).to(dtype)
        kind = str(dtype)[6:]
        yield Case(
            f"up: all-gather-matmul, {kind}",
            {
                "matmul alone": lambda full=full, up=up: full @ up,
                **ways(partial(symm_cp.all_gather_matmul, x, up, group=group)),
                **{
                    label: lambda x=x, up=up, over=over: unfused_all_gather(x, 0, over) @ up
                    for label, over in baselines.items()
                },
            },
        )
        yield Case(
            f"up: gradient of the weight, {kind}",
            {
                "matmul alone": lambda full=full, grad=grad: full.t() @ grad,
                **ways(partial(ops._fused_all_gather_weight_grad, x, [grad], 0, name)),
                **{
                    label: lambda x=x, grad=grad, over=over: (
                        unfused_all_gather(x, 0, over).t() @ grad
                    )
                    for label, over in baselines.items()
                },
            },
        )
        down = torch.randn(FEED // W, HIDDEN).to(dtype)
        scatter = partial(symm_cp.matmul_reduce_scatter, grad, down, group=group)
        yield Case(
            f"down: matmul-reduce-scatter, {kind}",
            {
                "matmul alone": lambda grad=grad, down=down: grad @ down,
                **ways(scatter),
                **{
                    label: lambda grad=grad, down=down, over=over: unfused_reduce_scatter(
                        grad @ down, "sum", 0, over
                    )
                    for label, over in baselines.items()
                },
            },
        )


if __name__ == "__main__":
    main(cases, __doc__)
