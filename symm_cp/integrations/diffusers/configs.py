"""How a `ContextParallelConfig` of diffusers spreads sequences, as our ops take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffusers.models._modeling_parallel import ContextParallelConfig

from symm_cp.ops.attention.methods import Method, split_by

_OP = "enable_parallelism"
_KEPT = "_symm_cp_spread"


@dataclass(frozen=True)
class Spread:
    """The group over which sequences are spread, and how its ranks attend to all of it."""

    group: str
    method: Method
    #: Whether the ranks hold parts of different lengths.
    uneven: bool


def spread_of(config: ContextParallelConfig) -> Spread:
    """Returns how a config spreads sequences; kept with it, for graphs that hold no meshes."""
    kept: Spread | None = getattr(config, _KEPT, None)
    if kept is None:
        kept = _spread_of(config)
        setattr(config, _KEPT, kept)
    return kept


def _spread_of(config: ContextParallelConfig) -> Spread:
    mesh: Any
    method: Any
    if config.ulysses_degree == 1:
        mesh, method = config._ring_mesh, "allgather"
    elif config.ring_degree == 1:
        mesh, method = config._ulysses_mesh, "ulysses"
    else:
        mesh, method = config._mesh["ring", "ulysses"], ("allgather", "ulysses")
    return Spread(*split_by(_OP, mesh, method), config.ring_anything or config.ulysses_anything)
