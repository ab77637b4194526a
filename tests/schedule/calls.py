"""Calls of all variants, for the proofs of this folder."""

from __future__ import annotations

from typing import NamedTuple

from symm_cp.schedule import Schedule, Variant, patterns
from symm_cp.schedule.patterns import Channel, FormName
from tests.exhaustive import some

#: All eight orders of three consecutive calls of two variants; a slot comes back within three.
MIX = (0, 0, 0, 1, 0, 1, 1, 1, 0, 0)


class Workspace(NamedTuple):
    """A workspace that variants share: calls of them follow one another in any order."""

    channel: Channel
    form: FormName
    slots: int

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants that may run on it."""
        return patterns.variants(self.channel, self.form, self.slots)

    def __str__(self) -> str:
        return f"{self.channel}-{self.form}-{self.slots}"


CHANNELS: tuple[Channel, ...] = ("sync", "async")
#: With the numbers of slots that runtimes use.
WORKSPACES = [
    *(Workspace(channel, "direct", 2) for channel in CHANNELS),
    *(Workspace(channel, "staged", slots) for channel in CHANNELS for slots in (1, 2)),
]


class Place(NamedTuple):
    """A variant on a workspace, in calls of `pieces` pieces."""

    variant: Variant
    workspace: Workspace
    pieces: int = 1

    def schedules(self, world_size: int) -> tuple[Schedule, ...]:
        """The schedules of all ranks."""
        return self.variant.schedules(world_size, self.workspace.slots, self.pieces)

    def __str__(self) -> str:
        pieces = f"-{self.pieces}-pieces" if self.pieces > 1 else ""
        return f"{self.variant}-{self.workspace.slots}{pieces}"


#: Numbers of ranks: up to 6, and, as the largest take most of the time, up to 16 with --all.
SIZES = some(range(1, 7), of=[range(1, 7), range(7, 17)])
PLACES = [Place(variant, space) for space in WORKSPACES for variant in space.variants]
#: Piece p + 2 reuses the half of piece p: these numbers have all neighbourhoods of pieces.
LOOPS = [
    Place(place.variant, place.workspace, pieces)
    for place in PLACES
    if place.variant.looped
    for pieces in (2, 3, 5)
]
