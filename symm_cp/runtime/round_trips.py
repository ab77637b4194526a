"""A pipeline of round trips: one travels while the ranks work on another.

Step i is one `ExchangeCall`: every rank sends the tensors
of trip i, works on the tensors of trip i-1, and sends back the results of trip i-2, in one message
to each peer. So two trips take memory at a time, and ranks wait for each other once per
step, for messages that were sent before the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from symm_cp import runtime
from symm_cp.group.memory import Group
from symm_cp.runtime.calls import ExchangeCall, PackedBoxes
from symm_cp.tensors.alignment import padded

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class _Leg:
    """One exchange: `packed` maps parts of `tensors` to places in the peers' `outputs`."""

    packed: PackedBoxes
    tensors: Tensors
    outputs: Tensors
    failure: Exception | None = None

    def check(self) -> None:
        """Raises the exception of the work that makes `tensors`, if it failed."""
        if self.failure is not None:
            raise self.failure


@dataclass
class RoundTrip:
    """Tensors that ranks exchange, the work on arrived tensors, and the exchange of its results.

    `there` sends `tensors` to new tensors, made by `new_arrivals`; `work` turns these into results,
    which `back` sends to `outputs`.
    """

    there: PackedBoxes
    tensors: Tensors
    new_arrivals: Callable[[], Tensors]
    work: Callable[[Tensors], Tensors]
    back: PackedBoxes
    outputs: Tensors
    _arrived: Tensors = field(default=(), init=False)
    _results: Tensors = field(default=(), init=False)
    _failure: Exception | None = field(default=None, init=False)

    def begin(self) -> _Leg:
        """Returns the leg to the peers."""
        self._arrived = self.new_arrivals()
        return _Leg(self.there, self.tensors, self._arrived)

    def consume(self) -> None:
        """Works on the arrived tensors.

        An exception of the work is raised in the next step, before this rank sends anything: in
        this step the peers may already have their messages, and would miss the report.
        """
        try:
            self._results = self.work(self._arrived)
        except Exception as error:
            self._failure = error
        self._arrived = ()

    def end(self) -> _Leg:
        """Returns the leg back."""
        results, self._results = self._results, ()
        return _Leg(self.back, results, self.outputs, self._failure)


def run_round_trips(
    group: Group, trips: Sequence[RoundTrip], device: torch.device, name: bytes
) -> None:
    """Runs the pipeline. Collective; all ranks have the same number of trips."""
    for step in range(len(trips) + 2):
        legs = [trips[step].begin()] if step < len(trips) else []
        if step >= 2:
            legs.append(trips[step - 2].end())
        here = trips[step - 1] if 1 <= step <= len(trips) else None
        if here is not None and not legs:
            here.consume()  # the only trip: nothing travels meanwhile
            continue
        _run_step(group, legs, here, device, name + b" step %d" % step)


def _run_step(
    group: Group,
    legs: Sequence[_Leg],
    here: RoundTrip | None,
    device: torch.device,
    name: bytes,
) -> None:
    ranks = range(group.world_size)

    def lengths(source: int, to: int) -> list[int]:
        return [padded(leg.packed.sizes[source][to]) for leg in legs]

    def give(to: int, memory: torch.Tensor) -> None:
        for leg in legs:
            leg.check()
        parts = memory.split_with_sizes(lengths(group.rank, to))
        for leg, part in zip(legs, parts, strict=True):
            leg.packed.give(leg.tensors, to, part)

    def take(source: int, memory: torch.Tensor) -> None:
        parts = memory.split_with_sizes(lengths(source, group.rank))
        for leg, part in zip(legs, parts, strict=True):
            leg.packed.take(leg.outputs, source, part)

    def consume() -> None:
        for leg in legs:
            leg.check()
            leg.packed.keep(leg.tensors, leg.outputs)
        if here is not None:
            here.consume()

    sizes = tuple(tuple(sum(lengths(source, to)) for to in ranks) for source in ranks)
    runtime.run(ExchangeCall(group, give, consume, take, device, name, sizes))
