"""A compiled feed-forward block: fused by the passes, not fused, and fused by hand.

python benchmarks/compile.py --ranks 2 --json benchmarks/results/compile.json
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import symm_cp
from benchmarks.harness import Case, main
from benchmarks.rivals import unfused_groups
from symm_cp import inductor

ROWS, DIM, HIDDEN = 2048, 2048, 2048  # rows of a rank, features, hidden features of a rank

Block = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _trained(block: Block, inputs: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    def step() -> object:
        out = block(*inputs)
        return out, torch.autograd.grad(out, inputs, torch.ones_like(out))

    return step


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields the case: forward and backward of one block."""
    warnings.simplefilter("ignore", FutureWarning)
    torch.manual_seed(group.rank())
    x = torch.randn(ROWS, DIM, requires_grad=True)
    up = (torch.randn(DIM, HIDDEN) / DIM**0.5).requires_grad_()
    down = (torch.randn(HIDDEN, DIM) / HIDDEN**0.5).requires_grad_()
    inputs = (x, up, down)

    def plain_over(over: str) -> Block:
        def plain(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            full = funcol.all_gather_tensor_autograd(x, 0, over)
            return funcol.reduce_scatter_tensor_autograd(F.gelu(full @ up) @ down, "sum", 0, over)

        return plain

    def by_hand(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(symm_cp.all_gather_matmul(x, up, group=group))
        return symm_cp.matmul_reduce_scatter(hidden, down, group=group)

    size = group.size()

    def alone(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        # As many rows as after a gather, without communication.
        return F.gelu(x.expand(size, -1, -1).reshape(-1, DIM) @ up) @ down

    fused = torch.compile(
        plain_over(group.group_name),
        options=inductor.compile_options(inductor.Options(strict=True)),
    )
    variants = {
        "compiled, compute alone": _trained(torch.compile(alone), inputs),
        "compiled, fused": _trained(fused, inputs),
        "eager, fused by hand": _trained(by_hand, inputs),
        **{
            f"compiled, {label}": _trained(torch.compile(plain_over(over)), inputs)
            for label, over in unfused_groups(group).items()
        },
    }

    def check() -> None:
        names = list(variants)[1:]
        results = [variants[name]() for name in names]
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-3, atol=1e-2)

    yield Case("block, forward and backward, float32", variants, check, repetitions=11)


if __name__ == "__main__":
    main(cases, __doc__)
