"""Calls of all variants, for the proofs of this folder."""

from __future__ import annotations

from typing import NamedTuple

from symm_cp.schedule import patterns
from symm_cp.schedule.patterns import Channel, FormName, Variant

#: All eight orders of three consecutive calls of two variants; a slot comes back within three.
MIX = (0, 0, 0, 1, 0, 1, 1, 1, 0, 0)


class Workspace(NamedTuple):
    """What variants share: they follow one another on it in any order."""

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
#: Three slots are not used; they are legal, and the proofs hold for them.
WORKSPACES = [
    *(Workspace(channel, "direct", slots) for channel in CHANNELS for slots in (2, 3)),
    *(Workspace(channel, "staged", slots) for channel in CHANNELS for slots in (1, 2)),
]


class Place(NamedTuple):
    """A variant on a workspace."""

    variant: Variant
    workspace: Workspace

    def __str__(self) -> str:
        return f"{self.variant}-{self.workspace.slots}"


PLACES = [Place(variant, space) for space in WORKSPACES for variant in space.variants]
#: Those with as few slots as runtimes have.
FEWEST_SLOTS = [place for place in PLACES if place.workspace.slots < 3]
