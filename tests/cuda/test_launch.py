"""The commands that a schedule becomes, in the order in which the host hands them out."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from symm_cp.cuda import workspace
from symm_cp.cuda.stream_program import Launch, lower
from symm_cp.group import memory
from symm_cp.native import wire
from symm_cp.runtime.lowering import LANES, Binding, KernelCall, StreamLowering
from symm_cp.schedule import Copy, Region, Step, patterns
from symm_cp.tensors.shards import Extent
from symm_cp.testing import Ranks
from tests.cuda.simulated import simulation

GATHER = patterns.ALL_GATHER_AND_CONSUME
BINDING = Binding(
    {
        "input": (Extent.even(0, 64),),
        "gathered": (Extent.even(1, 64, 2),),
        "output": (Extent.even(2, 64, 2),),
        "slot": (Extent.even(None, 64),),
    }
)


def described(launch: Launch) -> list[str]:
    lines = []
    for item in launch.program.items:
        if isinstance(item, KernelCall):
            lines.append(f"{item.lane}: call {item.name}({item.index})")
            continue
        for command in item:
            assert isinstance(command, wire.Command)
            kind = wire.Kind(command.kind)
            with_event = kind in (wire.Kind.RECORD, wire.Kind.WAIT_EVENT)
            event = f" {command.event}" if with_event else ""
            alone = " alone" if command.alone else ""
            lines.append(f"{LANES[command.lane]}: {kind.name.lower()}{event}{alone}")
    return lines


def test_each_lane_has_a_word_to_signal_with() -> None:
    """The word that holds 1 follows the lanes' words, so native code counts the lanes by it."""
    assert len(LANES) == wire.CONSTANT_ONE


def test_events_take_the_place_of_flags_to_oneself() -> None:
    variant = patterns.ALL_GATHER_AND_CONSUME.staged()
    lines = described(lower(variant, 0, 2, BINDING))
    # The copy lane starts behind the caller's stream, which follows the previous call, perhaps made
    # on another stream.
    assert lines[:3] == ["compute: wait_event 2", "compute: record 0", "copy: wait_event 0"]
    # A stream cannot wait for an event that was not recorded.
    assert lines.index("copy: record 3") < lines.index("compute: wait_event 3")
    assert lines.index("compute: wait_event 3") < lines.index("compute: call consume(1)")
    # The caller's stream waits for the end of the copies, whatever it needed of them.
    assert lines[-3:] == ["copy: record 1", "compute: wait_event 1", "compute: record 2"]


def test_a_capture_waits_for_no_event_from_outside_of_it() -> None:
    for pattern in (patterns.ALL_GATHER_AND_CONSUME, patterns.BACKGROUND_ALL_GATHER):
        lines = described(lower(pattern.staged(), 0, 2, BINDING, slots=1))
        awaited = [int(line.split()[2]) for line in lines if "wait_event" in line]
        for event in awaited:
            recorded = next(at for at, line in enumerate(lines) if f": record {event}" in line)
            assert recorded < next(at for at, li in enumerate(lines) if f"wait_event {event}" in li)
        assert "compute: record 2" in lines  # for the next call, on another stream


def test_in_the_background_the_caller_copies_its_input_and_goes_on() -> None:
    lines = described(lower(patterns.BACKGROUND_ALL_GATHER.staged(), 0, 2, BINDING))
    assert [line for line in lines if "compute" in line] == [
        "compute: record 0",
        "compute: copy",
        "compute: record 3",
    ]
    assert [line for line in lines if "copy:" in line][:4] == [
        "copy: wait_event 0",
        "copy: wait_event 3",
        "copy: copy",
        "copy: signal",
    ]


def test_a_kernel_that_polls_comes_after_all_copies() -> None:
    lines = described(lower(patterns.ALL_GATHER_AND_POLL.staged(), 0, 2, BINDING))
    assert lines.count("compute: call consume(0)") == 1
    assert lines.index("copy: arrived") < lines.index("compute: call consume(0)")
    assert not any("consume(1)" in line for line in lines)


def test_signals_behind_kernels_go_from_a_lane_of_their_own() -> None:
    """Each takes an event and a wait for it; one more event for all of them ends the call."""
    parts = (Extent.even(None, 64, 3),), (Extent.even(0, 64, 3),)
    binding = Binding(dict(zip(("slot", "partials"), parts, strict=True)))
    variant = patterns.PRODUCE_AND_REDUCE_SCATTER.staged()
    lines = described(lower(variant, 0, 3, binding))
    signalling = ["wait_event 3", "signal", "wait_event 4", "signal", "record 1"]
    assert [line for line in lines if "signal: " in line] == [f"signal: {s}" for s in signalling]
    kernels = ["call produce(1)", "record 3", "call produce(2)", "record 4", "call produce(0)"]
    begin = ["wait_event 2", "record 0"]
    assert [line for line in lines if "compute: " in line][:7] == [
        f"compute: {line}" for line in (*begin, *kernels)
    ]
    assert lines.index("compute: record 3") < lines.index("signal: wait_event 3")
    # The lane is unused where there is no peer, or no signal between kernels.
    for others in (lower(variant, 0, 1, binding), lower(GATHER.staged(), 0, 2, BINDING)):
        assert not any("signal: " in line for line in described(others))


@pytest.mark.parametrize("depends", [True, False])
def test_copies_that_depend_on_each_other_are_not_batched(depends: bool) -> None:
    """The driver copies a batch in any order."""
    first = Copy(Region(0, "input"), Region(0, "gathered", 0))
    second = Copy(Region(0, "gathered", 0 if depends else 1), Region(0, "output", 0))
    order: Sequence[tuple[str, Step]] = [("copy", first), ("copy", second)]
    launch = Launch(StreamLowering(tuple(order), 0, BINDING, joined=True).lowered())
    copies = [line for line in described(launch) if ": copy" in line]
    assert copies == ["copy: copy", "copy: copy alone" if depends else "copy: copy"]


def many_memory_operations(group: dist.ProcessGroup) -> int:
    """Returns how many driver calls a batch of 300 takes; checks that all were carried out."""
    flag = wire.DEVICE_FLAGS.index("arrived")
    commands = [wire.Command(kind=wire.Kind.ARRIVED, lane=0, peer=0, flag=flag) for _ in range(300)]
    with simulation() as made:
        space = workspace(memory.resolve(group), made, "sync", 64)
        lanes = (ctypes.c_void_p * len(LANES))(*made.streams("sync"))
        made.count()
        batch = (wire.Command * len(commands))(*commands)
        space.issue(batch, (ctypes.c_void_p * 1)(), lanes, 7, False, b"test")
        made.synchronize()
        counted = made.count()
        assert counted["mem_ops"] == len(commands)
        assert int(space.flags("arrived")[0]) == 7
        return counted["mem_op_calls"]


def test_a_batch_of_memory_operations_has_less_than_256(ranks: Ranks) -> None:
    assert ranks.run(1, many_memory_operations) == [2]
