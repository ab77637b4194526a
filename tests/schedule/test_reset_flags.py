"""Flags that the waiter resets, in graphs, which have no epochs: no signal may be lost.

A signal just writes 1, which would be lost if the last one was not reset yet.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from symm_cp.schedule import (
    CheckReport,
    Compute,
    Race,
    Region,
    Schedule,
    Signal,
    Step,
    Wait,
    check,
    patterns,
)
from tests.exhaustive import some
from tests.schedule.calls import MIX, WORKSPACES, Workspace

ONE_SLOT = [space for space in WORKSPACES if space.form == "staged" and space.slots == 1]


class _Shared:
    """The buffers that other ranks may access: also the flags, as `visible` makes them."""

    def __contains__(self, buffer: str) -> bool:
        return buffer.startswith("flag") or buffer in ("slot", "symmetric")


def visible(schedule: Schedule) -> Schedule:
    """Adds to each signal and each reset the write to the flag's memory that it is."""

    def write(owner: int, writer: int, flag: str) -> Compute:
        return Compute("write", 0, (), (Region(owner, f"flag {flag} {writer}"),))

    def steps(step: Step) -> tuple[Step, ...]:
        rank = schedule.rank
        if isinstance(step, Signal) and step.to != rank:
            return write(step.to, rank, step.flag), step
        if isinstance(step, Wait) and step.source != rank:
            return step, write(rank, step.source, step.flag)
        return (step,)

    lanes = {
        name: tuple(part for step in lane for part in steps(step))
        for name, lane in schedule.lanes.items()
    }
    return replace(schedule, lanes=lanes)


@pytest.mark.parametrize("world_size", some(2, 3, of=[2, 3, 4]))
@pytest.mark.parametrize("workspace", ONE_SLOT, ids=str)
def test_no_signal_of_a_graph_is_lost(
    workspace: Workspace, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every timing, a flag is raised again only after the peer has reset it."""
    monkeypatch.setattr(sys.modules[CheckReport.__module__], "SHARED_BUFFERS", _Shared())
    calls = [[visible(s) for s in v.schedules(world_size, 1)] for v in workspace.variants]
    for one in calls:
        for other in calls:
            report = check([(one, other)[which] for which in MIX])
            assert report.ok, f"{workspace}: {report}"


def test_a_signal_that_could_be_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the waits until the slot has been read, a rank could be a call ahead."""
    monkeypatch.setattr(sys.modules[CheckReport.__module__], "SHARED_BUFFERS", _Shared())
    call = []
    for schedule in patterns.PRODUCE_AND_REDUCE_SCATTER.staged().schedules(2, 1):
        lanes = {
            name: tuple(step for step in lane if not (isinstance(step, Wait) and step.lag))
            for name, lane in schedule.lanes.items()
        }
        call.append(visible(replace(schedule, lanes=lanes)))
    problems = check([call] * 3).problems
    assert any(isinstance(p, Race) and "flag partial" in str(p) for p in problems)
