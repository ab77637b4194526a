"""Cases for ``pytest --all`` only: the marker `exhaustive`, and parameters that carry it."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

exhaustive = pytest.mark.exhaustive
#: Parts of a drawn order: more share a short time more evenly, and load and compile more often.
_PARTS = 20


def drawn(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Orders exhaustive cases so that each file has its share of however long they may run.

    Each part of the order has some of every test's cases, file by file, since cases of a file share
    modules and compiled functions. The seed draws the cases of a part and the order of its files.
    Cases that are not exhaustive come first.
    """
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive"):
            tests[item.nodeid.partition("[")[0]].append(item)
    places: dict[pytest.Item, tuple[int, float]] = {}
    for test, cases in tests.items():
        draw = random.Random(f"{seed} {test}")
        first = draw.randrange(_PARTS)
        for turn, item in enumerate(draw.sample(cases, len(cases))):
            part = (first + turn) % _PARTS
            file = item.nodeid.partition("::")[0]
            places[item] = part, random.Random(f"{seed} {part} {file}").random()
    return sorted(items, key=lambda item: places.get(item, (-1, 0.0)))


def some(*plain: Any, of: Iterable[Any]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: `plain` always, the others in `of` with --all.

    A tuple is one set of parameters.
    """
    everything = list(of)
    assert all(value in everything for value in plain), (plain, everything)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in plain else exhaustive,
        )
        for value in everything
    ]


def in_turns(values: Iterable[Any], others: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Pairs each value with one of the others in turn, for axes that do not interact."""
    return list(zip(values, itertools.cycle(others), strict=False))


def pairs(*axes: Iterable[Any], also: Iterable[tuple[Any, ...]] = ()) -> list[tuple[Any, ...]]:
    """Few combinations of the axes' values, in which any two values of different axes meet.

    Faults that need one or two values show in these; the whole product repeats each pair. The
    combinations in `also` are always among them.
    """
    left = list(itertools.product(*map(list, axes)))
    chosen = [tuple(combination) for combination in also]
    assert all(combination in left for combination in chosen), (chosen, axes)

    def meetings(combination: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(combination), 2))

    unmet = set().union(*map(meetings, left)).difference(*map(meetings, chosen))
    while unmet:
        left = [combination for combination in left if meetings(combination) & unmet]
        chosen.append(max(left, key=lambda combination: len(meetings(combination) & unmet)))
        unmet -= meetings(chosen[-1])
    return chosen
