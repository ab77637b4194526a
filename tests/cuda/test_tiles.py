"""Fused matmuls as one kernel each: real ranks, pulls and flags; the kernels are interpreted."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import tuning
from symm_cp.group import memory
from symm_cp.ops.matmul import by_tiles
from symm_cp.testing import Ranks
from tests.cuda import test_plans
from tests.exhaustive import some

# Calls that do not go by tiles even if forced: the gathered dimension, the shape of a shard.
OTHERS: list[tuple[int, tuple[int, ...]]] = [(1, (4, 6)), (0, (0, 4))]


def small_tiles() -> Any:
    """Returns a context in which kernels use tiles small enough for the interpreter."""
    # Triton chooses its interpreter when it is imported.
    from symm_cp.cuda.kernels import tile_matmul as module
    from tests.cuda import interpreted

    interpreted.mend()
    fitting = module.Tiling(16, 16, 16, 4, 1), 3
    return mock.patch.object(module, "_fitting", return_value=fitting)


def tolerances(dtype: torch.dtype, inner: int, terms: int = 1) -> dict[str, float]:
    """Tolerances for `terms` products, each rounded once, of sums of `inner` terms in float32.

    Sums may cancel: their terms are products of two normal numbers, of up to about 16.
    """
    eps = torch.finfo(dtype).eps
    return {"rtol": eps, "atol": terms * inner * max(eps, 16 * torch.finfo(torch.float32).eps)}


def check_gather(group: dist.ProcessGroup, choose: random.Random) -> None:
    W, rank = group.size(), group.rank()
    dtype = choose.choice([torch.float32, torch.float16])
    shape = choose.choice([(5, 33), (3, 4, 16), (40, 7)])
    dim = choose.randrange(len(shape) - 1)
    shards = [torch.randn(shape).to(dtype) for _ in range(W)]
    weights = [torch.randn(n, shape[-1]).to(dtype).t() for n in choose.sample([1, 17, 32], 2)]
    whole = torch.cat(shards, dim)
    for keep in choose.sample([False, True, True], 3):  # one of them is recorded, if any can be
        found = symm_cp.all_gather_matmul(
            shards[rank], weights, gather_dim=dim, group=group, return_gathered=keep
        )
        outputs = found[1] if keep else found
        assert not keep or torch.equal(found[0], whole)
        for output, weight in zip(outputs, weights, strict=True):
            exact = whole.double() @ weight.double()
            torch.testing.assert_close(output.double(), exact, **tolerances(dtype, shape[-1]))


def check_scatter(group: dist.ProcessGroup, choose: random.Random) -> None:
    W, rank = group.size(), group.rank()
    dtype = choose.choice([torch.float32, torch.float16])
    lead, dim = choose.choice([((5 * W,), 0), ((1, 18 * W), 1), ((2 * W, 3), 0)])
    # Ranks may differ in the inner dimension.
    inner = [choose.choice([1, 16, 33]) for _ in range(W)]
    columns, op = choose.choice([1, 17, 32]), choose.choice(["sum", "avg"])
    lefts = [torch.randn(*lead, k).to(dtype) for k in inner]
    rights = [torch.randn(columns, k).to(dtype).t() for k in inner]
    exact = sum((a.double() @ b.double() for a, b in zip(lefts, rights, strict=True)), start=0.0)
    exact = (exact / W if op == "avg" else exact).chunk(W, dim)[rank]
    for _ in range(3):
        output = symm_cp.matmul_reduce_scatter(
            lefts[rank], rights[rank], scatter_dim=dim, reduce_op=op, group=group
        )
        torch.testing.assert_close(output.double(), exact, **tolerances(dtype, max(inner), W))


def check_gradients(group: dist.ProcessGroup) -> None:
    W, rank = group.size(), group.rank()
    shards, weight = torch.randn(W, 6, 20), torch.randn(20, 18)
    leaves = [shards[rank].clone().requires_grad_(), weight.clone().requires_grad_()]
    up = symm_cp.all_gather_matmul(*leaves, group=group)
    down = symm_cp.matmul_reduce_scatter(up, leaves[1].t(), group=group)
    down.square().sum().backward()
    dense = [shards.flatten(0, 1).double().requires_grad_(), weight.double().requires_grad_()]
    total = W * (dense[0] @ dense[1] @ dense[1].t())  # all ranks compute the same product
    total.square().sum().backward()
    mine = dense[0].grad.chunk(W)[rank]
    torch.testing.assert_close(leaves[0].grad.double(), mine, rtol=1e-4, atol=1e-2)
    ours = leaves[1].grad.clone()
    dist.all_reduce(ours, group=group)
    torch.testing.assert_close(ours.double(), dense[1].grad, rtol=1e-4, atol=1e-1)


def matmuls(group: dist.ProcessGroup, mode: dict[str, Any], seed: int) -> None:
    from tests.cuda.simulated import SimulatedDevice, simulation

    choose = random.Random(seed)
    torch.manual_seed(seed)
    with (
        small_tiles(),
        mock.patch.object(SimulatedDevice, "polls", return_value=True),
        mock.patch.object(by_tiles, "gather", wraps=by_tiles.gather) as gathered,
        mock.patch.object(by_tiles, "scatter", wraps=by_tiles.scatter) as scattered,
        simulation(**mode) as made,
        tuning.forced("tiles"),
        tuning.listening() as choices,
    ):
        check_gather(group, choose)
        check_scatter(group, choose)
        # No call is made by a plan, which would compare the number of the recorded call.
        assert test_plans.refusal() == "a kernel compares the number of the call"
        assert (gathered.call_count, scattered.call_count) == (3, 3)
        assert made.machine.polling_kernels == 6  # 3 calls with 2 weights each
        assert {str(choice) for choice in choices.values()} == {"tiles (forced)"}
        check_gradients(group)
        assert gathered.call_count >= 4
        assert scattered.call_count >= 5
        before = gathered.call_count, scattered.call_count
        for dim, shape in OTHERS:
            x, inner = torch.randn(shape), shape[-1] * (group.size() if dim == 1 else 1)
            symm_cp.all_gather_matmul(x, torch.randn(inner, 3), gather_dim=dim, group=group)
        symm_cp.all_gather_matmul(
            torch.randn(2, 4).double(), torch.randn(4, 3).double(), group=group
        )
        wide = torch.randn(2, 2 * group.size(), 4)
        symm_cp.matmul_reduce_scatter(wide, torch.randn(4, 3), scatter_dim=1, group=group)
        assert before == (gathered.call_count, scattered.call_count)


MODES: list[dict[str, Any]] = [
    # Kernels fill the device, and copies within it cannot run beside one that polls.
    {"multiprocessors": True, "delays_us": 2000},
    {"one_queue": True},
    {"driver_version": 12050, "poison": True},
]


@pytest.mark.parametrize(
    ("world_size", "mode"),
    some((2, MODES[0]), of=[(W, mode) for W in (2, 3, 4) for mode in MODES]),
    ids=str,
)
def test_matmuls_by_tiles(
    ranks: Ranks, world_size: int, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    seed = random.randrange(1 << 30)
    with ranks.own(world_size, matmuls, mode, seed, forked=False) as running:
        assert [outcome.failure for outcome in running.outcomes(120)] == [""] * world_size


@pytest.mark.parametrize("mode", [{"graph": True}, {"passes": False}, {"polls": False}], ids=str)
@pytest.mark.ranks(2)
def test_where_kernels_and_streams_cannot_wait_for_each_other(
    group: dist.ProcessGroup, mode: dict[str, Any]
) -> None:
    from tests.cuda.simulated import SimulatedDevice, simulation

    x, w = torch.randn(4, 8), torch.randn(8, 3)
    with (
        mock.patch.object(SimulatedDevice, "polls", return_value=mode.get("polls", True)),
        mock.patch.object(by_tiles, "gather", side_effect=AssertionError),
        simulation(**{key: value for key, value in mode.items() if key != "polls"}) as made,
        tuning.forced("tiles"),
    ):
        symm_cp.cuda.reserve_on(memory.resolve(group), made, 1 << 12)
        got = symm_cp.all_gather_matmul(x, w, group=group)
        assert got.shape == (4 * group.size(), 3)
