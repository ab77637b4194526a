"""A rank that ends, stops or fails at any moment, and ranks that make different calls."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from symm_cp.ops.op import declared
from symm_cp.testing import Ranks
from tests.exhaustive import some
from tests.faults import mismatches, moments
from tests.patience import patient

_BACKEND = "all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|barrier|send|recv"
OPS = re.compile(
    "|".join((_BACKEND, "making group", "symm_mem.rendezvous", *(op.name for op in declared())))
)
#: Seconds until each rank has been told.
LIMIT = 2.0


@pytest.mark.parametrize("event", moments.EVENTS)
@pytest.mark.parametrize("count", some(1, of=(1, 12)))
def test_at_any_moment(ranks: Ranks, event: str, count: int) -> None:
    """The others are told within two seconds which rank it was, in which op, and go on."""
    for _ in range(count):
        world_size = random.randint(2, 4)
        delay = random.choice((0.02, 0.1, 0.4)) * random.random()
        stopped = [world_size - 1] if event == "stop" else []
        with ranks.own(world_size, moments.until_told, event, delay) as running:
            *survivors, _ = running.outcomes(apart_from=stopped)
        case = f"{delay:.4f} s: " + "\n".join(map(str, survivors))
        assert all(outcome.result is not None for outcome in survivors), case
        messages = [outcome.result["message"] for outcome in survivors]
        named = [f"rank {world_size - 1}" in message for message in messages]
        # Only ranks that wait for a stopped rank can name it; others wait for those ranks.
        assert any(named) if event == "stop" else all(named), case
        assert all(OPS.search(message) for message in messages), case
        assert all(outcome.result["seconds"] < patient(LIMIT) for outcome in survivors), case


@pytest.mark.parametrize(
    "ops", list(itertools.combinations(mismatches.OPS_OF_RANKS, 2)), ids="-".join
)
def test_different_ops(ranks: Ranks, ops: tuple[str, str]) -> None:
    """Ranks are told that they disagree, even if neither raises a flag that the other awaits."""
    pair = [(op, 4, 4, "float32", False) for op in ops]
    with ranks.own(2, mismatches.unequal, pair, True) as running:
        outcomes = running.outcomes()
    for bad, good in (outcome.result for outcome in outcomes):
        assert "ranks disagree" in bad["said"], outcomes
        assert bad["seconds"] < patient(LIMIT), outcomes
        assert not good["said"], outcomes


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [50])
def test_different_calls(ranks: Ranks, count: int) -> None:
    """Both ranks are told within two seconds, and the next call works.

    For first calls on two channels they are told ten seconds later (kSecondThreadTime in csrc/),
    because these calls might come from two threads.
    """
    for _ in range(count):
        pair, warm = mismatches.random_pair(random.Random(random.random())), random.random() < 0.7
        with ranks.own(2, mismatches.unequal, pair, warm) as running:
            outcomes = running.outcomes()
        case = pair, warm, outcomes
        assert all(outcome.result is not None for outcome in outcomes), case
        # One rank may pass symmetric memory to a gather while the other one does not.
        right = pair[0][:4] == pair[1][:4] and pair[0][0] == "gather"
        apart = not warm and (pair[0][0] == "background") != (pair[1][0] == "background")
        for bad, good in (outcome.result for outcome in outcomes):
            assert bad["said"] or right, case
            assert bad["seconds"] < patient(LIMIT) + (10 if apart else 0), case
            assert not good["said"], case
        if not right and not any(spec[0] == "wrong" for spec in pair):
            assert all("ranks disagree" in outcome.result[0]["said"] for outcome in outcomes), case
