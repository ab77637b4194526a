"""How the heads of an attention are divided over the ranks, so that no head is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: The attribute of attention modules of transformers: how often `repeat_kv` repeats a key head.
REPEATS = "num_key_value_groups"


@dataclass(frozen=True)
class Heads:
    """How the heads of an attention are divided.

    `units` counts the units that stay whole: key heads with their query heads or, if there are
    fewer key heads than ranks, query heads, of which `shared_by` share a key head. `queries` counts
    the features of all query heads.
    """

    head_dim: int
    units: int
    queries: int
    shared_by: int = 1


def heads_of(
    attention: Any, colwise: Sequence[int], rowwise: Sequence[int], world_size: int
) -> Heads | None:
    """Returns the heads of an attention, None for other modules.

    `colwise` and `rowwise` are the output or input features of its linears with these kinds.
    """
    head_dim = getattr(attention, "head_dim", None)
    if not isinstance(head_dim, int):
        return None
    if not colwise or any(width % head_dim for width in colwise):
        return None
    units, queries = math.gcd(*(width // head_dim for width in colwise)), max(colwise)
    shared_by = queries // (units * head_dim)
    # Ranks can share key heads only where `REPEATS` can be changed to fit each rank's key heads.
    repeats = (
        set(colwise) == {queries, units * head_dim}
        and set(rowwise) == {queries}
        and getattr(attention, REPEATS, None) == shared_by > 1
    )
    if units < world_size and repeats:
        return Heads(head_dim, units * shared_by, queries, shared_by)
    return Heads(head_dim, units, queries)
