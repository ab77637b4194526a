"""A rank is killed before each step of each op: the others are told, and go on without it."""

from __future__ import annotations

import itertools
import os
import random
import re

import pytest

from symm_cp.testing import Ranks
from tests.exhaustive import some
from tests.faults import kills
from tests.faults.ops import ALL
from tests.patience import patient

#: The ops' names in errors.
NAMES = {
    "gather_matmul": "all_gather_matmul",
    "gather_matmul_whole": "all_gather_matmul",
    "matmul_scatter": "matmul_reduce_scatter",
    "scaled_gather_matmul": "(all_gather_scaled_matmul|scaled_all_gather_matmul)",
    "scaled_matmul_scatter": "scaled_matmul_reduce_scatter",
    "matmul_all_reduce": "matmul_all_reduce",
    "matmuls_all_reduce": "matmuls_all_reduce",
    "attention": "all_gather_attention",
    "attention_backward": "all_gather_attention",
    "attention_ring": "all_gather_attention",
    "ulysses": "all_gather_attention",
    "ulysses_on_a_mesh": "all_gather_attention",
    "low_contention": "_low_contention_",
    "one_shot": "one_shot_all_reduce",
    "two_shot": "two_shot_all_reduce_",
    "scatter_out": "reduce_scatter_out",
    "two_shot_in_place": "two_shot_all_reduce_",
    "gather_in_place": "all_gather_matmul",
    "experts": "(route_to|dispatch_to|combine_from)_experts|dispatch_matmul|matmul_combine",
    "recurrence": "(recurrence|delta_rule)",
    "rwkv7": "(rwkv7|delta_rule)",
    "spread_cache_scattered": "spread_cache_attention",
    "normed_projection": "(project_(normed_)?to_heads|ulysses_projection|exchange_heads)",
    "backend": "(all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|barrier)",
    "backend_async": "(barrier|all_reduce|all_gather|send|recv)",
}
#: Seconds from a death to the last survivor's error. Sleeping ranks check for deaths every 50 ms.
LIMIT = 2.0
#: How many steps of an op are tried on more than two ranks.
SAMPLE = 4
PLAIN = ((2, "attention_ring"),)
#: With --all, every op on 3 ranks, which leaves several survivors, and one of each kind on 4.
OPS = some(
    *PLAIN,
    of=[
        *PLAIN,
        (2, "matmul_scatter"),
        (2, "gather_in_place"),
        (2, "low_contention"),
        (2, "experts"),
        *itertools.product([3], sorted(ALL.keys() - {"ulysses_on_a_mesh"})),
        *itertools.product(
            [4],
            ("ulysses_on_a_mesh", "attention_ring", "two_shot", "low_contention", "backend_async"),
        ),
    ],
)


def named_memory() -> set[str]:
    """The files in /dev/shm, except semaphores, which other programs create and remove, too."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


@pytest.mark.parametrize(("world_size", "op"), OPS)
def test_a_rank_that_is_killed(ranks: Ranks, world_size: int, op: str) -> None:
    assert set(NAMES) == set(ALL)
    with ranks.own(world_size, kills.count_steps, op) as running:
        steps = running.outcomes()[-1].result
    assert steps
    # On two ranks every step is tried, on more ranks a random sample.
    tried = range(steps) if world_size == 2 else random.sample(range(steps), min(steps, SAMPLE))
    for step in tried:
        before = named_memory()
        with ranks.own(world_size, kills.killed_before, op, step) as running:
            *survivors, killed = running.outcomes()
        assert killed.died_at is not None, (step, killed)
        assert named_memory() <= before
        for outcome in survivors:
            assert outcome.result is not None, (step, outcome)
            message = outcome.result["message"]
            assert re.search(NAMES[op], message), (step, message)
            victim = rf"rank {world_size - 1}\b"
            assert re.search(rf"{victim}.*(ended|died|gone|killed)", message), message
            assert outcome.result["at"] - killed.died_at <= patient(LIMIT), (step, outcome)


@pytest.mark.parametrize("kind", ["barrier", "wait_signal", "rendezvous"])
def test_a_rank_that_is_killed_while_the_others_sleep(ranks: Ranks, kind: str) -> None:
    with ranks.own(3, kills.killed_while_others_sleep, kind) as running:
        *survivors, killed = running.outcomes()
    assert killed.died_at is not None, killed
    for outcome in survivors:
        assert re.search(r"rank 2 (died|left|is gone)", outcome.result["message"]), outcome
        assert outcome.result["at"] - killed.died_at < patient(1.0), outcome


def test_a_rank_that_is_stopped_is_no_dead_one(ranks: Ranks) -> None:
    """A stopped rank may go on, so the others' errors report a time-out, not a death."""
    with ranks.own(3, kills.stopped, "gather_matmul") as running:
        *survivors, _ = running.outcomes(apart_from=[2])
    for outcome in survivors:
        message = outcome.result["message"]
        assert "all_gather_matmul" in message, outcome
        assert f"{kills.TIMEOUT_MS} ms" in message, outcome
        assert "died" not in message, outcome
        assert 0.3 < outcome.result["seconds"] < patient(LIMIT), outcome
