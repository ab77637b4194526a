"""What a schedule becomes: the commands, in the order in which the host hands them out."""

from __future__ import annotations

import ctypes

import pytest

from symm_cp import wire
from symm_cp.runtime.launch import Launch, lower
from symm_cp.runtime.program import Extent
from symm_cp.schedule import Compute, Copy, Region, Schedule, Signal, Wait, staged

KINDS = ["copy", "signal", "wait", "record", "wait event", "arrived"]
SLOTS = {rank: (Extent.even(None, 64),) for rank in range(2)}
BINDING = {
    "input": (Extent.even(0, 64),),
    "gathered": (Extent.even(1, 64, 2),),
    "output": (Extent.even(2, 64, 2),),
}


def words(launch: Launch) -> list[str]:
    found = []
    for item in launch.items:
        if not isinstance(item, ctypes.Array):
            found.append(f"{item.lane}: call {item.name}({item.index})")
            continue
        for command in item:
            assert isinstance(command, wire.StreamCommand)
            kind, lane = KINDS[command.kind], ["compute", "copy"][command.lane]
            event = f" {command.event}" if "event" in kind or kind == "record" else ""
            found.append(f"{lane}: {kind}{event}" + (" alone" if command.alone else ""))
    return found


def test_gather_and_consume() -> None:
    assert words(lower(staged.gather_and_consume(0, 2), BINDING, SLOTS)) == [
        # The copy lane starts where the caller's stream is.
        "compute: record 0",
        "copy: wait event 0",
        # All that peers and copy engines can go on with comes before the first kernel.
        "copy: copy",
        "copy: signal",
        "copy: wait",
        "copy: copy",
        "copy: record 3",
        "compute: call consume(0)",
        "compute: wait event 3",
        "compute: call consume(1)",
        # The caller's stream waits for the end of the copies, whatever it needed of them.
        "copy: record 1",
        "compute: wait event 1",
        "compute: record 2",
    ]


def test_in_the_background_the_caller_waits_for_its_input_alone() -> None:
    schedule = staged.background_gather(0, 2)
    assert words(lower(schedule, BINDING, SLOTS, joined=False)) == [
        "compute: record 0",
        "copy: wait event 0",
        "copy: copy",
        "copy: copy",
        "copy: record 1",
        "compute: wait event 1",
        "copy: signal",
        "copy: wait",
        "copy: copy",
    ]


def test_one_kernel_that_polls() -> None:
    assert words(lower(staged.gather_and_consume(0, 2), BINDING, SLOTS, polled=True)) == [
        "compute: record 0",
        "copy: wait event 0",
        "copy: copy",
        "copy: signal",
        "copy: wait",
        "copy: copy",
        "copy: arrived",
        "compute: call consume(0)",
        "copy: record 1",
        "compute: wait event 1",
        "compute: record 2",
    ]


def test_signals_by_kernels() -> None:
    launch = lower(staged.gather_and_consume(0, 2), BINDING, SLOTS, by_kernels=True)
    calls = [line for line in words(launch) if "call" in line]
    assert calls == [
        "copy: call ready(1)",
        "copy: call ready(1)",
        "compute: call consume(0)",
        "compute: call consume(1)",
    ]


@pytest.mark.parametrize("depends", [True, False])
def test_copies_that_depend_on_each_other_are_not_batched(depends: bool) -> None:
    """The driver copies a batch in any order."""
    first = Copy(Region(0, "input"), Region(0, "gathered", 0))
    second = Copy(Region(0, "gathered", 0 if depends else 1), Region(0, "output", 0))
    schedule = Schedule("by hand", 0, 1, {"copy": (first, second)}, 2)
    copies = [line for line in words(lower(schedule, BINDING, SLOTS)) if ": copy" in line]
    assert copies == ["copy: copy", "copy: copy alone" if depends else "copy: copy"]


def test_lanes_that_wait_for_each_other_are_a_mistake_of_the_schedule() -> None:
    compute = (Wait(0, "pulled0"), Compute("consume", 0, (), ()), Signal(0, "consumed0"))
    copy = (Wait(0, "consumed0"), Signal(0, "pulled0"))
    schedule = Schedule("by hand", 0, 1, {"compute": compute, "copy": copy}, 2)
    with pytest.raises(AssertionError, match="by hand: lanes wait for each other"):
        lower(schedule, BINDING, SLOTS)
