"""The overhead of recording a timeline.

python benchmarks/tracing.py --ranks 2 --json benchmarks/results/tracing.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import symm_cp
from benchmarks.harness import Case, main

CALLS = 50


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    for rows in (128, 256, 512):
        x, weight = torch.randn(rows, 2 * rows), torch.randn(2 * rows, rows)

        def run(x: torch.Tensor = x, weight: torch.Tensor = weight) -> None:
            for _ in range(CALLS):
                symm_cp.all_gather_matmul(x, weight, group=group)

        def recorded(run: object = run) -> None:
            with symm_cp.trace():
                run()  # type: ignore[operator]

        name = f"{CALLS} all-gather-matmuls, {rows} x {2 * rows} a rank, {rows} columns"
        yield Case(name, {"not recorded": run, "recorded": recorded}, repetitions=25)


if __name__ == "__main__":
    main(cases, __doc__)
