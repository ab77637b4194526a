"""A relay: ranks form a chain, and each works on what the rank before it has passed on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from symm_cp import runtime
from symm_cp.group.memory import Group
from symm_cp.runtime.calls import ExchangeCall
from symm_cp.runtime.exchange import exchanged
from symm_cp.tensors.shards import Shape

#: Takes a piece, its input from the previous rank (None: this rank is the first of the chain), and
#: the memory for its output to the next rank (None: this rank is the last).
Step: TypeAlias = Callable[[int, torch.Tensor | None, torch.Tensor | None], None]


def relay(
    group: Group,
    step: Step,
    like: torch.Tensor,
    shapes: Sequence[Shape],
    name: bytes,
    *,
    reverse: bool = False,
) -> None:
    """Calls `step(piece, received, passed)` for each piece, on each rank of the chain. Collective.

    `received` has the contents that the previous rank wrote to its `passed` for this piece; the
    previous rank works on the next piece meanwhile. `shapes` are the shapes of the pieces, which
    have the dtype and device of `like`; memory is contiguous. With `reverse` the chain goes from
    the last rank to the first.

    The ranks take turns with an exchange between them: in turn t the rank at place r of the chain
    works on piece t - r, so the next rank has its input for its turn.
    """
    rank, last, count = group.rank, group.world_size - 1, len(shapes)
    places = [last - r if reverse else r for r in range(last + 1)]
    before, after = (rank + 1, rank - 1) if reverse else (rank - 1, rank + 1)
    nbytes = [math.prod(shape) * like.element_size() for shape in shapes]
    received: list[torch.Tensor | None] = [None]

    def run(piece: int, memory: torch.Tensor | None) -> None:
        if 0 <= piece < count:
            passed = None if memory is None else memory.view(like.dtype).view(shapes[piece])
            step(piece, received.pop(), passed)
            received.append(None)

    for turn in range(count + last):
        piece = turn - places[rank]

        def give(to: int, memory: torch.Tensor, piece: int = piece) -> None:
            if to == after:
                run(piece, memory)

        def consume(piece: int = piece) -> None:
            if places[rank] == last:
                run(piece, None)

        def take(source: int, memory: torch.Tensor, following: int = piece + 1) -> None:
            # The previous rank was one piece ahead.
            if source == before and 0 <= following < count:
                received[0] = memory.view(like.dtype).view(shapes[following])

        if turn == count + last - 1:  # only the last rank of the chain has a piece left
            with exchanged():
                consume()
            return
        passing = [turn - place for place in places]
        sizes = tuple(
            tuple(
                nbytes[passing[source]]
                if places[to] == places[source] + 1 and 0 <= passing[source] < count
                else 0
                for to in range(last + 1)
            )
            for source in range(last + 1)
        )
        runtime.run(ExchangeCall(group, give, consume, take, like.device, name, sizes))
