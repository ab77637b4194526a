"""Context parallelism for model authors: attention over a sequence that is spread over ranks."""

from symm_cp.context_parallel.attention import all_gather_attention
from symm_cp.context_parallel.batch import shard_batch
from symm_cp.context_parallel.context import (
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
)
from symm_cp.context_parallel.load_balancers import (
    HeadTail,
    LoadBalancer,
    PerDocumentHeadTail,
    ProcessingTimeRoundRobin,
    Sequential,
)
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
    "shard_batch",
]
