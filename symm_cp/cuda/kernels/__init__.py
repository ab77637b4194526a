"""Kernels in Triton, for CUDA. Triton is imported when one of them is first called.

They also run on CPU tensors in Triton's interpreter (`TRITON_INTERPRET=1`), where tests check their
results.

No module here may have the name of a function: importing it would replace the function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def add_rows(rows: torch.Tensor, out: torch.Tensor, *, mean: bool = False) -> None:
    """Writes the sum over the first dimension of `rows` to `out`, in order (see row_sums.py)."""
    from symm_cp.cuda.kernels.row_sums import add_rows as kernel

    kernel(rows, out, mean=mean)


def signal(bases: torch.Tensor, offset: int, first: int, count: int, value: int) -> None:
    """Raises a flag at `count` ranks from `first` on to `value` (see signals.py)."""
    from symm_cp.cuda.kernels.signals import signal as kernel

    kernel(bases, offset, first, count, value)


def wait(flags: torch.Tensor, first: int, count: int, needed: int, *, reset: bool) -> None:
    """Waits for the flags of `count` ranks from `first` on (see signals.py)."""
    from symm_cp.cuda.kernels.signals import wait as kernel

    kernel(flags, first, count, needed, reset=reset)


def merge_attention(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merges attention over further keys into `out` and `lse` (see attention_merge.py)."""
    from symm_cp.cuda.kernels.attention_merge import merge_attention as kernel

    kernel(out, lse, part, part_lse)
