"""Linear attention with a decay over a sequence that is spread over ranks in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symm_cp.group.memory import GroupLike, group_name
from symm_cp.ops.error_reports import entry_point
from symm_cp.ops.recurrent.chunks import Decay
from symm_cp.ops.recurrent.gated import gated
from symm_cp.ops.recurrent.recurrence import Summary
from symm_cp.schedule.layout import SequenceLayout


def _summary(decay: Decay, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Summary:
    return Summary(k * decay.to_end, v, kept=(q, *decay.pairs((q,), k)))


@entry_point()
def gated_linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    *,
    group: GroupLike,
    scale: float | None = None,
    chunk_size: int = 64,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    layout: SequenceLayout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies linear attention with a decay to a sequence that is spread over ranks in order.

    Same result as (per sample and head)::

        S = torch.zeros(K, V)  # with several ranks: the last state of the rank before
        for t in range(length):
            if t in cu_seqlens:
                S = torch.zeros(K, V)
            S = g[t].exp() * S  # or g[t].exp().unsqueeze(-1) * S
            S = S + torch.outer(k[t], v[t])
            out[t] = scale * q[t] @ S

    The scan of Mamba 2 is a call with `C`, `B`, `x * dt` and `A * dt`, and `scale=1.0`.

    Arguments, results and errors are as in `gated_delta_rule`, which also erases. Source:
    `mamba_chunk_scan_combined` of mamba_ssm, `chunk_simple_gla` and `chunk_gla` of
    flash-linear-attention.
    """
    named = {"query": query, "key": key, "value": value, "g": g}
    return gated(
        "gated_linear_attention",
        _summary,
        named,
        group_name(group),
        scale=scale,
        chunk_size=chunk_size,
        cu_seqlens=cu_seqlens,
        sizes=sizes,
        layout=layout,
    )
