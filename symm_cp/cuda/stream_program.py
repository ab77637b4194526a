"""Runs programs on streams.

The commands of all lanes are issued in the order that the pattern gives (`Variant.issue_order`),
which `check_issue_order` has proven to make progress even when all streams share one hardware
queue. Nothing here waits for the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from symm_cp.cuda import plans
from symm_cp.cuda.base import DeviceWorkspace, events_needed
from symm_cp.cuda.workspaces import give_up_on
from symm_cp.native import wire
from symm_cp.runtime import recorder
from symm_cp.runtime.lowering import (
    END,
    LANES,
    Batch,
    Binding,
    Kernel,
    KernelCall,
    Program,
    StreamLowering,
    batch,
)
from symm_cp.schedule.patterns import Variant
from symm_cp.schedule.steps import Compute, Step

#: The streams of the lanes.
_Lanes = ctypes.c_void_p * len(LANES)


@dataclass(frozen=True)
class Launch:
    """A program, made once for the sizes of its buffers."""

    program: Program

    def run(
        self,
        workspace: DeviceWorkspace,
        epoch: int,
        operands: Sequence[int],
        kernels: Mapping[str, Kernel],
        *,
        capturing: bool,
        call_name: bytes,
    ) -> None:
        """Issues the program. Raises `RuntimeError` when a call of the driver fails."""
        device = workspace.device
        streams = device.streams(workspace.user)
        lanes = _Lanes(*streams)
        addresses = (ctypes.c_void_p * max(1, len(operands)))(*operands)
        call = addresses, lanes, epoch, capturing, call_name
        recording = None if capturing else recorder.active
        plan = plans.current()
        if plan is not None and (reason := self._not_planned(workspace, capturing)):
            plan.refuse(reason)
            plan = None
        try:
            if capturing and workspace.moved_to(streams[0]):
                workspace.issue(_FOLLOW, *call)
            if plan is not None:
                plan.launch(workspace, epoch, lanes, addresses, call_name)
            for item in self.program.items:
                if isinstance(item, KernelCall):
                    kernel = kernels[item.name]
                    if plan is not None:
                        kernel = plan.numbered(kernel, LANES.index(item.lane))
                    _call(item, workspace, kernel, recording, epoch, call_name)
                elif recording is None:
                    workspace.issue(item, *call)
                    if plan is not None:
                        plan.commands(item)
                else:
                    for step, lane, part in _apart(item, workspace.rank):
                        user = workspace.user
                        with recording.on_lane(step, device, lane, user, epoch, call_name):
                            workspace.issue(part, *call)
            if plan is not None:
                plan.end_launch()
        except BaseException as error:
            give_up_on(workspace, error)
            raise

    def _not_planned(self, workspace: DeviceWorkspace, capturing: bool) -> str:
        """Why a launch cannot be part of a plan (plans.py); empty if it can."""
        if capturing or recorder.active is not None:
            return "it is captured, or traced"
        if type(workspace).issue is not DeviceWorkspace.issue:
            return "its commands are not those of the driver"
        return ""


def _call(
    item: KernelCall,
    workspace: DeviceWorkspace,
    function: Kernel,
    recording: recorder.Recording | None,
    epoch: int,
    call_name: bytes,
) -> None:
    device, user = workspace.device, workspace.user
    kernel = partial(function, item.index)
    if recording is None:
        device.launch(item.lane, user, kernel)
        return
    step = Compute(item.name, item.index, (), ())
    with recording.on_lane(step, device, item.lane, user, epoch, call_name):
        device.launch(item.lane, user, kernel)


def _apart(commands: Batch, rank: int) -> Iterator[tuple[Step | None, str, Batch]]:
    """The parts of a batch, each with its step (None: no step of a schedule) and its lane.

    Copies of a lane that follow each other stay together, as the driver gets them.
    """
    for (copies, lane), run in groupby(commands, lambda c: (c.kind == wire.Kind.COPY, c.lane)):
        found = list(run)
        for part in [found] if copies else [[command] for command in found]:
            yield recorder.step_of(part[0], rank), LANES[lane], batch(part)


# Calls follow one another, even when the caller has changed streams. Outside of captures this is
# part of each launch, as handles do not tell streams apart: a new stream may have an old handle.
# While a graph is captured, no event may be awaited that was not recorded in the same capture.
_FOLLOW = batch([wire.Command(kind=wire.Kind.WAIT_EVENT, lane=0, event=END)])


def lower(
    variant: Variant,
    rank: int,
    world_size: int,
    binding: Binding,
    *,
    slots: int = 2,
) -> Launch:
    """Lowers a registered variant.

    In channel "sync" the caller's stream waits for the end of all lanes, otherwise only for its own
    steps. With one slot the calls are captured into graphs.
    """
    order, captured = variant.issue_order(rank, world_size, slots), slots == 1
    joined = variant.channel == "sync"
    lowering = StreamLowering(order, rank, binding, joined=joined, captured=captured)
    program = lowering.lowered()
    assert lowering.event_count <= events_needed(world_size, captured)
    return Launch(program)
