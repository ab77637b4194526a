"""Random programs over several groups, each with a thread and streams of its own, at 2 to 8 ranks.

    python -m tests.cuda.group_programs --count 1000
    python -m tests.cuda.group_programs --again 5:123456  # one: ranks, seed

Each rank makes the calls of a group in one order, and those of different groups in any order: its
threads pause at random. Background transfers are begun on one stream, and awaited on another one
later, as FSDP's are. The machine is drawn as well, with plans or without. Matrices hold small
integers, so all results are exact.

With `--grow` the calls make and replace the workspaces instead of `reserve`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import symm_cp
from symm_cp import cuda
from symm_cp.group import memory
from symm_cp.ranks import positive
from symm_cp.testing import Ranks, say
from tests.cuda.simulated import SimulatedDevice, random_mode, simulation

#: Programs that one set of processes runs, and seconds for each of them.
PER_TEAM, LIMIT = 20, 120
SIZES = (2, 3, 4, 5, 6, 7, 8)
OPS = ("gather", "scatter", "all-reduce", "background gather", "background scatter")


@dataclass(frozen=True)
class Program:
    """What ranks do, drawn by a seed: the machine, and by group its ranks and its calls."""

    mode: dict[str, Any]
    groups: tuple[tuple[int, ...], ...]
    calls: tuple[tuple[str, ...], ...]

    @classmethod
    def drawn(cls, seed: int, world_size: int) -> Program:
        choose = random.Random(seed)
        # Where streams wait for each other, ranks must call all groups in one order.
        mode = random_mode(choose) | {"one_queue": False, "lazy_loading": False}
        ranks = list(range(world_size))
        groups = [
            tuple(sorted(choose.sample(ranks, choose.randint(2, world_size))))
            for _ in range(choose.randint(2, 4))
        ]
        calls = [tuple(choose.choices(OPS, k=choose.randint(6, 14))) for _ in groups]
        return cls(mode, tuple(groups), tuple(calls))


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

    def run(self, calls: tuple[str, ...]) -> None:
        for name in calls:
            if self.choose.random() < 0.3:
                time.sleep(self.choose.random() / 100)
            with self.device.stream(self.streams["background" in name]):
                self.pending.append((name, *self.call(name)))
            while len(self.pending) > self.choose.randrange(5):
                self.check()
        while self.pending:
            self.check()

    def call(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes a call; returns the result, which may be pending, and the expected one."""
        rank, W, group = self.group.rank(), self.group.size(), self.group
        height = self.choose_height()
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
        given = (rows if name == "background gather" else full)[rank].clone()
        if name == "background gather":
            out = ops._low_contention_all_gather(given, group.group_name)
            expected = rows.flatten(0, 1)
        else:
            out = ops._low_contention_reduce_scatter(given, "sum", group.group_name)
            expected = full.sum(0).chunk(W)[rank]
        given.fill_(torch.nan)  # the input may be overwritten at once
        return out, expected

    def choose_height(self) -> int:
        return (1, 3, 40)[int(torch.randint(3, (1,), generator=self.values))]

    def check(self) -> None:
        """Waits for one of the pending results, on another stream, and compares it by all bits."""
        name, out, expected = self.pending.pop(self.choose.randrange(len(self.pending)))
        with self.device.stream(self.streams[2]):
            found = torch.ops._c10d_functional.wait_tensor(out)
            assert torch.equal(found, expected), f"{name}: {found}, not {expected}"


def run_one(seed: int, grow: bool) -> None:
    """Runs a program on this rank."""
    program = Program.drawn(seed, dist.get_world_size())
    groups = [dist.new_group(list(ranks)) for ranks in program.groups]
    with simulation(**program.mode) as device:
        callers = [
            (_Caller(device, group, seed + number), calls)
            for number, (group, calls) in enumerate(zip(groups, program.calls, strict=True))
            if isinstance(group, dist.ProcessGroup)
        ]
        for caller, _ in () if grow else callers:
            cuda.reserve_on(memory.resolve(caller.group), device, 1 << 16)
        with ThreadPoolExecutor(max(1, len(callers))) as threads:
            running = [threads.submit(caller.run, calls) for caller, calls in callers]
        for each in running:
            each.result()
    for group in groups:
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)


def run_all(_: dist.ProcessGroup, seeds: list[int], grow: bool) -> None:
    """Runs programs one after the other, and reports each."""
    for seed in seeds:
        run_one(seed, grow)
        dist.barrier()
        say(seed)


def run(world_size: int, seeds: list[int], *, grow: bool = False) -> list[str]:
    """Runs programs on new ranks; returns failures. Programs after a failed one are not run."""
    with Ranks(seeds[0]).own(world_size, run_all, seeds, grow) as running:
        for seed in seeds:
            try:
                running.hear_all(timeout=LIMIT)
            except Exception as error:
                about = f"{world_size}:{seed} {Program.drawn(seed, world_size)}\n{error}"
                failures = [o.failure + o.output for o in running.outcomes(10)]
                return ["\n".join([about, *filter(None, failures)])]
        return [o.failure for o in running.outcomes(LIMIT) if o.failure]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=positive, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--again", metavar="RANKS:SEED", help="run one program that failed")
    parser.add_argument("--grow", action="store_true", help="calls make the workspaces")
    options = parser.parse_args()
    if options.again is not None:
        world_size, seed = map(int, options.again.split(":"))
        failures = run(world_size, [seed], grow=options.grow)
        print(Program.drawn(seed, world_size), *failures)
        return bool(failures)
    choose, start = random.Random(options.seed), time.monotonic()
    for done in range(0, options.count, PER_TEAM):
        seeds = [choose.randrange(1 << 30) for _ in range(min(PER_TEAM, options.count - done))]
        failures = run(choose.choice(SIZES), seeds, grow=options.grow)
        print(f"{done + len(seeds):5} programs, {time.monotonic() - start:.0f} s", *failures)
        sys.stdout.flush()
        if failures:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
