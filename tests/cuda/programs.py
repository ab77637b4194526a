"""Random programs on simulated machines of all kinds, at 2 to 8 ranks: the command.

    python -m tests.cuda.programs graphs --count 1000
    python -m tests.cuda.programs groups --again 5:123456  # one: ranks, seed

`KINDS` says what the ranks of a program do. The machine is drawn as well.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any, Protocol

import torch.distributed as dist

from symm_cp.ranks import positive
from symm_cp.testing import Ranks, say
from tests.cuda import graph_programs, group_programs

#: Programs that one set of processes runs.
PER_TEAM = 20
#: Seconds for each: a minute is usual where eight ranks share two cores. A wait of a stream that is
#: longer than the simulator's patience aborts earlier.
LIMIT = 300
SIZES = (2, 3, 4, 5, 6, 7, 8)


class Program(Protocol):
    """What ranks do, drawn by a seed."""

    def run(self, seed: int) -> int:
        """Runs the program on this rank; returns how many results were compared."""


KINDS: dict[str, Any] = {
    "graphs": graph_programs.Program,
    "groups": group_programs.Program,
}


def run_all(_: dist.ProcessGroup, kind: str, seeds: list[int]) -> None:
    """Runs programs one after the other, and reports each."""
    for seed in seeds:
        program: Program = KINDS[kind].drawn(seed, dist.get_world_size())
        compared = program.run(seed)
        dist.barrier()
        say(compared)


def run(world_size: int, kind: str, seeds: list[int]) -> tuple[list[int], list[str]]:
    """Runs programs on new ranks; returns how many results they compared in each, and failures.

    Programs after a failed one are not run.
    """
    compared: list[int] = []
    with Ranks(seeds[0]).own(world_size, run_all, kind, seeds) as running:
        for seed in seeds:
            try:
                compared.append(sum(running.hear_all(timeout=LIMIT)))
            except Exception as error:
                about = f"{world_size}:{seed} {KINDS[kind].drawn(seed, world_size)}\n{error}"
                failures = [o.failure + o.output for o in running.outcomes(10)]
                return compared, ["\n".join([about, *filter(None, failures)])]
        return compared, [o.failure for o in running.outcomes(LIMIT) if o.failure]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--count", type=positive, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--again", metavar="RANKS:SEED", help="run one program that failed")
    given = parser.parse_args()
    if given.again is not None:
        world_size, seed = map(int, given.again.split(":"))
        print(KINDS[given.kind].drawn(seed, world_size))
        _, failures = run(world_size, given.kind, [seed])
        print(*failures)
        return bool(failures)
    choose, start, results = random.Random(given.seed), time.monotonic(), 0
    for first in range(0, given.count, PER_TEAM):
        seeds = [choose.randrange(1 << 30) for _ in range(min(PER_TEAM, given.count - first))]
        compared, failures = run(choose.choice(SIZES), given.kind, seeds)
        results += sum(compared)
        print(f"{first + len(compared):5} programs, {results} results, "
              f"{time.monotonic() - start:.0f} s", *failures, flush=True)  # fmt: skip
        if failures:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
