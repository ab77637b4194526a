"""Lowers looped patterns to the steps of one piece.

csrc/exchange/exchange_run.cpp runs them for each piece. They contain no sizes and no addresses, so
each group gets them once, when it is made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from symm_cp import native
from symm_cp.group.memory import Group, on_creation
from symm_cp.native import wire
from symm_cp.schedule import patterns
from symm_cp.schedule.patterns import Pattern, Variant
from symm_cp.schedule.steps import Compute, Copy, Region, Signal, Wait, accesses

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


class Loop(NamedTuple):
    """The lowered steps of one piece; see `Loop` in csrc/exchange/exchange.h."""

    steps: ctypes.Array[wire.LoopStep]
    sources: ctypes.Array[wire.Area]
    published: int
    parted: bool
    slotted: bool


def _area(region: Region, writes: bool) -> wire.Area:
    chunk = -1 if region.chunk is None else region.chunk
    if region.buffer == "slot":
        return wire.Area(wire.Buffer.PEER_SLOT, region.rank, chunk)
    if region.buffer == "output" or (region.buffer == "symmetric" and writes):
        return wire.Area(wire.Buffer.OUTPUT, region.rank, chunk)
    own = wire.Buffer.INPUT if region.buffer == "input" else wire.Buffer.SYMMETRIC
    return wire.Area(own, region.rank, chunk)


@lru_cache(maxsize=4096)
def lower_loop(variant: Variant, rank: int, world_size: int) -> Loop:
    """Lowers one piece of a variant whose schedules have one lane."""
    steps: list[wire.LoopStep] = []
    sources: list[wire.Area] = []
    slots: list[Region] = []
    order = [step for _, step in variant.issue_order(rank, world_size)]
    for step in order:
        slots += [each for part in accesses(step) for each in part if each.buffer == "slot"]
        if isinstance(step, Signal):
            if not any(each.kind == wire.Kind.PUBLISH for each in steps):
                # Before the first signal: peers read the record after that.
                steps.append(wire.LoopStep(kind=wire.Kind.PUBLISH))
            flag = wire.FLAGS.index(step.flag)
            steps.append(wire.LoopStep(kind=wire.Kind.SIGNAL, peer=step.to, flag=flag))
        elif isinstance(step, Wait):
            flag = wire.FLAGS.index(step.flag)
            steps.append(wire.LoopStep(kind=wire.Kind.WAIT, peer=step.source, flag=flag))
        elif isinstance(step, Copy):
            to, source = _area(step.dst, writes=True), _area(step.src, writes=False)
            steps.append(wire.LoopStep(kind=wire.Kind.COPY, to=to, source=source))
        elif isinstance(step, Compute) and step.kernel == "give":
            to = _area(step.writes[0], writes=True)
            steps.append(wire.LoopStep(kind=wire.Kind.PRODUCE, peer=step.index, to=to))
        elif isinstance(step, Compute) and step.kernel in ("consume", "take"):
            steps.append(wire.LoopStep(kind=wire.Kind.CONSUME, peer=step.index))
        else:
            assert isinstance(step, Compute)
            areas = [_area(region, writes=False) for region in step.reads]
            steps.append(
                wire.LoopStep(
                    kind=wire.Kind.REDUCE,
                    to=_area(step.writes[0], writes=True),
                    first_source=len(sources),
                    source_count=len(areas),
                )
            )
            sources += areas
    kinds = [step.kind for step in steps]
    # A single rank has no peers: all of its data leaves the input at once.
    waits = kinds.index(wire.Kind.WAIT) if wire.Kind.WAIT in kinds else 0
    published = max((at + 1 for at in range(waits) if kinds[at] == wire.Kind.SIGNAL), default=0)
    if world_size == 1:
        published = len(kinds)
    return Loop(
        (wire.LoopStep * len(steps))(*steps),
        (wire.Area * max(1, len(sources)))(*sources),
        published,
        parted=any(region.chunk is not None for region in slots),
        slotted=bool(slots),
    )


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
        loop = lower_loop(variant, group.rank, group.world_size)
        counts = len(loop.sources), loop.published, loop.parted, loop.slotted
        set_loop(
            group.handle,
            channel,
            kind,
            loop_kind(variant),
            loop.steps,
            len(loop.steps),
            loop.sources,
            *counts,
        )


on_creation.append(install)
