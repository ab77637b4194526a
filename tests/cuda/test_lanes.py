"""Fused matmuls on two compute streams in turn: the bits of one, and kernels that overlap."""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import symm_cp
from symm_cp import cuda, tuning
from symm_cp.group import memory
from symm_cp.ops.matmul import algorithms
from symm_cp.ops.matmul.products import Terms
from symm_cp.testing import Ranks
from tests.cuda import simulated, test_plans
from tests.cuda.simulated import SimulatedDevice, simulation
from tests.exhaustive import some


def matmuls(group: dist.ProcessGroup, choose: random.Random) -> list[torch.Tensor]:
    """Calls both ops three times, so that plans make the last; returns all results."""
    W, results = group.size(), list[torch.Tensor]()
    dtype = choose.choice([torch.float32, torch.bfloat16])
    rows, inner, columns = (choose.choice([1, 3, 8, 33]) for _ in range(3))
    torch.manual_seed(choose.randrange(1 << 30) + group.rank())
    shard, tall = torch.randn(rows, inner).to(dtype), torch.randn(rows * W, inner).to(dtype)
    weights = [torch.randn(inner, n).to(dtype) for n in (columns, 2)]
    for keep in (choose.random() < 0.5,) * 3:
        found = symm_cp.all_gather_matmul(shard, weights, group=group, return_gathered=keep)
        results += [found[0], *found[1]] if keep else found
        results.append(symm_cp.matmul_reduce_scatter(tall, weights[0], group=group))
        shard, tall = shard + 1, tall + 1
    return results


def same_bits(group: dist.ProcessGroup, mode: dict[str, Any], seed: int) -> None:
    launch, used = SimulatedDevice.launch, list[str]()

    def noted(device: SimulatedDevice, lane: str, user: str, kernel: Any) -> None:
        used.append(lane)
        launch(device, lane, user, kernel)

    with (
        mock.patch.object(SimulatedDevice, "launch", noted),
        simulation(**mode) as made,
    ):
        cuda.reserve_on(memory.resolve(group), made, 1 << 20)
        with tuning.forced("shards"):
            expected = matmuls(group, random.Random(seed))
        assert "compute2" not in used
        with tuning.forced("lanes"):
            found = matmuls(group, random.Random(seed))
        assert ("compute2" in used) == (group.size() > 1)
        if made.mode.plans and not mode.get("graph"):
            assert test_plans.refusal() == ""
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


MODES: list[dict[str, Any]] = [
    {"delays_us": 2000, "poison": True},
    {"graph": True},
    {"one_queue": True, "plan_at": -1},
    {"driver_version": 12050},
    {"lazy_loading": True},
]


@pytest.mark.parametrize(
    ("world_size", "mode"),
    some(
        (2, MODES[0]), (3, MODES[1]), (4, MODES[2]), (4, MODES[3]), (3, MODES[4]),
        of=itertools.product([1, 2, 3, 4, 8], MODES),
    ),
    ids=str,
)  # fmt: skip
def test_two_lanes_give_the_bits_of_one(
    ranks: Ranks, world_size: int, mode: dict[str, Any]
) -> None:
    with ranks.own(world_size, same_bits, mode, random.randrange(1 << 30)) as running:
        assert [outcome.failure for outcome in running.outcomes(120)] == [""] * world_size


def overlap(group: dist.ProcessGroup, algorithm: str) -> bool:
    """Whether the kernel of a turn can run while that of the turn before runs."""
    began, met, turns = threading.Event(), list[bool](), itertools.count()
    add_up = Terms.add_up

    def meeting(terms: Terms, out: torch.Tensor, rank: int | None = None, bias: Any = None) -> None:
        first = next(turns) == 0
        made.call(0, (lambda: met.append(began.wait(2))) if first else began.set)
        add_up(terms, out, rank, bias)

    a, weight = torch.randn(2 * group.size(), 4), torch.randn(4, 3)
    with (
        mock.patch.object(Terms, "add_up", meeting),
        simulation(delays_us=0, plan_at=-1) as made,
        tuning.forced(algorithm),
    ):
        symm_cp.matmul_reduce_scatter(a, weight, group=group)
    return met == [True]


@pytest.mark.parametrize("algorithm", ["lanes", "shards"])
def test_kernels_of_two_lanes_overlap(ranks: Ranks, algorithm: str) -> None:
    assert ranks.run(3, overlap, algorithm) == [algorithm == "lanes"] * 3


@pytest.mark.ranks(2)
def test_lanes_are_chosen_by_tiles(group: dist.ProcessGroup) -> None:
    """By the number of tiles of a shard; the reason says both numbers."""
    state, device = memory.resolve(group), torch.device("cpu")

    def chosen(algorithm: str, rows: int, columns: int) -> str:
        part = rows, columns
        with tuning.listening() as heard:
            algorithms.choose_pipelined(
                state, device, "a test", algorithm, part, tiles=lambda: False
            )
        return str(heard["a test"])

    assert chosen("shards", 1024, 768) == "shards (by size)"  # on CPU
    with simulated.simulation(), mock.patch.object(SimulatedDevice, "multiprocessors") as count:
        count.return_value = 132
        about = "tiles of a shard, 132 multiprocessors"
        assert chosen("shards", 1024, 768) == f"lanes (by size: 48 {about})"
        assert chosen("shards", 8192, 14336) == f"shards (by size: 7168 {about})"
        assert chosen("whole", 1, 768) == "whole (by size)"
        with tuning.forced("lanes"):
            assert chosen("whole", 1, 768) == "lanes (forced)"
        with tuning.forced("tiles"):
            assert chosen("whole", 1, 768) == "whole (tiles cannot serve it)"
        tuning.tuned(state)["a test"] = "tiles"  # from a table of an older version
        assert chosen("whole", 1, 768) == "whole (by size)"
        tuning.tuned(state)["a test"] = "lanes"
        assert chosen("whole", 1, 768) == "lanes (measured)"
    tuning.relearn(state)
