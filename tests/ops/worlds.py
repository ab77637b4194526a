"""All ranks of a world as threads of one process: what each op decides there, without memory.

Every rank runs an op's kernel with its own arguments, on a runtime whose exchanges give zeros: it
notes the kind, the name and the bytes of each exchange. Ranks
really exchange the numbers that they tell each other (`numbers_of_all`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from symm_cp import tuning
from symm_cp.native import wire
from symm_cp.ops import common
from symm_cp.runtime import cpu, exchange

#: A decision of a rank: its kind, and the values on which all ranks must agree.
Note = tuple[Any, ...]


class Rank:
    """Stands in for the `Group` of a rank."""

    def __init__(self, world: World, rank: int) -> None:
        self.name, self.rank, self.world_size, self.world = "world", rank, world.size, world
        self.notes: list[Note] = []
        self.states: dict[Any, Any] = {}
        #: The tensors that lie in symmetric memory.
        self.symmetric: list[torch.Tensor] = []

    def state(self, key: Any, make: Callable[[], Any]) -> Any:
        return self.states.setdefault(key.name, make())

    def find(self, key: Any) -> Any:
        return self.states.get(key.name)

    def own_lock(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def tell(self, name: str | bytes, numbers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        self.notes.append(("numbers", name, len(numbers)))
        return self.world.exchange(self.rank, tuple(numbers))


class World:
    """Ranks that run an op each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.peers: list[Any] = [None] * size
        self.here = threading.local()

    def exchange(self, rank: int, value: Any) -> tuple[Any, ...]:
        self.peers[rank] = value
        self.barrier.wait()
        values = tuple(self.peers)
        self.barrier.wait()
        return values

    def run(self, op: Callable[[Rank], object]) -> list[Rank]:
        """Returns the ranks, after each has run the op."""
        ranks = [Rank(self, rank) for rank in range(self.size)]
        errors: list[BaseException] = []

        def work(rank: Rank) -> None:
            self.here.rank = rank
            try:
                op(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
        with self._in_place_of_groups():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        first = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)] or errors
        if first:
            raise first[0]
        return ranks

    @contextlib.contextmanager
    def _in_place_of_groups(self) -> Iterator[None]:
        here, on_cpu = self.here, _Runtime()
        patches = [
            mock.patch.object(common, "resolve", side_effect=lambda name: here.rank),
            mock.patch("symm_cp.runtime.of", return_value=on_cpu),
            mock.patch("symm_cp.runtime._cpu", on_cpu),
            mock.patch.object(exchange, "_exchange", _note_exchange),
            mock.patch.object(tuning, "tuned", return_value={}),
            mock.patch(
                "symm_cp.ops.attention.spread.numbers_of_all",
                lambda group, name, numbers: group.tell(name, numbers),
            ),
            mock.patch.object(
                cpu, "numbers_on_host", lambda group, name, numbers: group.tell(name, numbers)
            ),
            mock.patch.object(cpu, "has_symmetric", return_value=True),
            mock.patch.object(cpu, "symmetric_place", _place),
            mock.patch.object(
                cpu, "symmetric_tensor", lambda *args: torch.zeros(args[3], dtype=args[4])
            ),
        ]
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield


def _place(tensor: torch.Tensor, group: Rank) -> tuple[int, int] | None:
    storage = tensor.untyped_storage().data_ptr()
    places = [each.untyped_storage().data_ptr() for each in group.symmetric]
    return (places.index(storage), 0) if storage in places else None


def _note_exchange(
    group: Rank,
    given: Sequence[torch.Tensor],
    taken: torch.Tensor,
    kind: wire.ExchangeKind,
    given_parts: list[int],
    taken_parts: list[int],
    name: bytes,
    reduce_op: str = "",
) -> None:
    """Notes an exchange; checks that peers agree on the bytes that they give and take."""
    group.notes.append(("exchange", int(kind), name, reduce_op))
    taken.zero_()
    gives, takes = given_parts[1::2], taken_parts[1::4]
    of_all = group.world.exchange(group.rank, gives)
    if kind == wire.ExchangeKind.ALL_GATHER:
        assert [bytes_given for (bytes_given,) in of_all] == takes, name
    if kind == wire.ExchangeKind.ALL_TO_ALL:
        assert [each[group.rank] for each in of_all] == takes, name
    if kind == wire.ExchangeKind.REDUCE_SCATTER:
        assert all(each[group.rank : group.rank + 1] == takes for each in of_all), name


class _Runtime(cpu.CpuRuntime):
    def _exchange_boxes(self, call: Any) -> None:
        """Notes an exchange; checks that peers agree on the pieces that they give and take."""
        group, parcels, call_name = call.group, call.packed, call.name
        tensors, outputs = call.shard, call.outputs
        strides = tuple([t.stride() for t in (*tensors, *outputs)])
        given, taken = parcels.boxes(strides, 4096)
        group.notes.append(("exchange", parcels.sizes, call_name, parcels.joins))
        for output in outputs:
            output.zero_()
        pieces = [
            [(box.peer, box.piece, box.in_slot, box.planes * box.rows * box.row) for box in boxes]
            for boxes in (given, taken)
        ]
        of_all = group.world.exchange(group.rank, pieces)
        for peer, (theirs, _) in enumerate(of_all):
            mine = [box[1:] for box in pieces[1] if box[0] == peer]
            assert mine == [box[1:] for box in theirs if box[0] == group.rank], call_name


def check_alike(ranks: list[Rank], case: str) -> None:
    """Checks that all ranks noted the same."""
    for rank in ranks[1:]:
        assert rank.notes == ranks[0].notes, (
            f"{case}: rank {rank.rank} decides {rank.notes}, rank 0 {ranks[0].notes}"
        )
