"""Random programs of graphs and eager ops.

A program captures graphs of several ops, then replays some of them again and again: in random
orders, on random streams, between eager ops, one after the other or all at once. Results are also
compared by all bits where a replay is repeated on equal inputs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from symm_cp import cuda
from symm_cp.group import memory
from tests.cuda.graphs import Graph, graphed
from tests.cuda.op_cases import CAPTURED, Case, cases, check, refill, zeros
from tests.cuda.simulated import SimulatedDevice, random_mode, simulation


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
    def drawn(cls, seed: int, world_size: int) -> Program:
        choose = random.Random(seed)
        mode = random_mode(choose)
        at_once = choose.random() < 0.5
        graphs = [tuple(choose.choices(CAPTURED, k=choose.randint(1, 3))) for _ in range(3)]
        return cls(
            mode,
            tuple(graphs[: choose.randint(1, 3)]),
            choose.choice([1, 3, 24]),
            choose.choice([1, 4, 8]),
            choose.randint(4, 10),
            at_once,
        )

    def run(self, seed: int) -> int:
        """Runs the program on this rank; returns how many graphs it has replayed.

        In a group of its own: torch's pads have channels for a few graphs only.
        """
        own = dist.new_group()
        assert isinstance(own, dist.ProcessGroup)
        replays = _run(self, own, seed)
        dist.destroy_process_group(own)
        return replays


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


def _run(program: Program, group: dist.ProcessGroup, seed: int) -> int:
    choose, generator = random.Random(seed + 1), torch.Generator().manual_seed(seed)
    values, replays = zeros(group.size(), program.rows, program.tokens), 0
    made = cases(group, values)
    with simulation(**program.mode) as device:
        cuda.reserve_on(memory.resolve(group), device, 1 << 20, graphs=len(program.graphs))
        captured = [_Captured(device, names, made) for names in program.graphs]
        streams = [0, *side_streams(device)]
        fresh = True
        for _ in range(program.rounds):
            if fresh := fresh or choose.random() < 0.7:
                refill(values, generator)
            eager = choose.choice([*CAPTURED, None])
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
            replays += len(order)
    return replays
