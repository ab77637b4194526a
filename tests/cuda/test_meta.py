"""torch's CUDA attention kernels, called as on a GPU, but on tensors without data."""

from __future__ import annotations

import pytest
import torch

from symm_cp.ops import attention_kernels


@pytest.mark.parametrize("kind", ["flash", "cudnn", "efficient", "matmul"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [64, 50])
def test_attention_kernels(kind: str, groups: int, causal: bool, rows: int) -> None:
    B, H, E, G = 2, 4, 64, 4 // groups
    with torch.device("meta"):
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
