"""Random programs over one to four groups, each with a thread and streams of its own.

Each rank makes the calls of a group in one order, and those of different groups in any order: its
threads pause at random. Background transfers are begun on one stream, and awaited on another one
later, as FSDP's are.
"""

from __future__ import annotations

import random
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from symm_cp import cuda, native
from symm_cp.group import memory
from tests.cuda.op_cases import BACKGROUND, CAPTURED, Case, cases, check, refill, zeros
from tests.cuda.simulated import SimulatedDevice, random_mode, simulation


@dataclass(frozen=True)
class Program:
    """What ranks do, drawn by a seed: the machine, and by group its ranks and its calls."""

    mode: dict[str, Any]
    groups: tuple[tuple[int, ...], ...]
    calls: tuple[tuple[str, ...], ...]
    #: Whether workspaces are made beforehand, or by the calls, which replace them by larger ones.
    reserves: bool

    @classmethod
    def drawn(cls, seed: int, world_size: int) -> Program:
        choose = random.Random(seed)
        mode, ranks = random_mode(choose), list(range(world_size))
        groups = [
            tuple(sorted(choose.sample(ranks, choose.randint(2, world_size))))
            for _ in range(choose.randint(1, 4))
        ]
        if len(groups) > 1:
            # Where streams wait for each other, ranks must call all groups in one order.
            mode |= {"one_queue": False, "lazy_loading": False}
        ops = CAPTURED + BACKGROUND
        calls = [tuple(choose.choices(ops, k=choose.randint(6, 20))) for _ in groups]
        return cls(mode, tuple(groups), tuple(calls), choose.random() < 0.5)

    def run(self, seed: int) -> int:
        """Runs the program on this rank; returns how many calls it has made."""
        groups = [dist.new_group(list(ranks)) for ranks in self.groups]
        with simulation(**self.mode) as device:
            callers = [
                (_Caller(device, group, seed + number), calls)
                for number, (group, calls) in enumerate(zip(groups, self.calls, strict=True))
                if isinstance(group, dist.ProcessGroup)
            ]
            for caller, _ in callers if self.reserves else ():
                cuda.reserve_on(memory.resolve(caller.group), device, 1 << 16)
            with ThreadPoolExecutor(max(1, len(callers))) as threads:
                running = [threads.submit(caller.run, calls) for caller, calls in callers]
            made = sum(each.result() for each in running)
        for group in groups:
            if isinstance(group, dist.ProcessGroup):
                dist.destroy_process_group(group)
        return made


class _Caller:
    """The calls of a group on this rank, in a thread of its own."""

    def __init__(self, device: SimulatedDevice, group: dist.ProcessGroup, seed: int) -> None:
        self.device, self.group = device, group
        self.values = torch.Generator().manual_seed(seed)  # the same on all ranks
        self.choose = random.Random(seed + 1 + dist.get_rank())
        self.streams = [device.machine.stream(0) for _ in range(3)]
        self.pending: list[tuple[str, Case, torch.Tensor]] = []

    def run(self, calls: tuple[str, ...]) -> int:
        try:
            return self.make(calls)
        except BaseException:
            traceback.print_exc()  # the other callers of this rank may wait for ever
            raise

    def make(self, calls: tuple[str, ...]) -> int:
        """Makes the calls, and checks their results; returns the number of calls."""
        for name in calls:
            if self.choose.random() < 0.3:
                time.sleep(self.choose.random() / 100)
            if (
                self.choose.random() < 0.1
            ):  # as another group's new workspace does, on this rank alone
                native.drop_plans()
            with self.device.stream(self.streams["background" in name]):
                self.pending.append((name, *self.call(name)))
            while len(self.pending) > self.choose.randrange(5):
                self.check()
        while self.pending:
            self.check()
        return len(calls)

    def call(self, name: str) -> tuple[Case, torch.Tensor]:
        """Makes a call; returns its case, and the result, which may be pending."""
        height = (1, 3, 40)[int(torch.randint(3, (1,), generator=self.values))]
        case = cases(self.group, refill(zeros(self.group.size(), height), self.values))[name]
        return case, case[0]()

    def check(self) -> None:
        """Waits for one of the pending results, on another stream, and compares it."""
        name, case, out = self.pending.pop(self.choose.randrange(len(self.pending)))
        with self.device.stream(self.streams[2]):
            check(name, case, out)
