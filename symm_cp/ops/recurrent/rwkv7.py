"""RWKV-7's recurrence over a sequence that is spread over ranks in order.

A position reads the state with one vector (`a`) and writes what it read with another (`b`), so its
effect is a diagonal plus any matrix of rank 1; the delta rule's erases what its own key finds.

Source: Peng et al., "RWKV-7 Goose" (2025); the form in chunks is that of flash-linear-attention's
`generalized_delta_rule/dplr`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from symm_cp.group.memory import GroupLike, group_name
from symm_cp.ops.error_reports import entry_point
from symm_cp.ops.recurrent.chunks import Decay
from symm_cp.ops.recurrent.recurrence import Summary, check_tensors, recur
from symm_cp.schedule.layout import SequenceLayout

_OP = "rwkv7"


def _summary(
    scale: float,
    decay: Decay,
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
) -> Summary:
    r = scale * r
    # A position reads what earlier ones of its chunk wrote, read values included: a triangular
    # system.
    solved = torch.linalg.solve_triangular(
        -decay.pairs_before(a, b),
        torch.cat([decay.pairs_before(a, k) @ v, a * decay.before], -1),
        upper=False,
        unitriangular=True,
    )
    read, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    return Summary(
        keys=torch.cat([b, k], 2) * torch.cat([decay.to_end] * 2, 2),
        values=torch.cat([read, v], 2),
        erased=torch.cat([-reads, torch.zeros_like(reads)], 2),
        kept=(r, *decay.pairs((r,), b), *decay.pairs((r,), k)),
    )


def _local(
    decay: Decay,
    before: torch.Tensor,
    written: torch.Tensor,
    r: torch.Tensor,
    of_read: torch.Tensor,
    of_keys: torch.Tensor,
) -> torch.Tensor:
    return (r * decay.since_begin) @ before + torch.cat([of_read, of_keys], -1) @ written


@entry_point()
def rwkv7(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: GroupLike,
    scale: float = 1.0,
    chunk_size: int = 32,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    layout: SequenceLayout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies RWKV-7's recurrence to a sequence that is spread over ranks in order.

    Same result as (per sample and head)::

        S = torch.zeros(K, V)  # with several ranks: the last state of the rank before
        for t in range(length):
            if t in cu_seqlens:
                S = torch.zeros(K, V)
            S = w[t].exp().unsqueeze(-1) * S + torch.outer(b[t], a[t] @ S)
            S = S + torch.outer(k[t], v[t])
            out[t] = scale * r[t] @ S

    Args:
        r, k, a, b: (B, S, H, K), S positions of this rank: any number, even 0. With the names of
            the paper `a` is minus the normalised key, and `b` that key times the learning rate.
        w: (B, S, H, K), the logarithm of the decay, at most 0.
        v: (B, S, H, V).
        group, chunk_size, cu_seqlens, sizes, layout: as in `gated_delta_rule`.
        scale: of the output.

    Results, dtypes and errors are as in `gated_delta_rule`. Source: `chunk_rwkv7` of
    flash-linear-attention.
    """
    named = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}
    check_tensors(_OP, named, chunk_size)
    for name, tensor in named.items():
        shape = r.shape if name != "v" else (*r.shape[:3], tensor.shape[-1] if tensor.dim() else 0)
        if tensor.dim() != 4 or tensor.shape != torch.Size(shape):
            raise ValueError(
                f"{_OP}: {name} {list(tensor.shape)} must be (B, S, H, K), v (B, S, H, V), as r "
                f"{list(r.shape)}"
            )
    if not torch.compiler.is_compiling():  # shorter parts need no padding to whole chunks
        chunk_size = min(chunk_size, max(1, r.shape[1]))
    return recur(
        _OP, partial(_summary, scale), _local, (r, k, v, a, b), w, group_name(group),
        chunk_size=chunk_size, cu_seqlens=cu_seqlens, sizes=sizes, layout=layout,
    )  # fmt: skip
