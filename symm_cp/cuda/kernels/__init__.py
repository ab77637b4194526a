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


def merge_attention(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merges attention over further keys into `out` and `lse` (see attention_merge.py)."""
    from symm_cp.cuda.kernels.attention_merge import merge_attention as kernel

    kernel(out, lse, part, part_lse)
