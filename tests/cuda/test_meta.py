"""torch's CUDA attention kernels, called as on a GPU, but on tensors without data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from symm_cp.ops.attention import kernels as attention_kernels

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


class Strict(TorchDispatchMode):
    """Flash attention as it is on a GPU: what the kernels there refuse, and shapes do not tell."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (_FLASH, _FLASH_BACKWARD):
            tensors = [a for a in args if isinstance(a, torch.Tensor) and a.dim() == 4]
            assert all(t.shape[-1] % 8 == 0 and t.stride(-1) == 1 for t in tensors)
        if func is _FLASH_BACKWARD:
            # A tensor that is there stands for a nested batch.
            assert args[6] is args[7] is None
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["flash", "cudnn", "efficient", "matmul"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "features"), [(64, 64), (50, 20)])
def test_attention_kernels(kind: str, groups: int, causal: bool, rows: int, features: int) -> None:
    B, H, E, G = 2, 4, features, 4 // groups
    with Strict(), torch.device("meta"):
        q, grad = (torch.empty(B, rows, H, E, dtype=torch.bfloat16).transpose(1, 2) for _ in "qg")
        k, v = (torch.empty(B, G, rows, E, dtype=torch.bfloat16) for _ in "kv")
        masks = [None, torch.empty(rows, rows)]
        for mask in masks if kind in ("efficient", "matmul") and not causal else masks[:1]:
            out, lse = attention_kernels.forward(q, k, v, mask, causal=causal, scale=0.5, kind=kind)
            assert out.shape == q.shape
            assert lse.shape == (B, H, rows)
            assert lse.dtype == torch.float32
            grads = attention_kernels.backward(
                grad, q, k, v, out, lse, mask, causal=causal, scale=0.5, kind=kind
            )
            assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
