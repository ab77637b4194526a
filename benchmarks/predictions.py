"""What the simulator says of the CPU backend, against what the ops take.

    python benchmarks/predictions.py --ranks 2 --json benchmarks/results/predictions_2.json

The cost of a kernel and of a copy are measured on all ranks at once, in the same run, so that what
the ranks take from each other (memory, and cores where there are fewer than ranks) is in them; the
schedule does the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F

import symm_cp
from benchmarks.harness import Case, main
from symm_cp.schedule.builders import all_gather_and_consume, all_ranks, produce_and_reduce_scatter
from symm_cp.schedule.simulate import simulate
from symm_cp.schedule.steps import Compute, Copy, Step


def predicted(builder: object, ranks: int, kernel: float, copy: float, reduce: float) -> float:
    """Milliseconds of an op, from those of its steps."""

    def cost(rank: int, step: Step) -> float:
        if isinstance(step, Compute):
            return reduce if step.kernel == "reduce" else kernel
        return copy if isinstance(step, Copy) else 0.0

    return simulate([all_ranks(builder, ranks)], cost).total  # type: ignore[arg-type]


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    W = group.size()
    # The smaller, the more calls in a timing: ranks leave a barrier half a millisecond apart.
    for rows, inner, columns, calls in (
        (256, 512, 256, 20),
        (512, 1024, 512, 4),
        (1024, 2048, 1024, 1),
    ):
        x, weight = torch.randn(rows, inner), torch.randn(inner, columns)
        outs, slot = torch.empty(W, rows, columns), torch.empty_like(x)

        def kernels(x: torch.Tensor = x, w: torch.Tensor = weight, o: torch.Tensor = outs) -> None:
            for out in o:
                torch.mm(x, w, out=out)

        yield Case(
            f"all-gather-matmul, {rows} x {inner} a rank, {columns} columns",
            {
                "kernels": kernels,
                "copy": lambda x=x, slot=slot: slot.copy_(x),
                "op": lambda x=x, w=weight: symm_cp.all_gather_matmul(x, w, group=group),
            },
            predict=lambda ms: predicted(
                all_gather_and_consume, W, ms["kernels"] / W, ms["copy"], 0.0
            ),
            predicts="op",
            inner=calls,
        )
        full = torch.randn(rows * W, inner)
        parts = torch.randn(W, rows, columns)
        total = torch.empty(rows, columns)
        yield Case(
            f"matmul-reduce-scatter, {rows} x {inner} for a rank, {columns} columns",
            {
                "kernels": kernels,
                "sum": lambda p=parts, t=total: torch.sum(p, 0, out=t),
                "op": lambda f=full, w=weight: symm_cp.matmul_reduce_scatter(f, w, group=group),
            },
            predict=lambda ms: predicted(
                produce_and_reduce_scatter, W, ms["kernels"] / W, 0.0, ms["sum"]
            ),
            predicts="op",
            inner=calls,
        )
    for length, calls in ((512, 5), (1024, 2), (2048, 1)):
        q, k, v = (torch.randn(1, 4, length, 64) for _ in range(3))
        both = torch.empty(2, *k.shape)

        def attend(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> None:
            for _ in range(W):
                F.scaled_dot_product_attention(q, k, v)

        yield Case(
            f"attention, {length} tokens a rank, 4 heads of 64",
            {
                "kernels": attend,
                "copy": lambda both=both, k=k, v=v: torch.stack((k, v), out=both),
                "op": lambda q=q, k=k, v=v: symm_cp.all_gather_attention(q, k, v, group=group),
            },
            predict=lambda ms: predicted(
                all_gather_and_consume, W, ms["kernels"] / W, ms["copy"], 0.0
            ),
            predicts="op",
            inner=calls,
        )


if __name__ == "__main__":
    main(cases, "Predicted and measured times of ops on CPU.")
