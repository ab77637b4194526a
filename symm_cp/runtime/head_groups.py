"""A pipeline over groups of heads: one travels while the one before it is worked on.

Step i is one call of `Runtime.exchange_and_consume`: every rank gives group i, works on group i-1,
and gives back the results of group i-2, in one message to each peer. So there is memory for two
groups in flight, and ranks wait for each other once a step, for data that was sent before the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from symm_cp.group.memory import Group
from symm_cp.runtime.api import PackedBoxes, Runtime
from symm_cp.tensors.alignment import padded

Tensors = Sequence[torch.Tensor]


@dataclass
class HeadGroup:
    """The data of one group of heads, and the work on it.

    `given` go `there`, to tensors that `new_arrivals` makes; `work` turns these into results, which
    go `back` to `outputs`.
    """

    there: PackedBoxes
    given: Tensors
    new_arrivals: Callable[[], Tensors]
    work: Callable[[Tensors], Tensors]
    back: PackedBoxes
    outputs: Tensors
    _arrived: Tensors = field(default=(), init=False)
    _results: Tensors = field(default=(), init=False)
    _failure: Exception | None = field(default=None, init=False)

    def begin(self) -> _Trip:
        """Returns the first trip, to the ranks that do the work."""
        self._arrived = self.new_arrivals()
        return _Trip(self.there, self.given, self._arrived)

    def consume(self) -> None:
        """Does the work on the received tensors.

        The next step raises its error, before it gives anything: in this step the peers may already
        have all their data, so they would not learn of the error.
        """
        try:
            self._results = self.work(self._arrived)
        except Exception as error:
            self._failure = error
        self._arrived = ()

    def end(self) -> _Trip:
        """Returns the trip of the results."""
        results, self._results = self._results, ()
        return _Trip(self.back, results, self.outputs, self._failure)


@dataclass(frozen=True)
class _Trip:
    packed: PackedBoxes
    tensors: Tensors
    outputs: Tensors
    failure: Exception | None = None

    def check(self) -> None:
        """Raises the error of the work, if any."""
        if self.failure is not None:
            raise self.failure


def consume_in_groups(
    runtime: Runtime, group: Group, heads: Sequence[HeadGroup], device: torch.device, name: bytes
) -> None:
    """Runs the pipeline. Collective; all ranks have equally many groups."""
    for step in range(len(heads) + 2):
        trips = [heads[step].begin()] if step < len(heads) else []
        if step >= 2:
            trips.append(heads[step - 2].end())
        here = heads[step - 1] if 1 <= step <= len(heads) else None
        if here is not None and not trips:
            here.consume()  # the only group: nothing travels meanwhile
            continue
        _run_step(runtime, group, trips, here, device, name + b" step %d" % step)


def _run_step(
    runtime: Runtime,
    group: Group,
    trips: Sequence[_Trip],
    here: HeadGroup | None,
    device: torch.device,
    name: bytes,
) -> None:
    ranks = range(group.world_size)
    sizes = tuple(
        tuple(sum(padded(trip.packed.sizes[r][to]) for trip in trips) for to in ranks)
        for r in ranks
    )

    def messages(memory: torch.Tensor, source: int, to: int) -> Sequence[torch.Tensor]:
        lengths = [padded(trip.packed.sizes[source][to]) for trip in trips]
        return memory.split_with_sizes(lengths)

    def give(to: int, memory: torch.Tensor) -> None:
        for trip in trips:
            trip.check()
        for trip, part in zip(trips, messages(memory, group.rank, to), strict=True):
            trip.packed.give(trip.tensors, to, part)

    def take(source: int, memory: torch.Tensor) -> None:
        for trip, part in zip(trips, messages(memory, source, group.rank), strict=True):
            trip.packed.take(trip.outputs, source, part)

    def consume() -> None:
        for trip in trips:
            trip.check()
            trip.packed.keep(trip.tensors, trip.outputs)
        if here is not None:
            here.consume()

    runtime.exchange_and_consume(group, give, consume, take, device, name, sizes=sizes)
