"""The communication patterns: everything that a runtime may run, and that ``check`` covers.

One file per family, its direct and staged form side by side; ``pattern.py`` says what a pattern
is and lists the flags. Builders are private: only a registered ``Variant`` gives a schedule.
"""

from symm_cp.schedule.patterns.all_gather import ALL_GATHER, BACKGROUND_ALL_GATHER
from symm_cp.schedule.patterns.all_gather_and_combine import ALL_GATHER_AND_COMBINE
from symm_cp.schedule.patterns.all_gather_and_consume import ALL_GATHER_AND_CONSUME
from symm_cp.schedule.patterns.all_gather_and_poll import ALL_GATHER_AND_POLL
from symm_cp.schedule.patterns.all_reduce import ALL_REDUCE, BACKGROUND_ALL_REDUCE
from symm_cp.schedule.patterns.all_to_all import (
    ALL_TO_ALL,
    BACKGROUND_ALL_TO_ALL,
    JOINING_ALL_TO_ALL,
)
from symm_cp.schedule.patterns.consume_and_reduce_scatter import CONSUME_AND_REDUCE_SCATTER
from symm_cp.schedule.patterns.exchange_and_consume import EXCHANGE_AND_CONSUME
from symm_cp.schedule.patterns.pattern import (
    Channel,
    FormName,
    IssueOrder,
    Pattern,
    Variant,
    peers,
)
from symm_cp.schedule.patterns.produce_and_all_reduce import PRODUCE_AND_ALL_REDUCE
from symm_cp.schedule.patterns.produce_and_reduce_scatter import PRODUCE_AND_REDUCE_SCATTER
from symm_cp.schedule.patterns.reduce_scatter import BACKGROUND_REDUCE_SCATTER, REDUCE_SCATTER
from symm_cp.schedule.patterns.two_shot_all_reduce import (
    BACKGROUND_TWO_SHOT_ALL_REDUCE,
    TWO_SHOT_ALL_REDUCE,
)

#: All patterns.
PATTERNS: tuple[Pattern, ...] = (
    ALL_GATHER_AND_CONSUME,
    ALL_GATHER_AND_COMBINE,
    ALL_GATHER_AND_POLL,
    PRODUCE_AND_REDUCE_SCATTER,
    PRODUCE_AND_ALL_REDUCE,
    EXCHANGE_AND_CONSUME,
    CONSUME_AND_REDUCE_SCATTER,
    ALL_GATHER,
    ALL_REDUCE,
    TWO_SHOT_ALL_REDUCE,
    REDUCE_SCATTER,
    ALL_TO_ALL,
    JOINING_ALL_TO_ALL,
    BACKGROUND_ALL_GATHER,
    BACKGROUND_ALL_REDUCE,
    BACKGROUND_TWO_SHOT_ALL_REDUCE,
    BACKGROUND_REDUCE_SCATTER,
    BACKGROUND_ALL_TO_ALL,
)


def variants(channel: Channel, form: FormName, slots: int = 2) -> tuple[Variant, ...]:
    """The variants that may follow one another on a workspace with ``slots`` slots."""
    return tuple(
        variant
        for pattern in PATTERNS
        if pattern.channel == channel
        for variant in pattern.variants(form)
        if variant.min_slots <= slots
    )


__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "BACKGROUND_ALL_REDUCE",
    "BACKGROUND_ALL_TO_ALL",
    "BACKGROUND_TWO_SHOT_ALL_REDUCE",
    "ALL_GATHER_AND_COMBINE",
    "ALL_GATHER_AND_CONSUME",
    "ALL_GATHER_AND_POLL",
    "BACKGROUND_ALL_GATHER",
    "BACKGROUND_REDUCE_SCATTER",
    "CONSUME_AND_REDUCE_SCATTER",
    "PATTERNS",
    "PRODUCE_AND_ALL_REDUCE",
    "EXCHANGE_AND_CONSUME",
    "JOINING_ALL_TO_ALL",
    "PRODUCE_AND_REDUCE_SCATTER",
    "REDUCE_SCATTER",
    "TWO_SHOT_ALL_REDUCE",
    "Channel",
    "FormName",
    "IssueOrder",
    "Pattern",
    "Variant",
    "peers",
    "variants",
]
