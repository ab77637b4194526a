"""Random programs over one to four groups, each with a thread and streams of its own.

Each rank makes the calls of a group in one order, and those of different groups in any order: its
threads pause at random. Background transfers are begun on one stream, and awaited on another one
later, as FSDP's are. Matrices hold small integers, so all results are exact.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import symm_cp
from symm_cp import cuda
from symm_cp.group import memory
from tests.cuda.simulated import SimulatedDevice, random_mode, simulation

OPS = ("gather", "scatter", "all-reduce", "keys", "background gather", "background scatter")


@dataclass(frozen=True)
class Program:
    """What ranks do, drawn by a seed: the machine, and by group its ranks and its calls."""

    mode: dict[str, Any]
    groups: tuple[tuple[int, ...], ...]
    calls: tuple[tuple[str, ...], ...]

    #: Whether workspaces are made beforehand, or by the calls, which replace them by larger ones.
    reserves: ClassVar[bool] = True

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
        calls = [tuple(choose.choices(OPS, k=choose.randint(6, 20))) for _ in groups]
        return cls(mode, tuple(groups), tuple(calls))

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


class Growing(Program):
    """A program whose calls make the workspaces, and replace them by larger ones."""

    reserves = False


def _integers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape, generator=generator).float()


class _Caller:
    """The calls of a group on this rank, in a thread of its own."""

    def __init__(self, device: SimulatedDevice, group: dist.ProcessGroup, seed: int) -> None:
        self.device, self.group = device, group
        self.values = torch.Generator().manual_seed(seed)  # the same on all ranks
        self.choose = random.Random(seed + 1 + dist.get_rank())
        self.streams = [device.machine.stream(0) for _ in range(3)]
        self.pending: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def run(self, calls: tuple[str, ...]) -> int:
        for name in calls:
            if self.choose.random() < 0.3:
                time.sleep(self.choose.random() / 100)
            with self.device.stream(self.streams["background" in name]):
                self.pending.append((name, *self.call(name)))
            while len(self.pending) > self.choose.randrange(5):
                self.check()
        while self.pending:
            self.check()
        return len(calls)

    def call(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes a call; returns the result, which may be pending, and the expected one."""
        rank, W, group = self.group.rank(), self.group.size(), self.group
        height = (1, 3, 40)[int(torch.randint(3, (1,), generator=self.values))]
        rows = _integers(self.values, W, height, 8)
        full, weight = _integers(self.values, W, height * W, 8), _integers(self.values, 8, 5)
        ops = torch.ops.symm_mem
        if name == "gather":
            out = symm_cp.all_gather_matmul(rows[rank], weight, gather_dim=0, group=group)
            return out, rows.flatten(0, 1) @ weight
        if name == "scatter":
            out = symm_cp.matmul_reduce_scatter(full[rank], weight, scatter_dim=0, group=group)
            return out, (full.sum(0) @ weight).chunk(W)[rank]
        if name == "all-reduce":
            out = symm_cp.matmul_all_reduce(full[rank], weight, group=group)
            return out, full.sum(0) @ weight
        if name == "keys":
            both = symm_cp.all_gather_kv(rows[rank], -rows[rank], seq_dim=0, group=group)
            return torch.cat(both), torch.cat([rows, -rows]).flatten(0, 1)
        given = (rows if name == "background gather" else full)[rank].clone()
        if name == "background gather":
            out = ops._low_contention_all_gather(given, group.group_name)
            expected = rows.flatten(0, 1)
        else:
            out = ops._low_contention_reduce_scatter(given, "sum", group.group_name)
            expected = full.sum(0).chunk(W)[rank]
        given.fill_(torch.nan)  # the input may be overwritten at once
        return out, expected

    def check(self) -> None:
        """Waits for one of the pending results, on another stream, and compares it by all bits."""
        name, out, expected = self.pending.pop(self.choose.randrange(len(self.pending)))
        with self.device.stream(self.streams[2]):
            found = torch.ops._c10d_functional.wait_tensor(out)
            assert torch.equal(found, expected), f"{name}: {found}, not {expected}"
