"""Context parallelism for model authors: attention over a sequence that is spread over ranks."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from symm_cp.context_parallel.attention import all_gather_attention
from symm_cp.context_parallel.batch import shard_batch
from symm_cp.context_parallel.context import (
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
)
from symm_cp.context_parallel.heads import (
    heads_to_sequence,
    sequence_to_heads,
    ulysses_output_projection,
    ulysses_projection,
)
from symm_cp.context_parallel.load_balancers import (
    HeadTail,
    LoadBalancer,
    PerDocumentHeadTail,
    ProcessingTimeRoundRobin,
    Sequential,
)

if _TYPE_CHECKING:
    from symm_cp.context_parallel.style import ContextParallel

__all__ = [
    "ContextParallel",
    "HeadTail",
    "LoadBalancer",
    "PerDocumentHeadTail",
    "ProcessingTimeRoundRobin",
    "Sequential",
    "all_gather_attention",
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "heads_to_sequence",
    "sequence_to_heads",
    "shard_batch",
    "ulysses_output_projection",
    "ulysses_projection",
]


def __getattr__(name: str) -> object:
    # Imported when asked for: torch's styles bring DTensor, which takes half a second.
    if name == "ContextParallel":
        from symm_cp.context_parallel import style

        return style.ContextParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
