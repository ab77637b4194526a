"""What the tests of context parallelism share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

Tensors = list[torch.Tensor]

# Results are added up in another order than in one process; float64 leaves nothing else to see.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))


def whole(seed: int, length: int, *, heads: int = 4, kv_heads: int = 4) -> Tensors:
    """Queries, keys, values of the whole sequence, and a gradient of the output; on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    counts = (heads, kv_heads, kv_heads, heads)
    return [
        torch.randn(2, count, length, 16, dtype=torch.float64, generator=generator)
        for count in counts
    ]


def dense(tensors: Tensors, *, is_causal: bool = True) -> Tensors:
    """The output of one process, and the gradients of queries, keys and values."""
    q, k, v = (t.detach().clone().requires_grad_() for t in tensors[:3])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one process, written out, and its log-sum-exp; zeros for rows without a key."""
    k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:, None])
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    return (scores - finite.unsqueeze(-1)).exp() @ v, lse


def assert_all_close(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)
