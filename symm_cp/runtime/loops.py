"""The loops of all exchanges, which csrc/exchange/exchange_run.cpp runs for each piece.

They contain no sizes and no addresses, so each group gets them once, when it is made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeAlias

from symm_cp import native
from symm_cp.group.memory import Group, on_creation
from symm_cp.native import wire
from symm_cp.runtime.lowering import Batch, KernelCall, batch, lower_loop
from symm_cp.schedule import patterns
from symm_cp.schedule.patterns import Pattern, Variant

_Kind: TypeAlias = wire.ExchangeKind

#: The patterns of each kind of exchange: in the calling thread, in the background.
PATTERNS: dict[_Kind, tuple[Pattern, Pattern]] = {
    _Kind.ALL_GATHER: (patterns.ALL_GATHER, patterns.BACKGROUND_ALL_GATHER),
    _Kind.ALL_REDUCE: (patterns.ALL_REDUCE, patterns.BACKGROUND_ALL_REDUCE),
    _Kind.TWO_SHOT_ALL_REDUCE: (
        patterns.TWO_SHOT_ALL_REDUCE,
        patterns.BACKGROUND_TWO_SHOT_ALL_REDUCE,
    ),
    _Kind.REDUCE_SCATTER: (patterns.REDUCE_SCATTER, patterns.BACKGROUND_REDUCE_SCATTER),
    _Kind.ALL_TO_ALL: (patterns.ALL_TO_ALL, patterns.BACKGROUND_ALL_TO_ALL),
}
#: Variants that run in the calling thread only.
IN_CALLER: dict[_Kind, Variant] = {
    _Kind.JOINING_ALL_TO_ALL: patterns.JOINING_ALL_TO_ALL.direct(),
    _Kind.HANDLED_ALL_TO_ALL: patterns.EXCHANGE_AND_CONSUME.direct(),
}


@lru_cache(maxsize=4096)
def lowered(variant: Variant, rank: int, world_size: int) -> tuple[Batch, ctypes.Array[wire.Place]]:
    """Returns the steps of a loop, and the sources of its reductions."""
    program = lower_loop(variant, rank, world_size)
    (steps,) = program.items or (batch([]),)
    assert not isinstance(steps, KernelCall)
    return steps, program.sources


def loop_kind(variant: Variant) -> wire.LoopKind:
    """Returns the loop kind of a variant within its kind of exchange."""
    plain = wire.LoopKind.PLAIN
    return next((k for k in wire.LoopKind if k.name.lower() in variant.options), plain)


def exchanges() -> Iterator[tuple[_Kind, int, Variant]]:
    """Yields the kind, the channel and the variant of every exchange."""
    for kind, of_channels in PATTERNS.items():
        for channel, pattern in enumerate(of_channels):
            yield from ((kind, channel, variant) for variant in pattern.variants("direct"))
    yield from ((kind, 0, variant) for kind, variant in IN_CALLER.items())


def install(group: Group) -> None:
    """Gives a group the loops of all exchanges."""
    set_loop = native.load().symm_cp_set_loop
    for kind, channel, variant in exchanges():
        steps, sources = lowered(variant, group.rank, group.world_size)
        loop = steps, len(steps), sources, len(sources)
        set_loop(group.handle, channel, kind, loop_kind(variant), *loop)


on_creation.append(install)
