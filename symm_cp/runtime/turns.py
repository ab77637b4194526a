"""A relay where flags have no pieces: the ranks take turns, each of them an all-gather.

Turn t has the rank at place r of the chain work on piece t - r, so what one rank passes on is there
for the next one's turn. Ranks wait for each other after each turn, not only for the one before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from symm_cp.group.memory import Group
from symm_cp.runtime.api import RelayStep, Runtime
from symm_cp.tensors.results import new_result
from symm_cp.tensors.shards import Shape


def relay_in_turns(
    runtime: Runtime,
    group: Group,
    step: RelayStep,
    like: torch.Tensor,
    shapes: Sequence[Shape],
    call_name: bytes,
    *,
    reverse: bool,
) -> None:
    """As `Runtime.relay`, by all-gathers of another runtime method."""
    rank, ranks = group.rank, group.world_size
    places = [ranks - 1 - r if reverse else r for r in range(ranks)]
    before = rank + 1 if reverse else rank - 1
    place, pieces = places[rank], len(shapes)
    received: torch.Tensor | None = None
    turns = pieces + ranks - 1
    for turn in range(turns):
        passing = [turn - each for each in places]
        piece = passing[rank]
        passed: torch.Tensor | None = None
        if 0 <= piece < pieces:
            passed = new_result(like, shapes[piece]) if place < ranks - 1 else None
            step(piece, received, passed)
        if ranks == 1 or turn == turns - 1:
            continue
        # In one dimension: a runtime may take shards of the same size for those of the same shape.
        sent = [
            math.prod(shapes[each]) if 0 <= each < pieces and places[r] < ranks - 1 else 0
            for r, each in enumerate(passing)
        ]
        own = new_result(like, (0,)) if passed is None else passed.view(-1)
        following = new_result(like, (sent[before],)) if place > 0 else None

        def consume(
            shards: list[torch.Tensor], owner: int, into: torch.Tensor | None = following
        ) -> None:
            if owner == before and into is not None:
                into.copy_(shards[0])

        runtime.all_gather_and_consume(
            group, [own], consume, call_name, shapes=[((numel,),) for numel in sent]
        )
        # Of the rank before, which was one piece ahead.
        received = None
        if following is not None and 0 <= piece + 1 < pieces:
            received = following.view(shapes[piece + 1])
