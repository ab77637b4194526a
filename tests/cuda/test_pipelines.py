"""The CUDA runtime over a simulated driver: the tests of the ops, run as on CUDA.

Real ranks, schedules, launches, signals and copies; streams are threads with random delays.
"""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import cuda, runtime, tuning
from symm_cp.group import memory
from symm_cp.ops.attention import pipeline
from symm_cp.runtime.calls import GatherAndScatterCall
from symm_cp.testing import Ranks
from tests.cuda.simulated import simulation
from tests.exhaustive import some
from tests.ops import test_attention, test_random

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
MODES = pytest.mark.parametrize("mode", [{}, {"graph": True}], ids=["eager", "graph"])


@MODES
@WORLD_SIZES
@pytest.mark.ranks
def test_random_matmuls(group: dist.ProcessGroup, world_size: int, mode: dict[str, Any]) -> None:
    count = 4
    with simulation(**mode) as made:
        cuda.reserve_on(memory.resolve(group), made, 1 << 20)
        for index in range(count):
            test_random.gathers(group, index)
            test_random.scatters(group, index)
            test_random.all_reduces(group, index)


def long_backward(group: dist.ProcessGroup) -> list[bool]:
    """Whether gradients travel in a ring, below the limit and from there on."""
    W, found = group.size(), []
    runs = runtime.run

    def run(call: Any) -> None:
        found.extend([call.ring] if isinstance(call, GatherAndScatterCall) else [])
        runs(call)

    nbytes = 2 * W * 8 * 16 * 4  # keys and values of one head, in float32
    for limit in (nbytes + 1, nbytes):
        with (
            simulation(plan_at=-1),
            tuning.forced("pipeline"),
            mock.patch.object(runtime, "run", run),
            mock.patch.object(pipeline, "_RING_BYTES", limit),
        ):
            q, k, v = torch.randn(3, W, 1, 1, 8, 16, generator=torch.Generator().manual_seed(1))
            inputs = [x[group.rank()].clone().requires_grad_() for x in (q, k, v)]
            out = symm_cp.all_gather_attention(*inputs, group=group)
            assert isinstance(out, torch.Tensor)
            grads = torch.autograd.grad(out.square().sum(), inputs)
            whole = [torch.cat(list(x), 2).requires_grad_() for x in (q, k, v)]
            dense = torch.nn.functional.scaled_dot_product_attention(*whole)
            for grad, expected in zip(
                grads, torch.autograd.grad(dense.square().sum(), whole), strict=True
            ):
                torch.testing.assert_close(grad, expected.chunk(W, 2)[group.rank()])
    return found


def test_gradients_of_many_tokens_travel_in_a_ring(ranks: Ranks) -> None:
    assert ranks.run(3, long_backward) == [[False, True]] * 3
    assert ranks.run(2, long_backward) == [[False, False]] * 2


@pytest.mark.parametrize(
    ("world_size", "graph"),
    some(
        (1, False), (2, True), (4, True),
        of=itertools.product([1, 2, 3, 4], [False, True]),
    ),
)  # fmt: skip
@pytest.mark.ranks
def test_attention_forward_and_backward(
    group: dist.ProcessGroup, graph: bool, world_size: int
) -> None:
    """All masks on two layouts, forward and backward, in rank order and as a ring."""
    mode = {"graph": graph}
    seed = random.randrange(1 << 30)
    W = group.size()
    chosen = random.Random(seed)
    cases = [
        test_attention.Case(layout, rotate=rotate, dtype=dtype, **mask)
        for layout in chosen.sample(test_attention.layouts(W), 2)
        for mask in test_attention.masks(layout)[::2]
        for rotate, dtype in (("allgather", torch.float32), ("alltoall", torch.bfloat16))
    ]
    with simulation(**mode) as made:
        cuda.reserve_on(memory.resolve(group), made, 1 << 20)
        test_attention.run_all(group, cases, seed)
