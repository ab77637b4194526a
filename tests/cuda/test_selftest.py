"""The self-test of groups on devices, over a simulated driver: what works, and what does not."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from symm_cp import memory, wire
from symm_cp.devices import Signals, selftest
from symm_cp.devices.symmetric import SymmetricWorkspace
from tests.cuda.simulated import SimulatedDevice, simulation
from tests.pool import Ranks

Commands = list[wire.StreamCommand]
COPY, SIGNAL, WAIT = wire.StreamKind.COPY, wire.StreamKind.SIGNAL, wire.StreamKind.WAIT


class Faulty(SimulatedDevice):
    """A device whose driver does something else with some commands."""

    def __init__(self, *, rank: int | None = None) -> None:
        super().__init__()
        self.rank = rank  # the only one with a fault; None: all

    def fault(self, commands: Commands, space: FaultyWorkspace, capturing: bool) -> Commands:
        return commands

    def workspace(self, group: memory.Group, channel: str, slot_bytes: int, **options: Any) -> Any:
        return FaultyWorkspace(group, self, channel, slot_bytes, **options)


class FaultyWorkspace(SymmetricWorkspace):
    device: Faulty
    single = False

    def set_single_copies(self, *, single: bool) -> None:
        self.single = single
        super().set_single_copies(single=single)

    def issue(self, commands: Any, *rest: Any, capturing: bool, call_name: bytes) -> None:
        if self.device.rank in (None, self.rank):
            kept = self.device.fault(list(commands), self, capturing)
            commands = (wire.StreamCommand * len(kept))(*kept)
        super().issue(commands, *rest, capturing=capturing, call_name=call_name)


class LosesSignals(Faulty):
    def fault(self, commands: Commands, space: FaultyWorkspace, capturing: bool) -> Commands:
        return [command for command in commands if command.kind != SIGNAL]


class RefusesWaits(Faulty):
    def fault(self, commands: Commands, space: FaultyWorkspace, capturing: bool) -> Commands:
        if any(command.kind == WAIT for command in commands):
            raise RuntimeError("symm_cp: cuStreamBatchMemOp: CUDA_ERROR_NOT_SUPPORTED")
        return commands


class ForgetsWaits(Faulty):
    """Waits that end at once, where a signal takes its time."""

    def fault(self, commands: Commands, space: FaultyWorkspace, capturing: bool) -> Commands:
        if any(command.kind == SIGNAL for command in commands):
            self.call(space.lanes[1], lambda: time.sleep(0.01))
        return [command for command in commands if command.kind != WAIT]


class LosesWrites(Faulty):
    def fault(self, commands: Commands, space: FaultyWorkspace, capturing: bool) -> Commands:
        return [command for command in commands if command.kind != wire.StreamKind.ARRIVED]


def shortened(commands: Commands) -> Commands:
    copies = [command for command in commands if command.kind == COPY and command.remote]
    for command in copies[-1:]:
        command.bytes -= 1
    return commands


class ShortensBatches(Faulty):
    def fault(self, commands: Commands, space: FaultyWorkspace, capturing: bool) -> Commands:
        return commands if space.single else shortened(commands)


class ShortensCopies(Faulty):
    def fault(self, commands: Commands, space: FaultyWorkspace, capturing: bool) -> Commands:
        return shortened(commands)


class ShortensCopiesInGraphs(Faulty):
    def fault(self, commands: Commands, space: FaultyWorkspace, capturing: bool) -> Commands:
        return shortened(commands) if capturing else commands


class LosesSignalsInGraphs(Faulty):
    def fault(self, commands: Commands, space: FaultyWorkspace, capturing: bool) -> Commands:
        return [c for c in commands if not (capturing and c.kind == SIGNAL)]


def judge(
    group: dist.ProcessGroup, device: Callable[..., SimulatedDevice], rank: int | None
) -> Any:
    """The verdict, and the warnings."""
    with simulation(), mock.patch.object(selftest, "LIMIT", 0.3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options = {} if device is SimulatedDevice else {"rank": rank}
            found = selftest.SelfTest(memory.resolve(group), device(**options)).run()
        return found, [str(warning.message) for warning in caught]


ALL = (Signals.STREAM, True, True)
FALLS_BACK = (Signals.TORCH, True, True)
CASES = [
    (SimulatedDevice, ALL, ""),
    (LosesSignals, FALLS_BACK, r"signals by stream operations failed on rank \d: signals of ranks"),
    (RefusesWaits, FALLS_BACK, "signals by stream operations failed on rank 1: .*NOT_SUPPORTED"),
]


@pytest.mark.parametrize(("device", "expected", "reason"), CASES)
def test_what_does_not_work_is_replaced(
    ranks: Ranks, device: Any, expected: tuple[Signals, bool, bool], reason: str
) -> None:
    results = ranks.run(3, judge, device, 1)
    verdicts = [verdict for verdict, _ in results]
    print(verdicts)
    assert [(v.signals, v.batches, v.graphs) for v in verdicts] == [expected] * 3
