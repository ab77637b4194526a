"""What the variants are called in tables."""

from __future__ import annotations

DENSE, FUSED, COMPUTE = "one process", "fused", "compute alone"


def unfused_over(backend: str) -> str:
    """Returns the name of the variant with collectives over a backend of torch.distributed."""
    return f"unfused ({backend})"


def dense_with(threads: int) -> str:
    """Returns the name of the one process with this many threads."""
    return DENSE if threads == 1 else f"{DENSE}, {threads} threads"


def is_dense(name: str) -> bool:
    """Tells whether a variant is the one process, with however many threads."""
    return name.startswith(DENSE)


def threads_of_name(name: str) -> int:
    """Returns how many threads the one process of that name has."""
    return 1 if name == DENSE else int(name.split()[-2])
