"""The self-test of groups on devices, over a simulated driver: what works, and what does not."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from symm_cp import cuda
from symm_cp.commands.first_run.checks import checks
from symm_cp.cuda import Verdict, base, selftest
from symm_cp.cuda.symmetric import SymmetricWorkspace
from symm_cp.group import memory
from symm_cp.native import wire
from symm_cp.testing import Ranks
from tests.cuda.simulated import SimulatedDevice, simulation

Commands = list[wire.Command]
COPY, SIGNAL = wire.Kind.COPY, wire.Kind.SIGNAL
CPU = torch.device("cpu")
exhaustive = pytest.mark.exhaustive


@dataclass(frozen=True)
class Fault:
    """How rank 1 alters commands, and how ranks allocate workspaces."""

    alter: Callable[[Commands], Commands] | None = None
    #: Where commands are altered: "", "in graphs" or "in batches".
    only: str = ""
    allocate: Callable[[Callable[[], Any], int], Any] | None = None


NONE = Fault()


class Faulty(SimulatedDevice):
    """A device with a fault, whose verdict is the self-test's."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def workspace(self, group: memory.Group, channel: str, slot_bytes: int, **options: Any) -> Any:
        return FaultyWorkspace(group, self, channel, slot_bytes, **options)

    def verdict(self, group: memory.Group) -> Verdict:
        return selftest.verdict(group, self)


class FaultyWorkspace(SymmetricWorkspace):
    device: Faulty
    single = False

    def set_single_copies(self, *, single: bool) -> None:
        self.single = single
        super().set_single_copies(single=single)

    def allocate(self, group: memory.Group, nbytes: int) -> Any:
        fault, allocate = self.device.fault, partial(super().allocate, group, nbytes)
        return allocate() if fault.allocate is None else fault.allocate(allocate, group.rank)

    def issue(self, commands: Any, *rest: Any, **named: Any) -> None:
        fault = self.device.fault
        here = {"": True, "in graphs": self.slots == 1, "in batches": not self.single}
        if fault.alter is not None and self.rank == 1 and here[fault.only]:
            altered = fault.alter(list(commands))
            commands = (wire.Command * len(altered))(*altered)
        super().issue(commands, *rest, **named)


def loses_signals(commands: Commands) -> Commands:
    return [command for command in commands if command.kind != SIGNAL]


def shortens(commands: Commands) -> Commands:
    for command in [c for c in commands if c.kind == COPY and c.remote][-1:]:
        command.bytes -= 1
    return commands


def dies(commands: Commands) -> Commands:
    if any(command.kind == SIGNAL for command in commands):
        os._exit(3)
    return commands


def is_slow(commands: Commands) -> Commands:
    """The driver holds up the thread that calls it."""
    if any(command.kind == SIGNAL for command in commands):
        time.sleep(3)
    return commands


def cannot_map(allocate: Callable[[], Any], rank: int) -> Any:
    """Peers cannot map the memory, as on GPUs without peer access, or in MIG mode."""
    allocate()
    raise RuntimeError("CUDA driver error: invalid device ordinal")


def cannot_map_one(allocate: Callable[[], Any], rank: int) -> Any:
    return cannot_map(allocate, rank) if rank == 1 else allocate()


def is_slow_to_allocate(allocate: Callable[[], Any], rank: int) -> Any:
    if rank == 1:
        time.sleep(5)
    return allocate()


def judge(group: dist.ProcessGroup, fault: Fault, modes: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the features that the verdict allows and its reason, or an error."""
    with (
        simulation(**modes) as made,
        mock.patch.multiple(selftest, LIMIT=1.0, STEP_LIMIT=2.0),
        mock.patch.object(base, "TRIAL_SECONDS", 0.5),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        device = Faulty(fault)
        device.driver = made.driver
        try:
            found = selftest.SelfTest(memory.resolve(group), device).run()
        except RuntimeError as error:
            return str(error), ""
    said = [str(warning.message) for warning in caught]
    if group.rank() == 0 and found.reason:
        assert len(said) == 1, said
        assert found.reason in said[0]
    else:
        assert said == []
    return (found.passed, found.batches, found.graphs), found.reason


ALL = (True, True, True)
SINGLE = (True, False, True)
NO_GRAPHS = (True, True, False)
NOTHING = (False, False, False)
UNORDERED = "waits that do not acquire"
TO_OTHERS = "so ranks exchange data through the process group"
#: Cases of plain runs.
PLAIN = ("all", "one queue", "lost signals", "short batches", UNORDERED, "memory of one")


def case(name: str, expected: Any, reason: str, fault: Fault = NONE, **modes: Any) -> Any:
    marks = () if name in PLAIN else exhaustive
    return pytest.param(fault, modes, expected, reason, id=name.replace(" ", "-"), marks=marks)


@pytest.mark.parametrize(
    ("fault", "modes", "expected", "reason"),
    [
        case("all", ALL, ""),
        case("contexts", ALL, "", contexts=True),
        case("lazy loading", ALL, "", lazy_loading=True),
        case("one queue", ALL, "", one_queue=True),
        case("CUDA 12.8", ALL, "", driver_version=12080),
        case("CUDA 12.4", NOTHING, "ranks [0, 1, 2] are too old", driver_version=12040),
        case("refused writes", NOTHING, "NOT_SUPPORTED", faults={"write": "refuse"}),
        case("lost writes", NOTHING, "the flag is 0, not 3", faults={"write": "ignore"}),
        case("refused waits", NOTHING, "NOT_SUPPORTED", faults={"wait": "refuse"}),
        case("no waits", NOTHING, "bytes from rank", faults={"wait": "ignore"}),
        case(UNORDERED, NOTHING, "bytes from rank", faults={"wait": "reorder"}),
        case("stuck waits", None, "different SYMM_CP_HOST on each rank", faults={"wait": "hang"}),
        case("lost signals", NOTHING, "signals of ranks [1] did not", Fault(loses_signals)),
        case("lost copies", NOTHING, TO_OTHERS, faults={"peer_copy": "ignore"}),
        case("refused copies", NOTHING, TO_OTHERS, faults={"peer_copy": "refuse"}),
        case("stuck copies", None, "stay stuck", faults={"peer_copy": "hang"}),
        case("short copies", NOTHING, "1 of 16384 bytes from rank", Fault(shortens)),
        case("short batches", SINGLE, "one after", Fault(shortens, "in batches")),
        case("refused batches", SINGLE, "one after", faults={"batch": "refuse"}),
        case("lost batches", SINGLE, "one after", faults={"batch": "ignore"}),
        case("lost in graphs", NO_GRAPHS, "a graph", Fault(loses_signals, "in graphs")),
        case("short in graphs", NO_GRAPHS, "a graph", Fault(shortens, "in graphs")),
        case(
            "memory",
            NOTHING,
            "memory for peers failed on rank 0: RuntimeErr",
            Fault(allocate=cannot_map),
        ),
        case(
            "memory of one", NOTHING, "failed on rank 1: RuntimeErr", Fault(allocate=cannot_map_one)
        ),
        case("slow memory", None, "the driver did not return", Fault(allocate=is_slow_to_allocate)),
        case("slow driver", None, "the driver did not return", Fault(is_slow)),
    ],
)
def test_what_does_not_work_is_replaced(
    ranks: Ranks, fault: Fault, modes: dict[str, Any], expected: Any, reason: str
) -> None:
    """All ranks come to the same verdict, or raise the same error."""
    results = ranks.run(3, judge, fault, modes)
    assert len(set(results)) == 1
    allowed, why = results[0]
    if expected is None:
        assert reason in allowed
    else:
        assert allowed == expected, why
        assert reason in why
        assert bool(reason) == bool(why)


@exhaustive
def test_a_rank_that_dies_in_the_self_test_is_named(ranks: Ranks) -> None:
    with ranks.own(3, judge, Fault(dies), {}) as running:
        first, _, last = running.outcomes(timeout=60)
    for survivor in (first, last):
        assert survivor.result is not None, survivor
        assert "rank 1 of group" in survivor.result[0]


@pytest.mark.ranks(1)
def test_the_self_test_is_not_captured(group: dist.ProcessGroup) -> None:
    with (
        simulation(graph=True) as device,
        pytest.raises(RuntimeError, match=r"symm_cp\.reserve\(group, nbytes, device='cpu'\)"),
    ):
        selftest.verdict(memory.resolve(group), device)


def in_training(group: dist.ProcessGroup, fault: Fault) -> tuple[Any, list[str]]:
    """Whether the self-test passed, and the errors of wrong results afterwards."""
    with (
        simulation(),
        mock.patch.multiple(selftest, LIMIT=1.0, STEP_LIMIT=2.0),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        with cuda.replaced(CPU, Faulty(fault)):
            wrong = [
                f"{check.name}: {check.wrong(check.run())}"
                for check in checks(group, CPU)
                for _ in range(2)
            ]
        found = memory.resolve(group).state(selftest._VERDICTS, dict).get(CPU)
    return (found.passed if found else None), [w for w in wrong if not w.endswith(": ")]


@pytest.mark.parametrize(
    ("fault", "passed"),
    [
        pytest.param(Fault(loses_signals), False, marks=exhaustive),
        pytest.param(Fault(shortens, "in batches"), True, marks=exhaustive),
        pytest.param(Fault(shortens, "in graphs"), True, marks=exhaustive),
        pytest.param(Fault(shortens), False),
    ],
)
def test_what_is_broken_reaches_no_training_step(ranks: Ranks, fault: Fault, passed: bool) -> None:
    """The device stays broken after the self-test; ops avoid its broken features."""
    with ranks.own(2, in_training, fault) as running:
        outcomes = running.outcomes(timeout=60)
    assert [outcome.result for outcome in outcomes] == [(passed, [])] * 2, outcomes


def streams_opened(group: dist.ProcessGroup) -> list[int]:
    """How many streams are open after the self-tests of two groups of the same ranks."""
    counts, opened = [], []

    class Counts(SimulatedDevice):
        def _open_stream(self) -> int:
            opened.append(super()._open_stream())
            return opened[-1]

    # New groups, so that other tests find no verdict on the pool's group.
    groups = [dist.new_group(list(range(group.size()))) for _ in range(2)]
    with simulation():
        device = Counts()
        for tested in groups:
            assert selftest.verdict(memory.resolve(tested), device).passed
            counts.append(len(opened))
    return counts


def test_streams_of_self_tests_stay_open_for_the_next(ranks: Ranks) -> None:
    """When pinned memory is freed later, torch looks at the streams that used it."""
    for first, both in ranks.run(2, streams_opened):
        assert first == both > 0
