"""Which patterns share a workspace: every builder with every set of its options, by channel.

A channel is a workspace with its own slots, flags and call numbers. Patterns of a channel follow
one another in any order on the same slots, so they must be right in every mix, not only alone.
The two channels never meet: the calling thread works on one, the copy engine on the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

from symm_cp.schedule import builders, staged
from symm_cp.schedule.steps import Schedule


@dataclass(frozen=True, slots=True)
class Pattern:
    """A builder together with its options, except for the number of slots."""

    builder: Callable[..., Schedule]
    options: tuple[tuple[str, bool], ...] = ()

    def schedules(self, world_size: int, slots: int = 2) -> tuple[Schedule, ...]:
        """The schedules of all ranks."""
        return builders.all_ranks(self.builder, world_size, slots=slots, **dict(self.options))

    def __str__(self) -> str:
        name: str = getattr(self.builder, "__name__", repr(self.builder))
        chosen = ",".join(option for option, value in self.options if value)
        return f"{name}({chosen})"


def _patterns(builder: Callable[..., Schedule], *options: str) -> tuple[Pattern, ...]:
    values = product((False, True), repeat=len(options))
    return tuple(Pattern(builder, tuple(zip(options, chosen, strict=True))) for chosen in values)


def _background_patterns(builder: Callable[..., Schedule]) -> tuple[Pattern, ...]:
    # Not all combinations: in place nothing is staged.
    return (
        Pattern(builder),
        Pattern(builder, (("staged", True),)),
        Pattern(builder, (("in_place", True),)),
    )


#: Patterns by channel: "sync" runs in lane "compute", "async" in lane "copy".
CHANNELS: Mapping[str, tuple[Pattern, ...]] = MappingProxyType(
    {
        "sync": (
            *_patterns(builders.all_gather_and_consume, "in_place", "gather", "accumulate"),
            *_patterns(builders.produce_and_reduce_scatter),
            *_patterns(builders.consume_and_reduce_scatter, "ring"),
            *_patterns(builders.one_shot_all_reduce, "in_place"),
            *_patterns(builders.two_shot_all_reduce),
            *_patterns(builders.all_to_all, "in_place"),
        ),
        "async": (
            *_background_patterns(builders.all_gather),
            *_background_patterns(builders.reduce_scatter),
        ),
    }
)


def staged_channels(slots: int = 2) -> Mapping[str, tuple[Pattern, ...]]:
    """The same for machines with copy engines: "sync" runs in both lanes, "async" in lane "copy".

    With one slot there is no pattern in place.
    """
    in_place = ("in_place",) if slots > 1 else ()
    return {
        "sync": (
            *_patterns(staged.gather_and_consume, *in_place, "accumulate", "bounded"),
            *_patterns(staged.gather_and_consume, *in_place, "keep")[1::2],
            *_patterns(staged.gather_and_combine, *in_place),
            *_patterns(staged.produce_and_scatter),
            *_patterns(staged.consume_and_scatter),
            *_patterns(staged.consume_and_pass_on),
        ),
        "async": (
            *_patterns(staged.background_gather, *in_place),
            *_patterns(staged.background_scatter, *in_place),
        ),
    }
