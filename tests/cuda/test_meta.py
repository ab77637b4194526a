"""torch's CUDA attention kernels, called as on a GPU, but on tensors without data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from symm_cp.ops.attention import kernels as attention_kernels

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
_BACKWARD = {
    "flash": _FLASH_BACKWARD,
    "cudnn": _CUDNN_BACKWARD,
    "efficient": torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
}


class Strict(TorchDispatchMode):
    """Refuses arguments that the kernels refuse on a GPU, but accept without data."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.called.append(func)
        if func in (_FLASH, _FLASH_BACKWARD):
            tensors = [a for a in args if isinstance(a, torch.Tensor) and a.dim() == 4]
            assert all(t.shape[-1] % 8 == 0 and t.stride(-1) == 1 for t in tensors)
        if func is _FLASH_BACKWARD:
            # With a tensor here the kernel would expect a nested batch.
            assert args[6] is args[7] is None
        if func is _CUDNN_BACKWARD:
            grad_out, query, key, value, out, lse = args[:6]
            # torch caches plans by the strides of query, key and value alone: an output or gradient
            # with other strides would get a plan that does not fit.
            assert query.stride() == out.stride() == grad_out.stride()
            assert 0 not in grad_out.stride()
            assert lse.is_contiguous()
            assert all(t.stride(-1) == 1 for t in (query, key, value))
            assert args[8:11] == (None, None, None), "no mask, and no nested batch"
            assert all(seed.dtype == torch.int64 for seed in args[6:8])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["flash", "cudnn", "efficient", "matmul"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "features"), [(64, 64), (50, 20)])
def test_attention_kernels(kind: str, groups: int, causal: bool, rows: int, features: int) -> None:
    B, H, E, G = 2, 4, features, 4 // groups
    with Strict() as strict, torch.device("meta"):
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
            if kind in _BACKWARD:
                assert _BACKWARD[kind] in strict.called


@pytest.mark.parametrize("grad", ["rows first", "heads first", "broadcast"])
@pytest.mark.parametrize("rows", [slice(0, 64), slice(32, 64)])
def test_gradients_by_cudnn_of_any_layout(grad: str, rows: slice) -> None:
    """Gradients of whole shards and of some of their rows, with lse laid out as in `Backward`."""
    B, H, S, E = 1, 4, 64, 64
    with Strict(), torch.device("meta"):
        q, k, v, out = (
            torch.empty(B, S, H, E, dtype=torch.bfloat16).transpose(1, 2) for _ in "qkvo"
        )
        grad_out = {
            "rows first": torch.empty_like(q),
            "heads first": torch.empty(B, H, S, E, dtype=torch.bfloat16),
            "broadcast": torch.empty(1, 1, 1, E, dtype=torch.bfloat16).expand(B, H, S, E),
        }[grad]
        lse = torch.empty(B, S, H).transpose(1, 2)
        part = [t[:, :, rows] for t in (grad_out, q, k, v, out, lse)]
        grads = attention_kernels.backward(*part, None, causal=True, scale=None, kind="cudnn")
        assert [g.shape for g in grads] == [t.shape for t in part[1:4]]
