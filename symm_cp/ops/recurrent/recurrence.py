"""Recurrences of a state for each head over a sequence that is spread over ranks in order.

Shapes: B samples, S positions of this rank, H heads of values (a multiple of the heads of keys),
K and V features; R = B * H rows that are independent of each other, N chunks of C positions.

Only the states around the chunks (`states`) need other ranks; all else is computed from this rank's
part, before and after them.

Sources: Yang et al., "Gated Delta Networks" (2024), for the form in chunks; Kimi Team, "Kimi
Linear" (2025), for a decay of each feature; Dao and Gu, "Transformers are SSMs" (2024), for the
form without erasing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symm_cp.ops.recurrent.chunks import (
    counts_of,
    in_chunks,
    out_of_chunks,
    pairs,
    pairs_by_feature,
)
from symm_cp.ops.recurrent.documents import Seen, documents_of, seen_within
from symm_cp.ops.recurrent.fragments import fragments_of
from symm_cp.ops.recurrent.states import before_chunks
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.tensors.dtypes import FLOATING, one_of


def _check(op: str, named: dict[str, torch.Tensor], chunk_size: int) -> None:
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {name} is {tensor!r}, must be a tensor")
        if tensor.dtype not in FLOATING:
            raise TypeError(f"{op}: {name} is {tensor.dtype}, must be {one_of(FLOATING)}")
        device = named["query"].device
        if tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device} and query on {device}")
    query, key, value, g = (named[name] for name in ("query", "key", "value", "g"))
    if key.dim() != 4 or value.dim() != 4 or query.shape != key.shape:
        raise ValueError(
            f"{op}: query {list(query.shape)} and key {list(key.shape)} must be (B, S, H, K), "
            f"value {list(value.shape)} (B, S, heads, V)"
        )
    heads = key.shape[2]
    if value.shape[:2] != key.shape[:2] or heads == 0 or value.shape[2] % heads != 0:
        raise ValueError(
            f"{op}: value {list(value.shape)} must have the batch and length of key "
            f"{list(key.shape)}, and a multiple of its heads"
        )
    of_heads = value.shape[:3]
    beta = named.get("beta")
    if beta is not None and beta.shape != of_heads:
        raise ValueError(
            f"{op}: beta {list(beta.shape)} must be {list(of_heads)}: one number for each "
            "position and head of value"
        )
    of_features = (*of_heads, key.shape[3])
    if g.shape not in (of_heads, of_features):
        raise ValueError(
            f"{op}: g {list(g.shape)} must be {list(of_heads)} or {list(of_features)}: one number "
            "for each position and head of value, or one for each feature of its key"
        )
    if chunk_size < 1:
        raise ValueError(f"{op}: {chunk_size=} must be at least 1")


def _normalised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + 1e-6)


def recur(
    op: str,
    named: dict[str, torch.Tensor],
    group_name: str,
    *,
    scale: float | None,
    chunk_size: int,
    cu_seqlens: torch.Tensor | Sequence[int] | None,
    sizes: Sequence[int] | None,
    layout: SequenceLayout | None,
    normalise: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and the last state of `op`; `named` are its tensors by argument.

    Without "beta", positions do not erase earlier writes.
    """
    _check(op, named, chunk_size)
    dtype = torch.float32
    for each in named.values():
        dtype = torch.promote_types(dtype, each.dtype)
    query, key, value, g = (named[name] for name in ("query", "key", "value", "g"))
    batch, length, heads, _ = value.shape
    fragments = fragments_of(op, sizes, layout, length, group_name)
    lengths = fragments.lengths
    by_feature = g.dim() == 4
    if by_feature:
        chunk_size = 1 << (chunk_size - 1).bit_length()
    with torch.autocast(value.device.type, enabled=False):
        repeats = heads // key.shape[2]
        if repeats > 1:
            query, key = (t.repeat_interleave(repeats, 2) for t in (query, key))
        q, k, v, decay = (in_chunks(t, lengths, chunk_size, dtype) for t in (query, key, value, g))
        if normalise:
            q, k = _normalised(q), _normalised(k)
        q = q * (key.shape[-1] ** -0.5 if scale is None else scale)
        summed = decay.cumsum(2) if by_feature else decay.cumsum(2).unsqueeze(-1)
        strength = None
        if "beta" in named:
            strength = in_chunks(named["beta"], lengths, chunk_size, dtype)[..., None]
        seen, counts = None, counts_of(lengths, chunk_size)
        agreed = None if layout is None else torch.tensor(fragments.agreed)
        if cu_seqlens is not None:
            agreed, documents = documents_of(op, cu_seqlens, fragments, value.device)
            seen = seen_within(documents, counts, chunk_size)
        out, final = _chunked(q, k, v, summed, strength, seen, agreed, counts, group_name)
        out = out_of_chunks(out, lengths, batch)
        return out.to(query.dtype), final.view(batch, heads, *final.shape[1:])


def _chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor | None,
    seen: Seen | None,
    agreed: torch.Tensor | None,
    counts: list[int],
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (R, N, C, V) and the last states.

    `decay` is summed within each chunk: (R, N, C, 1) or (R, N, C, K). `seen` is for documents.
    """
    decayed = pairs if decay.shape[-1] == 1 else pairs_by_feature
    since_begin, to_end = decay.exp(), (decay[..., -1:, :] - decay).exp()
    weighted = None if strength is None else k * strength
    lefts = (q,) if weighted is None else (q, weighted)
    attended, *systems = decayed(lefts, k, decay)
    at_end = decay[..., -1, :].exp()
    if seen is not None:
        attended, systems = attended * seen.pairs, [each * seen.pairs for each in systems]
        since_begin, to_end = since_begin * seen.begin, to_end * seen.end
        at_end = at_end * seen.both
    values, erased = v, None
    if weighted is not None:
        # Within a chunk a position erases the writes of earlier ones: a triangular system.
        solved = torch.linalg.solve_triangular(
            systems[0],
            torch.cat([v * strength, weighted * since_begin], -1),
            upper=False,
            unitriangular=True,
        )
        values, erased = solved.split([v.shape[-1], k.shape[-1]], -1)
    written, states = torch.ops.symm_mem._delta_rule_states(
        k * to_end,
        erased,
        values,
        at_end.squeeze(-1) if decayed is pairs else at_end,
        agreed,
        counts,
        group_name,
    )
    out = (q * since_begin) @ before_chunks(states, counts) + attended @ written
    return out, states[:, -1]
