"""Plain collectives: complete when they return, or in the background; and torch's GPU-only ops."""

from symm_cp.ops.collectives import complete, gpu_only, low_contention

__all__ = ["complete", "gpu_only", "low_contention"]
