"""Thousands of calls, most of them invalid: each raises a precise error or returns a right result.

A good call follows each of them, to show that a refused call leaves nothing behind.
"""

from __future__ import annotations

import re
from math import nan
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings

from symm_cp.testing import Ranks
from tests.exhaustive import some
from tests.faults.bad_input import KINDS, cases, group_argument
from tests.faults.calls_as_data import Case, wide
from tests.ops.test_errors import works

#: World sizes and numbers of cases; 3,200 with --all.
FEW = ((1, 100), (2, 200), (3, 150))
CASES = some(*FEW, of=[*FEW, (1, 200), (2, 1200), (3, 1000)])
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-4, torch.complex64: 1e-4}
_REFUSALS = {"ValueError", "TypeError", "NotImplementedError"}
Outcome = tuple[str, str]


def same(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> str:
    """Describes how a result differs from the expected one; empty if it does not."""
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}, not {list(expected.shape)}"
    if "meta" in (found.device.type, expected.device.type):
        return ""  # there are no elements
    tolerance = _TOLERANCE.get(dtype, 1e-9 if dtype.is_floating_point else 0.0)
    close = torch.allclose(
        wide(found), wide(expected.to(wide(found).dtype)), tolerance, tolerance, equal_nan=True
    )
    return "" if close else f"{found}, not {expected}"


def attempt(case: Case, group: dist.ProcessGroup) -> Outcome:
    """Makes a call on this rank; returns its outcome."""
    inputs = case.inputs(group.size())
    kind = KINDS[case.op]
    expected: list[torch.Tensor] | None = None
    try:
        if not case.differs and case.group == "this":
            expected = kind.expected(inputs, group.rank(), case)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        pass
    try:
        found: Any = kind.call(inputs[group.rank()], case, group_argument(case, group))
    except Exception as error:
        return type(error).__name__, str(error)
    if expected is None:
        return "wrong", "was not refused"
    found = [found] if isinstance(found, torch.Tensor) else found
    dtype = inputs[group.rank()][0].dtype
    if kind.name.endswith("attention"):
        # A weight may be rounded to zero, and zero times infinity is NaN.
        found, expected = ([x.where(x.isfinite(), nan) for x in xs] for xs in (found, expected))
    for one, other in zip(found, expected, strict=True):
        if wrong := same(one, other, dtype):
            return "wrong", wrong
    return "right", ""


def attempts(group: dist.ProcessGroup, several: list[Case]) -> list[Outcome]:
    outcomes = []
    for case in several:
        outcomes.append(attempt(case, group))
        works(group)
    return outcomes


def _told(text: str) -> bool:
    """Whether an error says that another rank refused its arguments."""
    return re.search(r"rank \d+ failed: (Value|Type|Runtime)Error on rank", text) is not None


def fault(case: Case, outcomes: list[Outcome]) -> str:
    """Describes the fault in all ranks' outcomes of a call; empty if there is none."""
    kinds, kind = {kind for kind, _ in outcomes}, KINDS[case.op]
    if "wrong" in kinds:
        return "a wrong answer"
    if kinds == {"right"}:
        return ""
    if case.differs:
        told = kinds == {"RuntimeError"} and any("ranks disagree" in text for _, text in outcomes)
        return "" if told else "ranks differ, and are not told"
    # Torch refuses groups that are not strings, where the schema requires one; its own ops on
    # symmetric memory raise what its kernels for GPUs do.
    torchs = kind.name in ("one_shot_all_reduce", "two_shot_all_reduce_", "reduce_scatter_out")
    by_torch = {"RuntimeError"} if torchs or case.group in ("none", "number") else set()
    if not {kind for kind, text in outcomes if not _told(text)} <= _REFUSALS | by_torch:
        return "not an error of its type"
    for _, text in outcomes:
        if kind.name not in text and "group" not in text:
            return "the error does not name the op"
        if not any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in kind.arguments):
            return "the error does not name the argument"
    return ""


def drawn(world_size: int, count: int) -> list[Case]:
    found: list[Case] = []

    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate])
    @given(cases(world_size))
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return found


@pytest.mark.parametrize(("world_size", "count"), CASES)
def test_each_call_is_refused_or_right(ranks: Ranks, world_size: int, count: int) -> None:
    given = drawn(world_size, count)
    assert len(given) > 0.9 * count
    of_ranks = ranks.run(world_size, attempts, given, timeout=300)
    faults = [
        f"{what}: {case}: {outcomes}"
        for case, *outcomes in zip(given, *of_ranks, strict=True)
        if (what := fault(case, outcomes))
    ]
    assert not faults, f"{len(faults)} of {len(given)}:\n" + "\n".join(faults[:20])
