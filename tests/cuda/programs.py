"""Random programs of graphs and eager ops, on simulated machines of all kinds, at 2 to 8 ranks.

    python -m tests.cuda.programs --count 1000
    python -m tests.cuda.programs --again 5:123456  # one of them: its number of ranks, its seed

A program captures graphs of several ops, then replays some of them again and again: in random
orders, on random streams, between eager ops, one after the other or all at once. The machine is
drawn as well. Matrices hold small integers, so products are exact and are compared by all bits;
attention is compared with dense attention, and by all bits where it is repeated on equal inputs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from symm_cp import cuda
from symm_cp.group import memory
from symm_cp.ranks import positive
from symm_cp.testing import Ranks, say
from tests.cuda.graphs import Graph, graphed
from tests.cuda.simulated import SimulatedDevice, random_mode, simulation
from tests.cuda.test_graph_order import ALL, Case, cases

#: Programs that one set of processes runs.
PER_TEAM = 20
#: Seconds for a round; a wait of a stream that is longer than the simulator's patience aborts.
LIMIT = 120
SIZES = (2, 3, 4, 5, 6, 7, 8)
#: Results that are exact, since their inputs are small integers.
EXACT = ("gather", "scatter", "all-reduce")
_PATIENCE_MS = 30_000


@dataclass(frozen=True)
class Program:
    """What ranks do, drawn by a seed: the machine, the ops of each graph, sizes, rounds."""

    mode: dict[str, Any]
    graphs: tuple[tuple[str, ...], ...]
    rows: int
    tokens: int
    rounds: int
    at_once: bool

    @classmethod
    def drawn(cls, seed: int) -> Program:
        choose = random.Random(seed)
        mode = random_mode(choose)
        at_once = choose.random() < 0.5
        graphs = [tuple(choose.choices(ALL, k=choose.randint(1, 3))) for _ in range(3)]
        return cls(
            mode | {"patience_ms": _PATIENCE_MS},
            tuple(graphs[: choose.randint(1, 3)]),
            choose.choice([1, 3, 24]),
            choose.choice([1, 4, 8]),
            choose.randint(4, 10),
            at_once,
        )

    def values(self, W: int) -> dict[str, torch.Tensor]:
        """The inputs of all ranks."""
        return {
            "weight": torch.zeros(8, 5), "rows": torch.zeros(W, self.rows, 8),
            "full": torch.zeros(W, self.rows * W, 8),
            "heads": torch.zeros(W, 3, 1, 2 * W, self.tokens, 16),
        }  # fmt: skip


def refill(values: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    """Draws new inputs, the same on all ranks."""
    for name, value in values.items():
        if name == "heads":
            value.copy_(torch.randn(value.shape, generator=generator))
        else:
            value.copy_(torch.randint(-8, 9, value.shape, generator=generator))


def check(name: str, case: Case, out: torch.Tensor) -> None:
    """Compares what a graph or a call has computed with the unsharded op."""
    tolerance = 0.0 if name in EXACT else 1e-4
    torch.testing.assert_close(out, case[1](), rtol=tolerance, atol=tolerance)


class _Captured:
    """A graph, its ops, and what its last replay has computed."""

    def __init__(self, device: SimulatedDevice, names: tuple[str, ...], made: dict[str, Case]):
        self.names, self.cases = names, [made[name] for name in names]
        graph, found = graphed(device, lambda: [call() for call, _ in self.cases])
        self.graph: Graph = graph
        self.found: list[torch.Tensor] = found
        self.before: list[torch.Tensor] = []

    def check(self, *, repeated: bool) -> None:
        for name, case, out in zip(self.names, self.cases, self.found, strict=True):
            check(name, case, out)
        for out, before in zip(self.found, self.before if repeated else (), strict=False):
            assert torch.equal(out, before), "a replay on equal inputs differs in some bits"
        self.before = [out.clone() for out in self.found]


@cache
def side_streams(device: SimulatedDevice) -> tuple[int, int]:
    """Two more streams, which the process keeps."""
    return device.machine.stream(0), device.machine.stream(0)


def run_one(group: dist.ProcessGroup, seed: int) -> None:
    """Runs a program, and reports after each round how many graphs it has replayed.

    After each round, since a program takes a minute where eight ranks share two cores.
    """
    program, W = Program.drawn(seed), group.size()
    choose, generator = random.Random(seed + 1), torch.Generator().manual_seed(seed)
    values = program.values(W)
    made = cases(group, values)
    with simulation(**program.mode) as device:
        cuda.reserve_on(memory.resolve(group), device, 1 << 20, graphs=len(program.graphs))
        captured = [_Captured(device, names, made) for names in program.graphs]
        streams = [0, *side_streams(device)]
        fresh = True
        for _ in range(program.rounds):
            if fresh := fresh or choose.random() < 0.7:
                refill(values, generator)
            eager = choose.choice([*ALL, None])
            at = choose.randrange(len(captured) + 1)
            order = choose.choices(captured, k=choose.randint(1, len(captured) + 1))
            called: list[torch.Tensor] = []
            for i, graph in enumerate(order):
                if eager is not None and i == at:
                    called.append(made[eager][0]())
                with device.stream(choose.choice(streams)):
                    graph.graph.start()
                    if not program.at_once:
                        device.join()
                        graph.check(repeated=not fresh)
            device.synchronize()
            device.machine.raise_errors()
            for graph in order:
                graph.check(repeated=not fresh)
            for out in called:
                check(str(eager), made[str(eager)], out)
            for graph in captured:  # graphs left out have no results for these inputs
                graph.before = graph.before if graph in order else []
            fresh = False
            say(len(order))


def run_all(group: dist.ProcessGroup, seeds: list[int]) -> None:
    """Runs programs one after the other, and reports the replays of each round.

    Each has a group of its own: torch's pads have channels for a few graphs only.
    """
    for seed in seeds:
        own = dist.new_group()
        assert isinstance(own, dist.ProcessGroup)
        run_one(own, seed)
        dist.destroy_process_group(own)


def run(world_size: int, seeds: list[int]) -> tuple[list[int], list[str]]:
    """Runs programs on new ranks; returns the replays of each, and any failures.

    Programs after a failed one are not run.
    """
    replays: list[int] = []
    with Ranks(seeds[0]).own(world_size, run_all, seeds) as running:
        for seed in seeds:
            rounds = range(Program.drawn(seed).rounds)
            try:
                replays.append(sum(running.hear_all(timeout=LIMIT)[0] for _ in rounds))
            except Exception as error:
                about = f"{world_size}:{seed} {Program.drawn(seed)}\n{error}"
                failures = [o.failure + o.output for o in running.outcomes(10)]
                return replays, ["\n".join([about, *filter(None, failures)])]
        return replays, [o.failure for o in running.outcomes(LIMIT) if o.failure]


def run_many(count: int, seed: int) -> dict[str, Any]:
    """Runs `count` programs; returns the results for a report."""
    choose, start = random.Random(seed), time.monotonic()
    failures: list[str] = []
    by_ranks: Counter[int] = Counter()
    replays = 0
    while by_ranks.total() < count:
        W = choose.choice(SIZES)
        length = min(PER_TEAM, count - by_ranks.total())
        found, failed = run(W, [choose.randrange(1 << 30) for _ in range(length)])
        replays, failures = replays + sum(found), failures + failed
        by_ranks[W] += len(found) + len(failed)
        print(f"{by_ranks.total():5} programs, {replays} replays, {time.monotonic() - start:.0f} s,"
              f" {len(failures)} failed", *failed, flush=True)  # fmt: skip
    return {
        "command": f"python -m tests.cuda.programs --count {count} --seed {seed}",
        "device": "simulated, no GPU",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - start),
        "programs_by_ranks": dict(sorted(by_ranks.items())),
        "replays_by_each_rank": replays,
        "failures": failures,
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=positive, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--again", metavar="RANKS:SEED", help="run one program that failed")
    parser.add_argument("--json", type=Path, help="write what was found here")
    given = parser.parse_args()
    if given.again is not None:
        world_size, seed = map(int, given.again.split(":"))
        print(Program.drawn(seed))
        _, failures = run(world_size, [seed])
        print(*failures)
        return bool(failures)
    report = run_many(given.count, given.seed)
    print(json.dumps(report))
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    return bool(report["failures"])


if __name__ == "__main__":
    sys.exit(main())
