"""Ops that the oldest supported torch lacks."""

import torch

#: Ops of `torch.ops.symm_mem` without a schema here.
MISSING = frozenset(
    name for name in ("nccl_reduce_scatter_offset",) if not hasattr(torch.ops.symm_mem, name)
)
