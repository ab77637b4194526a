"""A training step of torchtitan's Llama block, tensor and sequence parallel; for `compile.py`.

Every variant is the same module, split by DTensor and compiled by itself. The compute alone is a
block of one rank's weights on as many tokens as a gather gives, without any communication.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks.harness import Case
from symm_cp.commands.bench.jobs import groups_over
from symm_cp.inductor import Options, compile_options
from tests.inductor.titan import Block, Sizes, block_plan, rotation

SIZES = Sizes(width=1024, heads=16, key_heads=8, features=64, hidden=2816)
TOKENS = 1024  # of all ranks, one sequence: a step takes 0.1 to 0.5 s on two ranks
#: Sizes of the block whose compilation is timed: its code is the same, its run takes no time.
SMALL, FEW = Sizes(), 16

Step = Callable[[], Any]


class _Alone(Block):
    """One rank's part of a block, with expansions or views instead of gathers and scatters."""

    def __init__(self, sizes: Sizes, group: dist.ProcessGroup) -> None:
        size = group.size()
        own = Sizes(
            sizes.width,
            sizes.heads // size,
            sizes.key_heads // size,
            sizes.features,
            sizes.hidden // size,
        )
        super().__init__(own)
        self.ranks = size

    def forward(self, x: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
        x = x + self._own(self.attention(self._gathered(self.attention_norm(x)), rotated))
        return x + self._own(self.feed_forward(self._gathered(self.ffn_norm(x))))

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(1).expand(-1, self.ranks, -1, -1).flatten(1, 2)

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        return x.narrow(1, 0, x.shape[1] // self.ranks)


def _split(block: Block, over: dist.ProcessGroup, name: str) -> nn.Module:
    # DTensor takes meshes of the same ranks and names for one mesh, whatever their groups are.
    mesh = DeviceMesh.from_group(over, "cpu", mesh_dim_names=(name,))
    return parallelize_module(copy.deepcopy(block), mesh, block_plan())


def _step(block: nn.Module, x: torch.Tensor, rotated: torch.Tensor, **how: Any) -> Step:
    """Returns a step, which returns the block's result and its gradients, sharded as they are."""
    compiled = torch.compile(block, fullgraph=True, **how)
    inputs = (x, *block.parameters())

    def step() -> Any:
        out = compiled(x, rotated)
        return out, torch.autograd.grad(out, inputs, torch.ones_like(out))

    return step


def cases(group: dist.ProcessGroup, overlap: dict[str, Any]) -> Iterator[Case]:
    """Yields the training step, and its compilation; `overlap` turns torch's own passes on."""
    torch.manual_seed(0)
    yield _training(group, overlap)
    yield _compilation(group)


def _training(group: dist.ProcessGroup, overlap: dict[str, Any]) -> Case:
    block, x = Block(SIZES), torch.randn(1, TOKENS, SIZES.width)
    rotated = rotation(TOKENS, SIZES.features, x.dtype)
    shard = x.chunk(group.size(), 1)[group.rank()].clone().requires_grad_()
    steps = {"compiled, compute alone": _step(_Alone(SIZES, group), shard, rotated)}
    over = groups_over(group, "symm_cp")
    ways = {
        "fused": (group, {"options": compile_options(Options(strict=True))}),
        **{f"unfused ({name})": (of, {}) for name, of in over.items()},
        **{f"reordered by torch ({name})": (of, {"options": overlap}) for name, of in over.items()},
        "unfused (gloo)": (group, {}),
    }
    for way, (of, how) in ways.items():
        steps[f"compiled, {way}"] = _step(_split(block, of, way), shard, rotated, **how)

    def check() -> None:
        """Compares with the whole block in one process; float32, sums of up to 2816 products."""
        whole = _whole(block, x, rotated)
        for way in ways:
            out, grads = steps[f"compiled, {way}"]()
            for mine, expected in zip((out, *grads), whole, strict=True):
                if isinstance(mine, DTensor):
                    mine = mine.full_tensor()
                else:
                    expected = expected.chunk(group.size(), 1)[group.rank()]
                torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-3)

    name = f"torchtitan's block, training step of {TOKENS} tokens, float32"
    return Case(name, steps, check, repetitions=11)


def _whole(block: Block, x: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    out = block(x, rotated)
    return out.detach(), *torch.autograd.grad(out, (x, *block.parameters()), torch.ones_like(out))


def _compilation(group: dist.ProcessGroup) -> Case:
    """Both passes, C++ included, with caches that are empty."""
    block = _split(Block(SMALL), group, "compilation")
    shard = torch.randn(1, FEW // group.size(), SMALL.width, requires_grad=True)
    rotated = rotation(FEW, SMALL.features, shard.dtype)

    def compilation(**how: Any) -> Step:
        def run() -> object:
            torch._dynamo.reset()
            with fresh_cache():
                return _step(block, shard, rotated, **how)()

        return run

    ways = {
        "without the passes": compilation(),
        "with the passes": compilation(options=compile_options()),
    }
    return Case("compilation of torchtitan's block, cold", ways, repetitions=6)
