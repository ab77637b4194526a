"""Random routings; loads that these seldom have, one by one; results at every world size.

Tokens, weights of the router and of experts have their gradients compared as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from symm_cp import moe
from symm_cp.testing import Ranks
from tests import device
from tests.exhaustive import some
from tests.ops import test_experts, test_grouped_matmuls
from tests.ops.test_experts import FLOATS, Case, drawn
from tests.ops.test_grouped_matmuls import HIDDEN, Layer

everywhere = device.devices(*device.NAMES)

TOKENS, TOP_K = 5, 2

#: Rows alone, and with matmuls: random routings, cases, and checks of one.
FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "rows": (test_experts.many_agree, Case, test_experts.agrees),
    "matmuls": (test_grouped_matmuls.many_agree, Layer, test_grouped_matmuls.agrees),
}
BOTH = pytest.mark.parametrize("family", FAMILIES)


@everywhere
@BOTH
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_random_routings(ranks: Ranks, world_size: int, family: str) -> None:
    seed = drawn()
    ranks.run(world_size, FAMILIES[family][0], range(seed, seed + 5), [torch.float64])


@everywhere
@BOTH
@pytest.mark.parametrize("dtype", some(torch.bfloat16, of=FLOATS))
def test_every_dtype(ranks: Ranks, dtype: torch.dtype, family: str) -> None:
    seed = drawn()
    ranks.run(2, FAMILIES[family][0], range(seed, seed + 4), [dtype])


@everywhere
@BOTH
@pytest.mark.parametrize("world_size", some(of=[2, 3, 4]))
def test_many_random_routings(ranks: Ranks, world_size: int, family: str) -> None:
    """Random routings with all dtypes, 900 in total."""
    seed = drawn()
    ranks.run(world_size, FAMILIES[family][0], range(seed, seed + 150), FLOATS)


@BOTH
@pytest.mark.parametrize("world_size", some(2, of=[1, 2, 3, 4]))
@pytest.mark.ranks
def test_compiled(group: dist.ProcessGroup, world_size: int, family: str) -> None:
    """Compiles to one graph, which also works for other numbers of rows."""
    W, rank = group.size(), group.rank()

    def rows(experts: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        found, routing = moe.dispatch(inputs[0], experts, 2 * W, group=group)
        return moe.combine(found.square(), inputs[-1], routing)

    def matmuls(experts: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return test_grouped_matmuls.fused(group, experts, 2 * W, None, *inputs)

    step = matmuls if family == "matmuls" else rows
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = torch.compile(step, backend="aot_eager", fullgraph=True)
        for seed in (3, 4):
            case = Layer(W, [6] * W, 2 * W, 2, seed=seed)
            results = []
            for function in (run, step):
                inputs = case.of_rank(rank, W)
                out = function(case.experts[rank], *inputs)
                grads = torch.autograd.grad(out, inputs, case.outputs[rank], allow_unused=True)
                results.append([out, *(grad for grad in grads if grad is not None)])
            torch.testing.assert_close(*results)


def _one_takes_all(chosen: torch.Tensor) -> torch.Tensor:
    """The last expert gets every token; all others are empty."""
    return torch.tensor([-1, int(chosen.max())]).expand(chosen.shape)


def _some_are_empty(chosen: torch.Tensor) -> torch.Tensor:
    """No token has the experts with even numbers, the first of rank 0 among them."""
    return torch.where(chosen % 2 == 0, -1, chosen)


def _nobody_has_any(chosen: torch.Tensor) -> torch.Tensor:
    """All tokens are dropped by the router, and the results are zeros."""
    return torch.full_like(chosen, -1)


LOADS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int | None]] = {
    "one takes all": (_one_takes_all, None),
    "one takes all, of which it keeps 3": (_one_takes_all, 3),
    "some are empty": (_some_are_empty, None),
    "nobody has any": (_nobody_has_any, None),
    "each keeps 1": (lambda chosen: chosen, 1),
    "none keeps any": (lambda chosen: chosen, 0),
}


@everywhere
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.ranks
def test_loads(group: dist.ProcessGroup, world_size: int, load: str) -> None:
    seed = drawn()
    W = group.size()
    change, capacity = LOADS[load]
    for _, make, agrees in FAMILIES.values():
        case = make(W, [TOKENS] * W, 2 * W, TOP_K, seed=seed)
        # On all ranks the largest number is the last expert's.
        for chosen in case.experts:
            chosen[0, 0] = 2 * W - 1
        case.experts = [change(chosen).to(chosen) for chosen in case.experts]
        agrees(group, case, capacity)


def part_of_layer(
    group: dist.ProcessGroup, seed: int, capacity: int | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A rank's part of one layer of 12 experts and 24 tokens, by rows alone and with matmuls."""
    W, rank = group.size(), group.rank()
    case = Layer(1, [24], 12, TOP_K, seed=seed)
    own = slice(24 // W * rank, 24 // W * (rank + 1))
    experts, grad = case.experts[0][own], case.outputs[0][own]

    tokens, weights = (x[0][own].clone().requires_grad_() for x in (case.tokens, case.weights))
    rows, routing = moe.dispatch(tokens, experts, 12, group=group, capacity=capacity)
    result = test_experts.layer(rows, rank * 12 // W, routing.ends)
    out = moe.combine(result, weights, routing)
    by_rows = [out, *torch.autograd.grad(out, (tokens, weights), grad)]

    of_experts = slice(12 // W * rank, 12 // W * (rank + 1))
    matrices = [x[of_experts].clone().requires_grad_() for x in (case.gate, case.up, case.down)]
    given = [tokens, *matrices, weights]
    out = test_grouped_matmuls.fused(group, experts, 12, capacity, *given)
    by_matmuls = [out, *torch.autograd.grad(out, given, grad)]
    return [x.detach() for x in by_rows], [x.detach() for x in by_matmuls]


@everywhere
@pytest.mark.parametrize("capacity", [None, 3])
def test_results_do_not_depend_on_the_world_size(ranks: Ranks, capacity: int | None) -> None:
    """Results are equal to the bit, except matmuls, whose last bits may depend on addresses."""
    seed = drawn()
    parts = [ranks.run(W, part_of_layer, seed, capacity) for W in (1, 2, 3, 4)]
    whole = [
        [
            [torch.cat(each) for each in zip(*results, strict=True)]
            for results in zip(*of, strict=True)
        ]
        for of in parts
    ]
    assert whole[0][0][0].shape == (24, HIDDEN)
    for by_rows, by_matmuls in whole[1:]:
        for found, want in zip(by_rows, whole[0][0], strict=True):
            assert torch.equal(found, want)
        for found, want in zip(by_matmuls, whole[0][1], strict=True):
            torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
