"""Matmuls of few rows with large weights: by shards, whole, and as the op chooses.

    python benchmarks/few_rows.py --ranks 2 --json benchmarks/results/few_rows.json

"chosen" is the bare call, which is native up to 64 MiB, and with an all-reduce at any size; the
algorithms that are forced are carried out by the kernels in Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks.harness import Case, main
from symm_cp import tuning
from symm_cp.commands.bench import jobs
from symm_cp.commands.bench.jobs import Setting
from symm_cp.commands.harness.measure import FUSED, IN_PLACE, LIMIT, Row

ROWS, HIDDEN, FEED, REDUCED = 128, 4096, 14336, 1024


def _forced(algorithm: str, run: Callable[[], object]) -> object:
    with tuning.forced(algorithm):
        return run()


def _by_all_algorithms(
    name: str, case: Case, algorithms: tuple[str, ...] = ("shards", "whole")
) -> Case:
    """Adds the algorithms of the fused variant to a case, and renames it."""
    variants = {key: run for key, run in case.variants.items() if key != IN_PLACE}
    run = variants.pop(FUSED)
    case.variants = {
        **variants,
        "chosen": run,
        **{algorithm: partial(_forced, algorithm, run) for algorithm in algorithms},
    }
    case.name = name
    return case


def _microseconds(row: Row) -> dict[str, object]:
    """Returns the microseconds that each variant takes longer than the matmul alone."""
    limit = row.median(row.limit)
    return {"us_above": {name: (row.median(name) - limit) * 1e6 for name in row.seconds}}


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields all cases."""
    unfused = jobs.unfused_groups(group)
    settings = [Setting(group, unfused, dtype) for dtype in (torch.float32, torch.bfloat16)]
    for setting in settings:
        for rows in (1, 16, 128, 512, 1024):
            case = jobs.matmul_all_reduce(setting, rows, HIDDEN, REDUCED)
            algorithms = ("shards", "whole") if rows > 1 else ()
            name = f"matmul-all-reduce, {rows} rows, {str(setting.dtype)[6:]}"
            case = _by_all_algorithms(name, case, algorithms)
            # A row is a timing of its own: the caches hold what the matmul left there.
            case.inner, case.most, case.after = 1, 1000, _microseconds
            yield case
    for setting in settings:
        yield from _gather_and_scatter_cases(setting)


def _gather_and_scatter_cases(setting: Setting) -> Iterator[Case]:
    W, name = setting.group.size(), setting.group.group_name
    kind = str(setting.dtype)[6:]
    up = jobs.gather_matmul(setting, ROWS, HIDDEN, FEED // W)
    yield _by_all_algorithms(f"up: all-gather-matmul, {kind}", up)
    x, grad = setting.normal(ROWS, HIDDEN), setting.normal(W * ROWS, FEED // W)
    full = setting.whole(x)
    op = torch.ops.symm_mem._fused_all_gather_weight_grad
    variants = {
        LIMIT: lambda: full.t() @ grad,
        **setting.over_backends(lambda over: lambda: jobs.gathered(over, x).t() @ grad),
        FUSED: partial(op, x, [grad], 0, name),
    }
    yield _by_all_algorithms(
        f"up: gradient of the weight, {kind}", setting.case("", variants, inputs=())
    )
    down = jobs.matmul_scatter(setting, ROWS, FEED // W, HIDDEN)
    yield _by_all_algorithms(f"down: matmul-reduce-scatter, {kind}", down)


if __name__ == "__main__":
    main(cases, __doc__)
