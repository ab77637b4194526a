"""Streams that wait in vain: the process aborts and names the op, step, rank and reason."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

import pytest

from symm_cp.testing import Outcome, Ranks
from tests.cuda import waits
from tests.device import devices
from tests.exhaustive import some

pytestmark = devices("simulated", "cuda")


def check(outcomes: Sequence[Outcome], op: str, why: str) -> None:
    """Checks that all ranks but the last have aborted, and said why."""
    *survivors, _ = outcomes
    waited = r"waiting for flag '\w+' of rank (\d) \(call \d+, seen \d+\)"
    last, causes = len(survivors), []
    for rank, outcome in enumerate(survivors):
        assert outcome.signal == signal.SIGABRT, outcome
        call = rf"symm_cp: (?:fused_)?{op}.* in group '.+'"
        pattern = rf"{call}: rank {rank} {waited}: (.*)\. A stream"
        found = re.search(pattern, outcome.output)
        assert found is not None, outcome.output
        # Added in modes of the simulation in which the driver is held up.
        cause = re.sub(r" \(the driver did not answer for \d+ ms\)$", "", found[2])
        causes.append((int(found[1]), cause))
    # A survivor that aborted may be the cause that others name.
    assert (last, why.format(last)) in causes, causes
    for peer, cause in causes:
        assert cause in (why.format(last), f"rank {peer} died"), causes


@pytest.mark.parametrize(
    ("world_size", "run", "op"),
    some(
        (3, waits.attention, "all_gather_attention"),
        of=[
            (3, waits.attention, "all_gather_attention"),
            (2, waits.background, "_low_contention_all_gather"),
            (2, waits.matmul_scatter, "matmul_reduce_scatter"),
        ],
    ),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_rank_dies(ranks: Ranks, world_size: int, run: waits.Op, op: str) -> None:
    with ranks.own(world_size, waits.others_wait, run, waits.dies) as running:
        check(running.outcomes(), op, "rank {} died")


def test_a_rank_fails_in_the_middle_of_a_call(ranks: Ranks) -> None:
    with ranks.own(3, waits.others_wait, waits.matmul_scatter, waits.fails) as running:
        outcomes = running.outcomes()
    check(outcomes, "matmul_reduce_scatter", "rank {} aborted the call; see its stderr")
    assert outcomes[-1].result == "matmul_reduce_scatter: no memory"


def test_a_rank_stops(ranks: Ranks) -> None:
    with ranks.own(2, waits.others_wait, waits.gather_matmul, waits.stops) as running:
        outcomes = running.outcomes(apart_from=[1])
    check(outcomes, "all_gather_matmul", f"timed out after {waits.SHORT_MS} ms")


def test_a_late_rank_is_waited_for(ranks: Ranks) -> None:
    with ranks.own(3, waits.last_is_late, waits.matmul_scatter) as running:
        outcomes = running.outcomes()
    assert [(outcome.result, outcome.output) for outcome in outcomes] == [("done", "")] * 3
