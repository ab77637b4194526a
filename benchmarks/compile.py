"""Compiled blocks: fused by the passes, not fused, reordered by torch, and by hand.

A feed-forward block, and a whole block as torchtitan splits it (compiled_block.py).

python benchmarks/compile.py --ranks 2 --json benchmarks/results/compile.json
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import symm_cp
from benchmarks import compiled_block
from benchmarks.harness import Case, main
from symm_cp.commands.bench.jobs import unfused_groups
from symm_cp.inductor import Options, compile_options

ROWS, DIM, HIDDEN = 2048, 2048, 2048  # rows of a rank, features, hidden features of a rank

# The passes that start collectives earlier and wait for them later, and work on CPU.
# (enable_overlap_scheduling fails there: it asks Triton for a GPU.)
TORCHS_OVERLAP: dict[str, Any] = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
}
if hasattr(inductor_config.aten_distributed_optimizations, "enable_simple_overlap"):  # torch 2.14
    TORCHS_OVERLAP = {"aten_distributed_optimizations.enable_simple_overlap": True}

Block = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
#: A block over the group of a name.
Over = Callable[[str], Block]


class _InputOfColumns(torch.autograd.Function):
    """The input of column-parallel layers: its gradient is all-reduced."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, over: str) -> torch.Tensor:
        ctx.over = over
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return funcol.all_reduce(grads[0], "sum", ctx.over), None


class _OutputOfRows(torch.autograd.Function):
    """The output of a row-parallel layer: it is all-reduced."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, over: str) -> torch.Tensor:
        return funcol.all_reduce(x, "sum", over)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _sequence_parallel(over: str) -> Block:
    def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        full = funcol.all_gather_tensor_autograd(x, 0, over)
        return funcol.reduce_scatter_tensor_autograd(F.gelu(full @ up) @ down, "sum", 0, over)

    return block


def _tensor_parallel(over: str) -> Block:
    def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(_InputOfColumns.apply(x, over) @ up)
        return _OutputOfRows.apply(hidden @ down, over)

    return block


def _trained(block: Block, inputs: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    def step() -> object:
        out = block(*inputs)
        return out, torch.autograd.grad(out, inputs, torch.ones_like(out))

    return step


def _variants(
    group: dist.ProcessGroup, over: Over, alone: Block, by_hand: Block | None
) -> dict[str, Block]:
    """The compute alone, then the ways to compile a block."""
    name = group.group_name
    unfused = {backend: of.group_name for backend, of in unfused_groups(group).items()}
    strict, natively = Options(strict=True), Options(async_tp=False)
    blocks = {
        "compiled, compute alone": torch.compile(alone),
        "compiled, fused": torch.compile(over(name), options=compile_options(strict)),
        "eager, fused by hand": by_hand,
        **{f"compiled, unfused ({b})": torch.compile(over(g)) for b, g in unfused.items()},
        **{
            f"compiled, reordered by torch ({b})": torch.compile(over(g), options=TORCHS_OVERLAP)
            for b, g in unfused.items()
        },
    }
    if over is _tensor_parallel:
        blocks["compiled, native all-reduces"] = torch.compile(
            over(name), options=compile_options(natively)
        )
    return {label: block for label, block in blocks.items() if block is not None}


def cases(group: dist.ProcessGroup) -> Iterator[Case]:
    """Yields the cases: forward and backward of one block, with and without sequence parallelism.

    Without it every rank has all rows.
    """
    warnings.simplefilter("ignore", FutureWarning)
    torch._dynamo.config.recompile_limit = 64  # one function, many groups and sizes
    size, name = group.size(), group.group_name
    up = (torch.randn(DIM, HIDDEN) / DIM**0.5).requires_grad_()
    down = (torch.randn(HIDDEN, DIM) / HIDDEN**0.5).requires_grad_()

    def plain(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ up) @ down

    def gathered(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        # As many rows as after a gather, without communication.
        return plain(x.expand(size, -1, -1).reshape(-1, DIM), up, down)

    def by_hand(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(symm_cp.all_gather_matmul(x, up, group=group))
        return symm_cp.matmul_reduce_scatter(hidden, down, group=group)

    shard = torch.randn(ROWS, DIM, requires_grad=True)
    whole = torch.randn(size * ROWS, DIM, requires_grad=True)
    blocks = _variants(group, _sequence_parallel, gathered, by_hand)
    trained = {label: _trained(block, (shard, up, down)) for label, block in blocks.items()}
    yield _case("block, forward and backward, float32", trained)
    blocks = _variants(group, _tensor_parallel, plain, None)
    trained = {label: _trained(block, (whole, up, down)) for label, block in blocks.items()}
    yield _case("block with all-reduces, forward and backward, float32", trained)
    small = tuple(torch.randn(64, 64, requires_grad=True) for _ in range(3))
    for label, over in (("", _sequence_parallel), (" with all-reduces", _tensor_parallel)):
        compilers = {
            "without the passes": _compiled(over(name), small),
            "with the passes": _compiled(over(name), small, options=compile_options()),
        }
        yield _case(f"compilation of a block{label}, both passes", compilers)
    yield from compiled_block.cases(group, TORCHS_OVERLAP)


def _compiled(block: Block, inputs: tuple[torch.Tensor, ...], **how: Any) -> Callable[[], object]:
    """Compiles both passes anew, without the C++ compiler, which takes most time, and runs them."""

    def step() -> object:
        torch._dynamo.reset()
        with inductor_config.patch(fallback_by_default=True, force_disable_caches=True):
            return _trained(torch.compile(block, **how), inputs)()

    return step


def _case(name: str, variants: dict[str, Callable[[], object]]) -> Case:
    def check() -> None:
        results = [variants[label]() for label in list(variants)[1:]]
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-3, atol=1e-2)

    return Case(name, variants, check, repetitions=11)


if __name__ == "__main__":
    main(cases, __doc__)
