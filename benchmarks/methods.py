"""Attention by each method, and by the one that `method="auto"` chooses.

Causal, forward and backward, at sizes and numbers of heads that favour one or the other: ranks with
more work than others (a sequential layout, a number of heads that the ranks do not divide), few
tokens, few key heads.

python benchmarks/methods.py --ranks 2 --json benchmarks/results/methods.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import symm_cp
from benchmarks.harness import Case, main
from symm_cp import tuning
from symm_cp.commands.harness.measure import Row
from symm_cp.commands.harness.report import Written
from symm_cp.context_parallel.load_balancers import HeadTail, LoadBalancer, Sequential
from symm_cp.ops.attention.methods import METHODS, MethodName

FEATURES, DTYPE = 64, torch.bfloat16


@dataclass(frozen=True)
class Problem:
    """Causal attention of a whole sequence."""

    tokens: int
    heads: int
    kv_heads: int
    balancer: type[HeadTail | Sequential] = HeadTail

    def __str__(self) -> str:
        spread = "head-tail" if self.balancer is HeadTail else "sequential"
        return f"{self.tokens} tokens, {self.heads}/{self.kv_heads} heads, {spread}"


PROBLEMS = (
    Problem(256, 8, 8),
    Problem(256, 32, 8),
    Problem(1024, 8, 2),
    Problem(1024, 5, 5),
    Problem(2048, 3, 3),
    Problem(2048, 8, 8, Sequential),
    Problem(4096, 8, 8),
    Problem(4096, 16, 2),
)


class _Calls:
    """One problem on this rank."""

    def __init__(self, group: dist.ProcessGroup, problem: Problem) -> None:
        generator = torch.Generator().manual_seed(0)
        self._group, self._whole = group, []
        for heads in (problem.heads, problem.kv_heads, problem.kv_heads):
            whole = torch.randn(1, heads, problem.tokens, FEATURES, generator=generator)
            self._whole.append(whole.to(DTYPE))
        self._balancer: LoadBalancer = problem.balancer(problem.tokens, group.size())
        self._rows = self._balancer.positions(group.rank())
        self._parts = [t[:, :, self._rows] for t in self._whole]
        self.chosen: dict[str, str] = {}

    def _attend(self, tensors: list[torch.Tensor], method: MethodName) -> torch.Tensor:
        out: torch.Tensor = symm_cp.all_gather_attention(
            *tensors,
            group=self._group,
            is_causal=True,
            enable_gqa=True,
            load_balancer=self._balancer,
            method=method,
        )
        return out

    def forward(self, method: MethodName) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                self._attend(self._parts, method)

        return run

    def backward(self, method: MethodName) -> Callable[[], object]:
        """The backward pass alone: the graph is made once, at the first call."""
        leaves = [t.detach().requires_grad_() for t in self._parts]
        made: list[torch.Tensor] = []

        def run() -> object:
            if not made:
                made.append(self._attend(leaves, method))
            return torch.autograd.grad(made[0], leaves, made[0].detach(), retain_graph=True)

        return run

    def check(self) -> None:
        """Compares with one process; notes the chosen methods, which must be equal on all ranks."""
        q, k, v = (t.float() for t in self._whole)
        exact = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        for method in METHODS:
            out = self._attend(self._parts, method).float()
            torch.testing.assert_close(out, exact[:, :, self._rows], rtol=2e-2, atol=2e-2)
        with tuning.listening() as choices:
            self.backward("auto")()
        backward, forward = sorted(choices, key=lambda key: "backward" not in key)
        self.chosen = {"forward": choices[forward].way, "backward": choices[backward].way}
        everywhere: list[object] = [None] * self._group.size()
        dist.all_gather_object(everywhere, self.chosen, self._group)
        assert all(chosen == self.chosen for chosen in everywhere), everywhere


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields a forward and a backward pass of each problem."""
    for problem in PROBLEMS:
        calls = _Calls(group, problem)
        for way, made in (("forward", calls.forward), ("backward", calls.backward)):

            def note(row: Row, way: str = way, calls: _Calls = calls) -> dict[str, object]:
                better = min(row.ratio("ulysses"), 1.0)
                return {"chosen": calls.chosen[way], "of_better": row.ratio("auto") / better}

            yield Case(
                f"{problem}, {way}",
                {method: made(method) for method in METHODS},
                calls.check if way == "forward" else lambda: None,
                after=note,
            )


def table(rows: list[Written]) -> str:
    """Returns the chosen methods, and their times divided by the better method's."""
    lines = [f"{row['case']}: {row['chosen']}, {row['of_better']:.2f}" for row in rows]
    return "\n".join(["method chosen, and its time divided by that of the better one", *lines])


if __name__ == "__main__":
    main(cases, __doc__, summary=table)
