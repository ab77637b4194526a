"""Recurrences of a state for each head over a sequence that is spread over ranks in order.

Three stages, of which only the second needs other ranks:

    summary  what each chunk of positions does to any state: S to decay * S + keys^T (values -
             erased S)
    fold     the states around all chunks of all ranks (states.py)
    local    the outputs, from the states before the chunks

Linear attention, delta rules and their relatives differ in `summary` and `local` only, which are
functions of tensors in chunks.

Shapes: B samples, S positions of this rank, H heads of values; R = B * H rows that are independent
of each other, N chunks of C positions; states (K, V).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from symm_cp.group.memory import GroupLike, group_name
from symm_cp.ops.error_reports import entry_point
from symm_cp.ops.recurrent.chunks import Decay, counts_of, in_chunks, out_of_chunks
from symm_cp.ops.recurrent.documents import documents_of, seen_within
from symm_cp.ops.recurrent.fragments import fragments_of
from symm_cp.ops.recurrent.states import before_chunks
from symm_cp.schedule.layout import SequenceLayout
from symm_cp.tensors.dtypes import FLOATING, one_of


class Summary(NamedTuple):
    """What chunks do to a state S: decay * S + keys^T (values - erased S), where decay is given.

    Shapes: keys and erased (R, N, M, K), values (R, N, M, V), for any number M of writes.
    """

    keys: torch.Tensor
    values: torch.Tensor
    erased: torch.Tensor | None = None
    kept: tuple[torch.Tensor, ...] = ()  # for the local stage


#: Takes the decay and the tensors in chunks, (R, N, C, ...).
Summarise: TypeAlias = Callable[..., Summary]
#: Takes the decay, the states before chunks (R, N, K, V), what they wrote, `values - erased S`, and
#: what was kept; returns the output (R, N, C, V).
Local: TypeAlias = Callable[..., torch.Tensor]


def check_tensors(op: str, named: dict[str, torch.Tensor], chunk_size: int) -> None:
    """Raises `ValueError` or `TypeError` for tensors of a recurrence that do not fit."""
    first, *_ = named
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {name} is {tensor!r}, must be a tensor")
        if tensor.dtype not in FLOATING:
            raise TypeError(f"{op}: {name} is {tensor.dtype}, must be {one_of(FLOATING)}")
        device = named[first].device
        if tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device} and {first} on {device}")
    if chunk_size < 1:
        raise ValueError(f"{op}: {chunk_size=} must be at least 1")


@entry_point()
def recurrence(
    summary: Summarise,
    local: Local,
    tensors: Sequence[torch.Tensor],
    g: torch.Tensor,
    *,
    group: GroupLike,
    chunk_size: int = 64,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    layout: SequenceLayout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies a recurrence that two functions define to a sequence spread over ranks in order.

    Same result as, for the chunks of the whole sequence (per sample and head)::

        S = torch.zeros(K, V)  # with several ranks: the last state of the rank before
        decay, (keys, values, erased, kept) = Decay(g), summary(decay, *tensors)
        for chunk in chunks:
            before, written = S, values[chunk] - erased[chunk] @ S
            S = decay.at_end[chunk].unsqueeze(-1) * S + keys[chunk].T @ written
            out[chunk] = local(decay, before, written, *kept)

    All chunks of a rank are computed at once, but for the two lines in the middle, for which ranks
    wait for each other. `recurrent/linear_attention.py` and `recurrent/delta_rule.py` are examples.

    Args:
        summary: takes a `Decay` (chunks.py) and tensors in chunks, (R, N, C, ...) for R = B * heads
            rows and N chunks of C positions, padded with zeros; returns a `Summary`. A function of
            torch's differentiable ops.
        local: takes the decay, the states before chunks (R, N, K, V), what they wrote (R, N, M, V)
            and what the summary kept; returns the output in chunks, (R, N, C, V).
        tensors: (B, S, heads, ...), S positions of this rank: any number, even 0.
        g: (B, S, heads), the logarithm of the decay, at most 0; or (B, S, heads, K).
        group, chunk_size, cu_seqlens, sizes, layout: as in `gated_delta_rule`.

    Returns the output (B, S, heads, V) in the dtype of the first tensor, and the state (B, heads,
    K, V) at the end of this rank's part. Computed in float32, or float64 if an input is. Once
    differentiable. Dtypes and errors as in `gated_delta_rule`. Source: flash-linear-attention's
    `ops/common`, whose recurrences share one pass over chunk states.
    """
    op = "recurrence"
    if not callable(summary) or not callable(local):
        raise TypeError(f"{op}: {summary=} and {local=} must be functions")
    named = {f"tensors[{index}]": tensor for index, tensor in enumerate(tensors)}
    check_tensors(op, {**named, "g": g}, chunk_size)
    shape = g.shape[:3]
    for name, tensor in {**named, "g": g}.items():
        if tensor.dim() < 3 or tensor.shape[:3] != shape:
            raise ValueError(
                f"{op}: {name} {list(tensor.shape)} must begin with {list(shape)}, as g "
                f"{list(g.shape)}: (batch, positions, heads)"
            )
    if not named or g.dim() > 4:
        raise ValueError(f"{op}: needs tensors, and g {list(g.shape)} of 3 or 4 dimensions")
    return recur(
        op, summary, local, tensors, g, group_name(group), chunk_size=chunk_size,
        cu_seqlens=cu_seqlens, sizes=sizes, layout=layout,
    )  # fmt: skip


def recur(
    op: str,
    summary: Summarise,
    local: Local,
    tensors: Sequence[torch.Tensor],
    g: torch.Tensor,
    group_name: str,
    *,
    chunk_size: int,
    cu_seqlens: torch.Tensor | Sequence[int] | None,
    sizes: Sequence[int] | None,
    layout: SequenceLayout | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`recurrence`, for checked tensors; `op` is its name in errors."""
    batch, length, heads = g.shape[:3]
    dtype = torch.float32
    for each in (*tensors, g):
        dtype = torch.promote_types(dtype, each.dtype)
    fragments = fragments_of(op, sizes, layout, length, group_name)
    lengths = fragments.lengths
    if g.dim() == 4:
        chunk_size = 1 << (chunk_size - 1).bit_length()
    with torch.autocast(g.device.type, enabled=False):
        chunks = [in_chunks(tensor, lengths, chunk_size, dtype) for tensor in (*tensors, g)]
        seen, counts = None, counts_of(lengths, chunk_size)
        agreed = None if layout is None else torch.tensor(fragments.agreed, device="cpu")
        if cu_seqlens is not None:
            agreed, documents = documents_of(op, cu_seqlens, fragments, g.device)
            seen = seen_within(documents, counts, chunk_size)
        decay = Decay(chunks.pop(), seen)
        keys, values, erased, kept = summary(decay, *chunks)
        written, states = torch.ops.symm_mem._delta_rule_states(
            keys, erased, values, decay.at_end, agreed, counts, group_name
        )
        out = local(decay, before_chunks(states, counts), written, *kept)
        out = out_of_chunks(out, lengths, batch).to(tensors[0].dtype)
        return out, states[:, -1].view(batch, heads, *states.shape[2:])
