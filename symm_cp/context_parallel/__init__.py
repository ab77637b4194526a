"""Context parallelism for model authors: attention over a sequence that is spread over ranks.

`symm_cp.context_parallel` is this package and, called, its context manager of the same name.
"""

import sys as _sys
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING

from symm_cp.context_parallel.attention import all_gather_attention
from symm_cp.context_parallel.batch import shard_batch
from symm_cp.context_parallel.context import (
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
)
from symm_cp.context_parallel.exchanges import (
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
from symm_cp.context_parallel.recipe import TrainingStep, training_step

if _TYPE_CHECKING:
    from symm_cp.context_parallel.style import ContextParallel

__all__ = [
    "ContextParallel",
    "HeadTail",
    "LoadBalancer",
    "PerDocumentHeadTail",
    "ProcessingTimeRoundRobin",
    "Sequential",
    "TrainingStep",
    "all_gather_attention",
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "heads_to_sequence",
    "sequence_to_heads",
    "shard_batch",
    "training_step",
    "ulysses_output_projection",
    "ulysses_projection",
]


def __getattr__(name: str) -> object:
    # Imported on first use: torch's styles import DTensor, which takes half a second.
    if name == "ContextParallel":
        from symm_cp.context_parallel import style

        return style.ContextParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _CallableModule(_ModuleType):
    __call__ = staticmethod(context_parallel)
    __wrapped__ = staticmethod(context_parallel)  # has inspect.signature show its arguments


_sys.modules[__name__].__class__ = _CallableModule
