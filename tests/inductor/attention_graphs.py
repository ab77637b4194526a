"""Functions whose graphs have attention over gathered keys and values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.inductor.graphs import gather


def attend(g: Any, q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, gather(k, 2, g), gather(v, 2, g))


def attend_stacked(g: Any, q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, *gather(torch.stack([k, v]), 3, g).unbind(0))


def attend_joined(g: Any, q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, *gather(torch.cat([k, v], -1), 2, g).chunk(2, -1))


def attend_causal(g: Any, q: Any, k: Any, v: Any) -> Any:
    n = q.shape[2]
    rows = torch.arange(n) + dist.get_rank(g) * n
    mask = rows[:, None] >= torch.arange(n * dist.get_world_size(g))
    return F.scaled_dot_product_attention(q, gather(k, 2, g), gather(v, 2, g), mask)


def attend_upper_left(g: Any, q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, gather(k, 2, g), gather(v, 2, g), is_causal=True)


def attend_window(g: Any, q: Any, k: Any, v: Any) -> Any:
    n = q.shape[2]
    offset = torch.arange(n * dist.get_world_size(g)) - torch.arange(n)[:, None]
    mask = offset.abs() < 3
    return F.scaled_dot_product_attention(q, gather(k, 2, g), gather(v, 2, g), mask)


def attend_as(kernel: str, g: Any, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """As `F.scaled_dot_product_attention` is traced on CUDA."""
    full = gather(k, 2, g), gather(v, 2, g)
    if not torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(q, *full, mask)
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    if kernel == "flash":
        return op(q, *full)[0]
    if mask is not None:
        heads = (*q.shape[:3], full[0].shape[2])
        bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
        mask = F.pad(bias, (0, -mask.shape[-1] % 16))[:, : mask.shape[-1]].expand(heads)
    return op(q, *full, mask, True)[0]


def attend_as_causal(kernel: str, g: Any, *tensors: Any) -> Any:
    n = tensors[0].shape[2]
    rows = torch.arange(n) + dist.get_rank(g) * n
    return attend_as(
        kernel, g, *tensors, mask=rows[:, None] >= torch.arange(n * dist.get_world_size(g))
    )


def attend_over_heads(g: Any, q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, gather(k, 1, g), gather(v, 1, g))
