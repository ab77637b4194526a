"""The gated delta rule over a sequence that is spread over ranks in order.

Sources: Yang et al., "Gated Delta Networks" (2024), for the form in chunks; Kimi Team, "Kimi
Linear" (2025), for a decay of each feature.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symm_cp.group.memory import GroupLike, group_name
from symm_cp.ops.error_reports import entry_point
from symm_cp.ops.recurrent.chunks import Decay
from symm_cp.ops.recurrent.gated import gated
from symm_cp.ops.recurrent.recurrence import Summary
from symm_cp.schedule.layout import SequenceLayout


def _summary(
    decay: Decay, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor
) -> Summary:
    strength = beta[..., None]
    weighted = k * strength
    attended, system = decay.pairs((q, weighted), k)
    # Within a chunk a position erases the writes of earlier ones: a triangular system.
    solved = torch.linalg.solve_triangular(
        system,
        torch.cat([v * strength, weighted * decay.since_begin], -1),
        upper=False,
        unitriangular=True,
    )
    values, erased = solved.split([v.shape[-1], k.shape[-1]], -1)
    return Summary(k * decay.to_end, values, erased, kept=(q, attended))


@entry_point()
def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    group: GroupLike,
    scale: float | None = None,
    chunk_size: int = 64,
    normalise: bool = False,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    layout: SequenceLayout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies the gated delta rule to a sequence that is spread over ranks in order.

    Same result as (per sample and head; with `normalise`, q and k of length 1)::

        S = torch.zeros(K, V)  # with several ranks: the last state of the rank before
        for t in range(length):
            if t in cu_seqlens:
                S = torch.zeros(K, V)
            S = g[t].exp() * S  # or g[t].exp().unsqueeze(-1) * S
            S = S + torch.outer(k[t], beta[t] * (v[t] - k[t] @ S))
            out[t] = scale * q[t] @ S

    Args:
        query, key: (B, S, H, K), S positions of this rank: any number, even 0.
        value: (B, S, heads, V); each head of keys serves `heads / H` consecutive ones.
        g: (B, S, heads), the logarithm of the decay, at most 0; or (B, S, heads, K), one for each
            feature of a key (Kimi Delta Attention).
        beta: (B, S, heads), how much a position overwrites.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.
        scale: by default 1 / sqrt(K).
        chunk_size: the number of positions to compute at once; with a decay of each feature,
            rounded up to a power of 2.
        normalise: divide queries and keys by their lengths.
        cu_seqlens: documents + 1 boundaries of packed documents, in positions of the whole
            sequence: each begins with a state of zeros. The same for all samples; a sequence of
            ints, or a 1-D tensor of int32 or int64.
        sizes: with `cu_seqlens`, the length of every rank's part; by default all are as long as
            this rank's.
        layout: which chunks of the sequence each rank holds, in ascending order, such as
            `symm_cp.HeadTail(length, W).layout`; by default parts are in rank order.

    Returns the output (B, S, heads, V) in the dtype of `query`, and the state (B, heads, K, V) at
    the end of this rank's part. Computed in float32, or float64 if an input is. Once
    differentiable; results have the same bits in every run. Inputs may be float64, float32,
    bfloat16 and float16, mixed. Raises `ValueError` or `TypeError` for arguments that do not fit,
    before any communication; `RuntimeError` when a peer fails or disagrees. Source:
    `chunk_gated_delta_rule` and `chunk_kda` of flash-linear-attention, and of transformers.
    """
    return gated(
        "gated_delta_rule",
        _summary,
        {"query": query, "key": key, "value": value, "g": g, "beta": beta},
        group_name(group),
        scale=scale,
        chunk_size=chunk_size,
        normalise=normalise,
        cu_seqlens=cu_seqlens,
        sizes=sizes,
        layout=layout,
    )
