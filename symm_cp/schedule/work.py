"""Predicts how long an op takes: its schedule, on a machine, with the work of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from symm_cp.schedule.machine import Machine
from symm_cp.schedule.patterns import Variant
from symm_cp.schedule.simulate import Cost, Timeline, simulate
from symm_cp.schedule.steps import Compute, Copy, Schedule, Step


@dataclass(frozen=True)
class Work:
    """An op with equal work on all ranks: the variant that it runs, and the size of each step.

    `kernel` returns the seconds of the kernel for one shard. In bytes: `shard`, which each peer of
    a rank reads; `partial`, a partial sum; `fresh`, newly allocated results.
    `op` is the key of the machine's fixed cost per call.
    """

    op: str
    variant: Variant
    kernel: Callable[[Machine], float]
    shard: float = 0.0
    partial: float = 0.0
    fresh: float = 0.0

    def schedules(self, ranks: int) -> tuple[Schedule, ...]:
        """The schedules of all ranks."""
        return self.variant.schedules(ranks)

    def cost(self, machine: Machine, ranks: int) -> Cost:
        """Returns the cost of each step."""
        steps = [step for lane in self.schedules(ranks)[0].lanes.values() for step in lane]
        # Spreads the fixed costs of a call and of new memory over its kernels and copies.
        busy = sum(isinstance(step, (Compute, Copy)) for step in steps)
        fixed = (machine.calls.get(self.op, 0.0) + machine.fresh(self.fresh)) / max(1, busy)
        one = self.kernel(machine)

        def cost(rank: int, step: Step) -> float:
            if isinstance(step, Copy):
                nbytes = self.partial if step.dst.buffer == "partials" else self.shard
                remote = step.src.rank != step.dst.rank
                return fixed + (machine.transfer(nbytes) if remote else machine.copy(nbytes))
            if not isinstance(step, Compute):
                return 0.0
            if step.kernel in ("reduce", "add"):
                return fixed + machine.reduce(self.partial, ranks)
            remote = any(region.rank != rank for region in step.reads)
            return fixed + one + (machine.remote(self.shard) if remote else 0.0)

        return cost

    def predict(self, machine: Machine, ranks: int, calls: int = 1) -> Timeline:
        """Returns when each step runs in `calls` calls, one after the other."""
        return simulate(
            [self.schedules(ranks)] * calls,
            self.cost(machine, ranks),
            signal=machine.signal_seconds,
        )
