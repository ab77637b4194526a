"""Symmetric-memory fused compute-collective ops for PyTorch.

Importing this package adds kernels: torch's symmetric memory and the ops of `torch.ops.symm_mem`
work on CPU tensors from then on. It builds its native part once for the installed torch; without a
C++ compiler the import succeeds, and the first use says what to install.
"""

from __future__ import annotations

import sys as _sys

from symm_cp import native as _native
from symm_cp import ops as _ops
from symm_cp.memory import get_workspace, reserve
from symm_cp.ops.low_contention import low_contention_all_gather, low_contention_reduce_scatter
from symm_cp.ops.matmul import all_gather_matmul, matmul_reduce_scatter
from symm_cp.ops.scaled_matmul import scaled_all_gather_matmul, scaled_matmul_reduce_scatter

__version__ = "0.1.0"

__all__ = [
    "all_gather_matmul",
    "get_workspace",
    "low_contention_all_gather",
    "low_contention_reduce_scatter",
    "matmul_reduce_scatter",
    "reserve",
    "scaled_all_gather_matmul",
    "scaled_matmul_reduce_scatter",
]

_ops.register()
try:
    _native.load()
except _native.BuildError as _error:
    print(f"symm_cp: {_error}", file=_sys.stderr)
