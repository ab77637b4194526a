"""Functions whose graphs have attention over gathered keys and values."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from tests.inductor.graphs import ATTENTION, GraphCase, gather


def attend(group: Any, q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, gather(k, 2, group), gather(v, 2, group))


def attend_stacked(group: Any, q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, *gather(torch.stack([k, v]), 3, group).unbind(0))


def attend_joined(group: Any, q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, *gather(torch.cat([k, v], -1), 2, group).chunk(2, -1))


def attend_causal(group: Any, q: Any, k: Any, v: Any) -> Any:
    n = q.shape[2]
    rows = torch.arange(n) + dist.get_rank(group) * n
    mask = rows[:, None] >= torch.arange(n * dist.get_world_size(group))
    return F.scaled_dot_product_attention(q, gather(k, 2, group), gather(v, 2, group), mask)


def attend_upper_left(group: Any, q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(
        q, gather(k, 2, group), gather(v, 2, group), is_causal=True
    )


def attend_flex(group: Any, q: Any, k: Any, v: Any) -> Any:
    return flex_attention(q, gather(k, 2, group), gather(v, 2, group))


def attend_window(group: Any, q: Any, k: Any, v: Any) -> Any:
    n = q.shape[2]
    offset = torch.arange(n * dist.get_world_size(group)) - torch.arange(n)[:, None]
    mask = offset.abs() < 3
    return F.scaled_dot_product_attention(q, gather(k, 2, group), gather(v, 2, group), mask)


def attend_as(kernel: str, group: Any, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """Attends with the ops that `F.scaled_dot_product_attention` becomes in traces on CUDA."""
    full = gather(k, 2, group), gather(v, 2, group)
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


def attend_as_causal(kernel: str, group: Any, *tensors: Any) -> Any:
    n = tensors[0].shape[2]
    rows = torch.arange(n) + dist.get_rank(group) * n
    return attend_as(
        kernel, group, *tensors, mask=rows[:, None] >= torch.arange(n * dist.get_world_size(group))
    )


def attend_over_heads(group: Any, q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, gather(k, 1, group), gather(v, 1, group))


def attend_in_turn(group: Any, q: Any, k: Any, v: Any) -> Any:
    """Attends rank by rank to keys and values in one flat buffer, like diffusers' ring."""
    both = gather(torch.cat([k.flatten(), v.flatten()]), 0, group)
    attended = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, *(tensor.reshape_as(k) for tensor in part.chunk(2))
        )
        for part in both.chunk(group.size())
    ]
    shares = torch.stack([lse for _, lse in attended]).softmax(0).unsqueeze(-1)
    return (shares * torch.stack([out for out, _ in attended])).sum(0)


HEADS = (2, 3, 4, 8)


def graphs(W: int) -> dict[str, GraphCase]:
    return {
        "attention": GraphCase(attend, (HEADS,) * 3, (ATTENTION,), grad=True),
        "attention, no grad": GraphCase(attend, (HEADS,) * 3, (ATTENTION,)),
        "attention, stacked": GraphCase(attend_stacked, (HEADS,) * 3, (ATTENTION,), grad=True),
        "attention, joined": GraphCase(attend_joined, (HEADS,) * 3, (ATTENTION,), grad=True),
        "attention, causal": GraphCase(attend_causal, (HEADS,) * 3, (ATTENTION,), grad=True),
        **{
            f"attention, {kernel}": GraphCase(
                functools.partial(attend_as, kernel),
                (HEADS,) * 3,
                (ATTENTION,),
                grad=True,
            )
            for kernel in ("flash", "cudnn", "efficient")
        },
        "attention, flash, no grad": GraphCase(
            functools.partial(attend_as, "flash"), (HEADS,) * 3, (ATTENTION,)
        ),
        "attention, efficient, causal": GraphCase(
            functools.partial(attend_as_causal, "efficient"),
            (HEADS,) * 3,
            (ATTENTION,),
            grad=True,
        ),
        "attention, upper left": GraphCase(attend_upper_left, (HEADS,) * 3, reasons=("is_causal",)),
        "attention, window": GraphCase(
            attend_window, (HEADS,) * 3, reasons=("not the causal one",)
        ),
        "attention, flex": GraphCase(
            attend_flex, (HEADS,) * 3, reasons=("it feeds flex_attention, which is fused only",)
        ),
        "attention, in turn": GraphCase(
            attend_in_turn,
            (HEADS,) * 3,
            reasons=("but not as all keys or values of an attention that is fused",),
            grad=True,
        ),
        "attention, over heads": GraphCase(
            attend_over_heads,
            ((2, 3 * W, 4, 8), HEADS, HEADS),
            reasons=("along the sequence",),
        ),
    }
