"""The commands that a schedule becomes, where no result shows them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from symm_cp.cuda import workspace
from symm_cp.group import memory
from symm_cp.native import wire
from symm_cp.runtime.lowering import LANES, Binding, KernelCall, StreamLowering
from symm_cp.schedule import Copy, Region, Step
from symm_cp.tensors.shards import Extent
from symm_cp.testing import Ranks
from tests.cuda.simulated import simulation


def test_each_lane_has_a_word_to_signal_with() -> None:
    """The word that holds 1 follows the lanes' words, so native code counts the lanes by it."""
    assert len(LANES) == wire.CONSTANT_ONE


@pytest.mark.parametrize("depends", [True, False])
def test_copies_that_depend_on_each_other_are_not_batched(depends: bool) -> None:
    """The driver copies a batch in any order."""
    buffers = {
        "input": (Extent.even(0, 64),),
        "gathered": (Extent.even(1, 64, 2),),
        "output": (Extent.even(2, 64, 2),),
    }
    first = Copy(Region(0, "input"), Region(0, "gathered", 0))
    second = Copy(Region(0, "gathered", 0 if depends else 1), Region(0, "output", 0))
    order: Sequence[tuple[str, Step]] = [("copy", first), ("copy", second)]
    program = StreamLowering(tuple(order), 0, Binding(buffers), joined=True).lowered()
    commands = [c for item in program.items if not isinstance(item, KernelCall) for c in item]
    alone = [bool(c.alone) for c in commands if c.kind == wire.Kind.COPY]
    assert alone == [False, depends]


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
