"""Functions whose graphs have attention over gathered keys and values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from tests.inductor.graphs import ATTENTION, Case, gather


def attend(group: Any, q: Any, k: Any, v: Any, mask: Any = None, **kwargs: Any) -> Any:
    full = gather(k, 2, group), gather(v, 2, group)
    return F.scaled_dot_product_attention(q, *full, mask, **kwargs)


def causal(group: Any, q: Any) -> Any:
    n = q.shape[2]
    rows = torch.arange(n) + dist.get_rank(group) * n
    return rows[:, None] >= torch.arange(n * dist.get_world_size(group))


def window(group: Any, q: Any) -> Any:
    n = q.shape[2]
    return (torch.arange(n * group.size()) - torch.arange(n)[:, None]).abs() < 3


def attend_as(kernel: str, group: Any, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """Attends with the ops that `F.scaled_dot_product_attention` becomes in traces on CUDA."""
    if not torch.compiler.is_compiling():
        return attend(group, q, k, v, mask)
    full = gather(k, 2, group), gather(v, 2, group)
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    if kernel == "flash":
        return op(q, *full)[0]
    if mask is not None:
        heads = (*q.shape[:3], full[0].shape[2])
        bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
        mask = F.pad(bias, (0, -mask.shape[-1] % 16))[:, : mask.shape[-1]].expand(heads)
    return op(q, *full, mask, True)[0]


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


def graphs(W: int) -> dict[str, Case]:
    sdpa, heads = F.scaled_dot_product_attention, (2, 3, 4, 8)
    fused: dict[str, Any] = {
        "": attend,
        ", stacked": lambda g, q, k, v: sdpa(q, *gather(torch.stack([k, v]), 3, g).unbind(0)),
        ", joined": lambda g, q, k, v: sdpa(q, *gather(torch.cat([k, v], -1), 2, g).chunk(2, -1)),
        ", causal": lambda g, q, k, v: attend(g, q, k, v, causal(g, q)),
        **{f", {name}": partial(attend_as, name) for name in ("flash", "cudnn", "efficient")},
        ", efficient, causal": lambda g, q, k, v: attend_as("efficient", g, q, k, v, causal(g, q)),
    }
    left: dict[str, tuple[Any, str]] = {
        "upper left": (lambda g, q, k, v: attend(g, q, k, v, is_causal=True), "is_causal"),
        "window": (lambda g, q, k, v: attend(g, q, k, v, window(g, q)), "not the causal one"),
        "flex": (
            lambda g, q, k, v: flex_attention(q, gather(k, 2, g), gather(v, 2, g)),
            "it feeds flex_attention, which is fused only",
        ),
    }
    return {
        **{f"attention{name}": Case(fn, (heads,) * 3, (ATTENTION,), grad=True)
           for name, fn in fused.items()},
        **{f"attention{name}, no grad": Case(fused[name], (heads,) * 3, (ATTENTION,))
           for name in ("", ", flash")},
        **{f"attention, {name}": Case(fn, (heads,) * 3, reasons=(reason,))
           for name, (fn, reason) in left.items()},
        "attention, in turn": Case(
            attend_in_turn, (heads,) * 3, grad=True,
            reasons=("but not as all keys or values of an attention that is fused",),
        ),
        "attention, over heads": Case(
            lambda g, q, k, v: sdpa(q, gather(k, 1, g), gather(v, 1, g)),
            ((2, 3 * W, 4, 8), heads, heads), reasons=("along the sequence",),
        ),
    }  # fmt: skip
