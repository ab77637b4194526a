"""Plain collectives: complete when they return, or in the background."""

from symm_cp.ops.collectives import complete, low_contention

__all__ = ["complete", "low_contention"]
