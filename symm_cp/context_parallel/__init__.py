"""Context parallelism for model authors."""

from symm_cp.context_parallel.load_balancers import (
    HeadTail,
    LoadBalancer,
    PerDocumentHeadTail,
    ProcessingTimeRoundRobin,
    Sequential,
)

__all__ = [
    "HeadTail",
    "LoadBalancer",
    "PerDocumentHeadTail",
    "ProcessingTimeRoundRobin",
    "Sequential",
]
