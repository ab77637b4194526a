"""Kernels do not wait for signals to peers, which copy engines may keep behind a large pull.

On a machine with one copy engine a pull is held while a kernel runs. The next kernel, which does
not depend on that pull, must begin meanwhile, although a signal follows the first of them.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from symm_cp.cuda import workspace
from symm_cp.cuda.stream_program import Launch
from symm_cp.group import memory
from symm_cp.runtime.lowering import Binding, StreamLowering
from symm_cp.schedule import Compute, Signal, Variant, patterns
from symm_cp.schedule.patterns import IssueOrder
from symm_cp.tensors.shards import Extent
from symm_cp.testing import Ranks
from tests.cuda.machine import until
from tests.cuda.simulated import simulation

CHUNK = 256  # bytes


class Case(NamedTuple):
    """Pull `pull` (counted from 1) is held while the caller's kernel `kernel` (from 0) runs.

    Peers let that pull begin before their kernel of that number, and the kernel after it does not
    depend on the pull.
    """

    variant: Variant
    world_size: int
    pull: int
    kernel: int

    def __str__(self) -> str:
        return str(self.variant)


CASES = [
    Case(
        patterns.PRODUCE_AND_REDUCE_SCATTER.staged(), 3, pull=1, kernel=1
    ),  # of matmul-reduce-scatter
    Case(patterns.PRODUCE_AND_ALL_REDUCE.staged(), 3, pull=1, kernel=1),
    Case(patterns.EXCHANGE_AND_CONSUME.staged(), 3, pull=1, kernel=1),
    # Attention's backward pass: the shards of three peers are pulled one after the other.
    Case(patterns.CONSUME_AND_REDUCE_SCATTER.staged(), 4, pull=3, kernel=1),
    # Two shards, a partial sum, and the third shard, once the first has been consumed.
    Case(patterns.CONSUME_AND_REDUCE_SCATTER.staged(ring=True), 4, pull=4, kernel=2),
]


def in_the_callers_lane(order: IssueOrder) -> IssueOrder:
    """Returns the order with all signals in the caller's lane, behind their kernels."""
    return tuple(
        ("compute" if lane == "signal" else lane, step)
        for lane, step in order
        if lane != "signal" or isinstance(step, Signal)
    )


def binding(world_size: int) -> Binding:
    """Returns a binding of the operands input, gathered, partials and output, in this order."""
    chunks = {"input": 1, "gathered": world_size, "partials": world_size, "output": world_size}
    buffers = {
        name: (Extent.even(at, CHUNK, count),) for at, (name, count) in enumerate(chunks.items())
    }
    return Binding(buffers | {"slot": (Extent.even(None, CHUNK, world_size + 1),)})


def next_kernel(group: dist.ProcessGroup, case: Case, beside: bool) -> str:
    """Returns whether the kernel after `case.kernel` begins or waits while the pull is held."""
    rank, world_size = group.rank(), group.size()
    order = case.variant.issue_order(rank, world_size)
    if not beside:
        order = in_the_callers_lane(order)
    lowering = StreamLowering(order, rank, binding(world_size), joined=True)
    launch = Launch(lowering.lowered())
    operands = torch.zeros(4, world_size * CHUNK, dtype=torch.uint8)
    begun, over, numbers = threading.Event(), threading.Event(), itertools.count()
    with simulation(copy_engines=1, deferred=True) as made:
        library = made.machine.library
        space = workspace(memory.resolve(group), made, "sync", (world_size + 1) * CHUNK)
        time.sleep(0.3)  # until the driver reads the memory map again
        dist.barrier(group)

        def kernel(_: int) -> None:
            number = next(numbers)
            while number == case.kernel and not library.simulated_holds() and not over.is_set():
                time.sleep(1e-4)
            if number == case.kernel + 1:
                begun.set()

        def is_held_up() -> bool:
            stream = ctypes.c_void_p(made.current_stream())
            return bool(library.simulated_holds() and library.simulated_queues_for_engine(stream))

        kernels = {step.kernel: kernel for _, step in order if isinstance(step, Compute)}
        addresses = [row.data_ptr() for row in operands]
        library.simulated_hold(case.pull)
        try:
            launch.run(
                space, space.next_epoch(), addresses, kernels, capturing=False, call_name=b"test"
            )
            # The pull goes on only below, so the outcome does not depend on timing.
            until(lambda: is_held_up() or begun.is_set())
            held_up = not begun.is_set()
        finally:
            over.set()
            library.simulated_hold(0)
        made.synchronize()
    return "waits for the engine" if held_up else "begins"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kernel_begins_while_a_pull_is_under_way(ranks: Ranks, case: Case) -> None:
    assert ranks.run(case.world_size, next_kernel, case, True) == ["begins"] * case.world_size


@pytest.mark.parametrize("case", CASES, ids=str)
def test_with_signals_in_its_lane_it_would_wait(ranks: Ranks, case: Case) -> None:
    """So the test above depends on the lane of the signals."""
    expected = ["waits for the engine"] * case.world_size
    assert ranks.run(case.world_size, next_kernel, case, False) == expected
