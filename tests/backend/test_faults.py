"""Ranks of the backend die, stop, disagree or give up: the others are told, and go on."""

from __future__ import annotations

import itertools
import re

import pytest

from symm_cp.testing import Ranks
from tests.backend import faulty
from tests.exhaustive import some
from tests.patience import patient

#: Seconds from a death to the last survivor's error.
LIMIT = 2.0


@pytest.mark.parametrize(
    ("name", "first"),
    some(("all_reduce", False), ("recv", True), of=itertools.product(faulty.CALLS, (True, False))),
)
def test_a_dead_rank(ranks: Ranks, name: str, first: bool) -> None:
    with ranks.own(3, _death, name, first) as running:
        *survivors, killed = running.outcomes()
    assert killed.died_at is not None, killed
    for outcome in survivors:
        assert outcome.result is not None, outcome
        message, at = outcome.result
        assert re.search(r"rank 2\b.*(ended|died|gone|left)", message), message
        # Survivors of a death before the first call sleep 0.5 s before they make it.
        assert at - killed.died_at < patient(LIMIT), (at - killed.died_at, message)


def _death(group: object, name: str, first: bool) -> tuple[str, float]:
    return faulty.death(group, name, first=first)  # type: ignore[arg-type]


COLLECTIVES = [name for name in faulty.CALLS if name != "recv"]


@pytest.mark.parametrize(
    ("name", "first"), some(("barrier", False), of=itertools.product(COLLECTIVES, (True, False)))
)
def test_a_message_that_is_lost_with_its_sender(ranks: Ranks, name: str, first: bool) -> None:
    """Ranks that wait for the receiver are told, too, though the dead rank had joined the call."""
    with ranks.own(3, _death_of_a_sender, name, first) as running:
        receiver, other, _ = running.outcomes()
    assert receiver.result is not None, receiver
    assert other.result is not None, other
    assert "recv from rank 2" in receiver.result[0], receiver
    assert re.search(r"rank 2 .*died .noticed by rank 0", other.result[0]), other
    assert other.result[1] - receiver.result[1] < LIMIT, (receiver, other)


def _death_of_a_sender(group: object, name: str, first: bool) -> tuple[str, float]:
    return faulty.death_of_a_sender(group, name, first=first)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", some("all_reduce", of=faulty.CALLS))
def test_a_rank_that_stops(ranks: Ranks, name: str) -> None:
    with ranks.own(3, faulty.stopped, name) as running:
        survivors = running.outcomes(apart_from=[2])[:2]
    for outcome in survivors:
        message, at, begin = outcome.result
        assert "rank" in message, message
        assert faulty.SHORT.total_seconds() * 0.5 < at - begin < patient(5), (at - begin, message)
    assert any("rank 2" in outcome.result[0] for outcome in survivors)


#: torch's futures defer Ctrl-C until they complete; peers are not told of an abandoned receive.
INTERRUPTIBLE = [name for name in faulty.CALLS if name not in ("future of all_reduce", "recv")]


@pytest.mark.parametrize("name", some("all_reduce", "background all_reduce", of=INTERRUPTIBLE))
def test_an_interrupt(ranks: Ranks, name: str) -> None:
    with ranks.own(2, faulty.interrupted, name) as running:
        first, second = running.outcomes()
    assert first.result == "interrupted", first
    assert second.result is not None, second


def test_an_interrupted_receive(ranks: Ranks) -> None:
    with ranks.own(2, faulty.interrupted_receive) as running:
        first, second = running.outcomes()
    assert first.result == "interrupted", first
    assert second.result is not None, second


def test_ranks_that_disagree(ranks: Ranks) -> None:
    one, *others = ranks.run(3, faulty.disagreement)
    for name in one:
        for messages in (one, *others):
            assert "DistBackendError" in messages[name], (name, messages[name])
            assert "ranks disagree" in messages[name], (name, messages[name])
    assert "[6]" in one["shape"]
    assert "[4]" in one["shape"]
    assert "int32" in others[0]["dtype"]
    assert "barrier" in others[1]["call"]


def test_bad_arguments_on_one_rank(ranks: Ranks) -> None:
    one, other = ranks.run(2, faulty.refusals)
    kinds = {"float8": "NotImplementedError", "avg": "NotImplementedError"}
    for name in one:
        assert one[name].startswith(kinds.get(name, "ValueError")), one[name]
        assert other[name].startswith("DistBackendError"), (name, other[name])
        assert "on rank 0" in other[name], (name, other[name])


@pytest.mark.parametrize("name", some("all_reduce", "recv", of=faulty.CALLS))
def test_abort(ranks: Ranks, name: str) -> None:
    with ranks.own(2, faulty.aborted, name) as running:
        first, second = running.outcomes()
    message, seconds, later = first.result
    assert "DistBackendError" in message, message
    assert seconds < patient(1.0)
    assert "aborted" in later
    assert "DistBackendError" in second.result[0], second


def test_destruction_with_works_in_flight(ranks: Ranks) -> None:
    with ranks.own(2, faulty.destroyed) as running:
        for outcome in running.outcomes():
            assert outcome.result is not None, outcome
            assert outcome.result < 30


def test_late_for_a_monitored_barrier(ranks: Ranks) -> None:
    with ranks.own(3, faulty.late_for_barrier) as running:
        first, second, third = (outcome.result for outcome in running.outcomes())
    # The errors use gloo's wording.
    assert "Rank 1 failed to pass monitoredBarrier in 600 ms" in first, first
    assert "Rank 2 successfully reached monitoredBarrier, but" in third, third
    assert "Rank 1 failed to pass monitoredBarrier" in third, third
    assert "DistBackendError" in second


def test_a_monitored_barrier_as_the_first_call(ranks: Ranks) -> None:
    with ranks.own(3, faulty.first_barrier) as running:
        (first, seconds), _, _ = (outcome.result for outcome in running.outcomes())
    assert "Ranks 1, 2 failed to pass monitoredBarrier in 600 ms" in first[0], first
    assert "Rank 0 timed out in monitoredBarrier after 0 ms" in first[1], first
    short = faulty.SHORT.total_seconds()
    assert short * 0.9 < seconds < short + 1.5, seconds


def test_time_outs(ranks: Ranks) -> None:
    with ranks.own(2, faulty.time_outs) as running:
        first, _ = running.outcomes()
    assert first.result is not None, first
    short = faulty.SHORT.total_seconds()
    for seconds, limit in zip(first.result, (short, 2 * short, short / 2), strict=True):
        assert limit * 0.9 < seconds < limit + 1.0, first.result


def test_a_rank_that_does_not_come_to_the_first_call(ranks: Ranks) -> None:
    with ranks.own(2, faulty.late_for_the_first_call) as running:
        message, seconds = running.outcomes()[0].result
    assert "rank 1" in message, message
    assert faulty.SHORT.total_seconds() * 0.9 < seconds < faulty.SHORT.total_seconds() + 2, seconds


def test_a_rank_that_does_not_come(ranks: Ranks) -> None:
    with ranks.own(3, faulty.missing) as running:
        first, _, third = (outcome.result for outcome in running.outcomes())
    for message in (first, third):
        assert re.search(r"making group .*rank 1 did not come", message), message


def test_a_fork(ranks: Ranks) -> None:
    with ranks.own(2, faulty.forked) as running:
        for outcome in running.outcomes():
            assert "forked" in outcome.result, outcome
