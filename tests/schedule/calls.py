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
#: With the slots that runtimes use.
WORKSPACES = [
    *(Workspace(channel, "direct", 2) for channel in CHANNELS),
    *(Workspace(channel, "staged", slots) for channel in CHANNELS for slots in (1, 2)),
]


class Place(NamedTuple):
    """A variant on a workspace."""

    variant: Variant
    workspace: Workspace

    def __str__(self) -> str:
        return f"{self.variant}-{self.workspace.slots}"


PLACES = [Place(variant, space) for space in WORKSPACES for variant in space.variants]
