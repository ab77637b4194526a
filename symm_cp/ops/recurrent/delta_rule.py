"""The gated delta rule over a sequence that is spread over ranks in order.

Shapes: B samples, S positions of this rank, H heads of values (a multiple of the heads of keys),
K and V features; R = B * H rows that are independent of each other, N chunks of C positions.

A chunk takes the state S_i to S_{i+1} = d_i S_i + k_i^T (u_i - w_i S_i). Everything but the states
is computed from this rank's part alone, before and after them. The states form a chain over all
chunks of all ranks, which is computed once and not twice: ranks work on different rows at the same
time, and pass the states of a row on to the next rank (`Runtime.relay`). With P pieces and W ranks
the chain takes P + W - 1 steps instead of P.

A decay d_i is one number for a row and chunk, or one for each feature of its keys (KDA).

Sources: Yang et al., "Gated Delta Networks" (2024), for the form in chunks; Kimi Team, "Kimi
Linear" (2025), for a decay of each feature.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from symm_cp import runtime
from symm_cp.group.memory import GroupLike, group_name
from symm_cp.ops import autocast
from symm_cp.ops.common import group_of, rank_in, what_is, world_size_of
from symm_cp.ops.op import LEFT_TO_TORCH, Gradient, NoGradient, Op, arguments, declare
from symm_cp.ops.recurrent.scan import pieces_of
from symm_cp.ops.telling import entry_point
from symm_cp.tensors.dtypes import FLOATING, one_of
from symm_cp.tensors.results import contiguous, new_result

_OP = "gated_delta_rule"
_STATES = "_delta_rule_states"
_GRADS = "_delta_rule_grads"


def _check_rows(op: str, keys: torch.Tensor, erased: torch.Tensor, decay: torch.Tensor) -> None:
    decays = (keys.shape[:2], (*keys.shape[:2], keys.shape[-1]))
    if keys.dim() != 4 or erased.shape != keys.shape or decay.shape not in decays:
        raise ValueError(
            f"{op}: keys {list(keys.shape)} must be (R, N, C, K), erased {list(erased.shape)} the "
            f"same and decay {list(decay.shape)} (R, N) or (R, N, K)"
        )


def _for_states(decay: torch.Tensor) -> torch.Tensor:
    """(R, N) or (R, N, K) as factors of states, (R, N, 1 or K, 1)."""
    return decay[..., None] if decay.dim() == 3 else decay[..., None, None]


def _states_kernel(
    keys: torch.Tensor,
    erased: torch.Tensor,
    values: torch.Tensor,
    decay: torch.Tensor,
    documents: torch.Tensor | None,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the chunks' writes, (R, N, C, V), and the states around them, (R, N + 1, K, V).

    `documents`: what must be equal on all ranks, of integers; compared where the host can read it.
    """
    group = group_of(group_name)
    _check_rows(_STATES, keys, erased, decay)
    rows, chunks, _, features = keys.shape
    width = values.shape[-1]
    keys, erased, values, decay = (contiguous(t) for t in (keys, erased, values, decay))
    written = new_result(values, values.shape)
    states = new_result(values, (rows, chunks + 1, features, width))
    split = pieces_of(rows)
    taken, decay = keys.transpose(-1, -2), _for_states(decay)

    def step(piece: int, received: torch.Tensor | None, passed: torch.Tensor | None) -> None:
        k, w, u, d, v, s = (
            split.of(piece, t).unbind(1) for t in (taken, erased, values, decay, written, states)
        )
        if received is None:
            s[0].zero_()
        else:
            s[0].copy_(received)
        for i in range(chunks):
            v[i].copy_(torch.baddbmm(u[i], w[i], s[i], alpha=-1))
            s[i + 1].copy_(torch.baddbmm(s[i] * d[i], k[i], v[i]))
        if passed is not None:
            passed.copy_(s[chunks])

    # Ranks may have different numbers of chunks.
    detail = f"{rows=} {features=} {width=}"
    if documents is not None and documents.device.type == "cpu":
        detail += f" documents #{zlib.crc32(documents.numpy().tobytes()):08x}"
    name = what_is(_STATES, values.new_empty(0), detail=detail)
    shapes = [(size, features, width) for size in split.sizes]
    runtime.of(values, group).relay(group, step, values, shapes, name)
    return written, states


def _grads_kernel(
    grad_written: torch.Tensor,
    grad_states: torch.Tensor,
    keys: torch.Tensor,
    erased: torch.Tensor,
    decay: torch.Tensor,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the total gradients of the chunks' writes, and of the states after the chunks."""
    group = group_of(group_name)
    _check_rows(_GRADS, keys, erased, decay)
    rows, chunks, _, features = keys.shape
    width = grad_written.shape[-1]
    grad_written, grad_states, keys, erased, decay = (
        contiguous(t) for t in (grad_written, grad_states, keys, erased, decay)
    )
    total_written = new_result(grad_written, grad_written.shape)
    totals = new_result(grad_states, (rows, chunks, features, width))
    split = pieces_of(rows)
    transposed, decay = erased.transpose(-1, -2), _for_states(decay)

    def step(piece: int, received: torch.Tensor | None, passed: torch.Tensor | None) -> None:
        k, w, d, dv, ds, v, s = (
            split.of(piece, t).unbind(1)
            for t in (keys, transposed, decay, grad_written, grad_states, total_written, totals)
        )
        total = ds[chunks] if received is None else ds[chunks] + received
        for i in reversed(range(chunks)):
            s[i].copy_(total)
            v[i].copy_(torch.baddbmm(dv[i], k[i], total))
            total = torch.addcmul(ds[i], total, d[i])
            total = torch.baddbmm(total, w[i], v[i], alpha=-1)
        if passed is not None:
            passed.copy_(total)

    name = what_is(_GRADS, grad_states.new_empty(0), detail=f"{rows=} {features=} {width=}")
    shapes = [(size, features, width) for size in split.sizes]
    runtime.of(grad_states, group).relay(group, step, grad_states, shapes, name, reverse=True)
    return total_written, totals


def _states_fake(
    keys: torch.Tensor,
    erased: torch.Tensor,
    values: torch.Tensor,
    decay: torch.Tensor,
    documents: torch.Tensor | None,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    world_size_of(group_name)
    _check_rows(_STATES, keys, erased, decay)
    rows, chunks, _, features = keys.shape
    states = values.new_empty((rows, chunks + 1, features, values.shape[-1]))
    return values.new_empty(values.shape), states


def _grads_fake(
    grad_written: torch.Tensor,
    grad_states: torch.Tensor,
    keys: torch.Tensor,
    erased: torch.Tensor,
    decay: torch.Tensor,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    world_size_of(group_name)
    _check_rows(_GRADS, keys, erased, decay)
    rows, chunks, _, features = keys.shape
    totals = grad_states.new_empty((rows, chunks, features, grad_written.shape[-1]))
    return grad_written.new_empty(grad_written.shape), totals


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    keys, erased, _, decay, _, ctx.group_name = inputs
    ctx.save_for_backward(keys, erased, decay, *output)


def _backward(
    ctx: Any, grad_written: torch.Tensor, grad_states: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    keys, erased, decay, written, states = ctx.saved_tensors
    total_written, totals = torch.ops.symm_mem._delta_rule_grads(
        grad_written, grad_states, keys, erased, decay, ctx.group_name
    )
    before = states[:, :-1]
    grad_keys = written @ totals.transpose(-1, -2)
    grad_erased = -(total_written @ before.transpose(-1, -2))
    grad_decay = (totals * before).sum(-1 if decay.dim() == 3 else (-1, -2))
    return grad_keys, grad_erased, total_written, grad_decay, None, None


declare(
    Op(
        name=_STATES,
        schema=(
            "(Tensor keys, Tensor erased, Tensor values, Tensor decay, Tensor? documents, "
            "str group_name) -> (Tensor, Tensor)"
        ),
        kernel=_states_kernel,
        fake=_states_fake,
        gradient=Gradient(_backward, _setup),  # once differentiable
        autocast=autocast.as_they_are,
        vmap=LEFT_TO_TORCH,
        example=lambda on: arguments(
            on.rand(2, 3, 4, 5), on.rand(2, 3, 4, 5), on.rand(2, 3, 4, 6), on.rand(2, 3), None,
            on.group_name,
        ),
        internal=True,
    ),
    Op(
        name=_GRADS,
        schema=(
            "(Tensor grad_written, Tensor grad_states, Tensor keys, Tensor erased, Tensor decay, "
            "str group_name) -> (Tensor, Tensor)"
        ),
        kernel=_grads_kernel,
        fake=_grads_fake,
        gradient=NoGradient("second derivatives of gated_delta_rule are not supported"),
        autocast=autocast.as_they_are,
        vmap=LEFT_TO_TORCH,
        example=lambda on: arguments(
            on.rand(2, 3, 4, 6), on.rand(2, 4, 5, 6), on.rand(2, 3, 4, 5), on.rand(2, 3, 4, 5),
            on.rand(2, 3), on.group_name,
        ),
        internal=True,
    ),
)  # fmt: skip


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int,
) -> None:
    named = {"query": query, "key": key, "value": value, "g": g, "beta": beta}
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{_OP}: {name} is {tensor!r}, must be a tensor")
        if tensor.dtype not in FLOATING:
            raise TypeError(f"{_OP}: {name} is {tensor.dtype}, must be {one_of(FLOATING)}")
        if tensor.device != query.device:
            raise ValueError(f"{_OP}: {name} is on {tensor.device} and query on {query.device}")
    if key.dim() != 4 or value.dim() != 4 or query.shape != key.shape:
        raise ValueError(
            f"{_OP}: query {list(query.shape)} and key {list(key.shape)} must be (B, S, H, K), "
            f"value {list(value.shape)} (B, S, heads, V)"
        )
    heads = key.shape[2]
    if value.shape[:2] != key.shape[:2] or heads == 0 or value.shape[2] % heads != 0:
        raise ValueError(
            f"{_OP}: value {list(value.shape)} must have the batch and length of key "
            f"{list(key.shape)}, and a multiple of its heads"
        )
    of_heads = value.shape[:3]
    if beta.shape != of_heads:
        raise ValueError(
            f"{_OP}: beta {list(beta.shape)} must be {list(of_heads)}: one number for each "
            "position and head of value"
        )
    of_features = (*of_heads, key.shape[3])
    if g.shape not in (of_heads, of_features):
        raise ValueError(
            f"{_OP}: g {list(g.shape)} must be {list(of_heads)} or {list(of_features)}: one number "
            "for each position and head of value, or one for each feature of its key"
        )
    if chunk_size < 1:
        raise ValueError(f"{_OP}: {chunk_size=} must be at least 1")


def _in_chunks(tensor: torch.Tensor, chunk_size: int, dtype: torch.dtype) -> torch.Tensor:
    """(B, S, H, ...) as (B * H, N, C, ...), with zeros behind the last position."""
    rows = tensor.transpose(1, 2).to(dtype)
    after = -tensor.shape[1] % chunk_size
    rows = F.pad(rows, (0, 0) * (tensor.dim() - 3) + (0, after))
    shape = (tensor.shape[0] * tensor.shape[2], -1, chunk_size, *tensor.shape[3:])
    chunks = (tensor.shape[1] + after) // chunk_size
    return rows.reshape(shape[0], chunks, *shape[2:])


def _normalised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + 1e-6)


@entry_point
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule over a sequence of which each rank holds a part, in rank order.

    Same result as (per sample and head; with `normalise`, q and k of length 1)::

        S = torch.zeros(K, V)  # with several ranks: the last state of the rank before
        for t in range(length):
            if t in cu_seqlens:
                S = torch.zeros(K, V)
            S = g[t].exp() * S  # or g[t].exp().unsqueeze(-1) * S
            S = S + torch.outer(k[t], beta[t] * (v[t] - k[t] @ S))
            out[t] = scale * q[t] @ S

    Args:
        query, key: (B, S, H, K), S positions of this rank: any number, also 0.
        value: (B, S, heads, V); each head of keys serves `heads / H` consecutive ones.
        g: (B, S, heads), the logarithm of the decay, at most 0; or (B, S, heads, K), one for each
            feature of a key (Kimi Delta Attention).
        beta: (B, S, heads), how much a position overwrites.
        group: a ProcessGroup, a 1-D DeviceMesh or a group name.
        scale: by default 1 / sqrt(K).
        chunk_size: how many positions are computed at once; with a decay of each feature rounded
            up to a power of 2.
        normalise: divide queries and keys by their lengths.
        cu_seqlens: documents + 1 boundaries of packed documents, in positions of the whole
            sequence: each begins with a state of zeros. The same for all samples; a sequence of
            ints, or a 1-D tensor of int32 or int64.
        sizes: with `cu_seqlens`, the length of every rank's part; by default all are as long as
            this rank's.

    Returns the output (B, S, heads, V) in the dtype of `query`, and the state (B, heads, K, V) at
    the end of this rank's part. Computed in float32, or float64 if an input is. Once
    differentiable; results have the same bits in every run. Inputs may be float64, float32,
    bfloat16 and float16, mixed. Raises `ValueError` or `TypeError` for arguments that do not fit,
    before any communication; `RuntimeError` when a peer fails or disagrees. Source:
    `chunk_gated_delta_rule` and `chunk_kda` of flash-linear-attention, and of transformers.
    """
    _check(query, key, value, g, beta, chunk_size)
    dtype = torch.float32
    for each in (query, key, value, g, beta):
        dtype = torch.promote_types(dtype, each.dtype)
    batch, length, heads, width = value.shape
    name, by_feature = group_name(group), g.dim() == 4
    if by_feature:
        chunk_size = 1 << (chunk_size - 1).bit_length()
    with torch.autocast(value.device.type, enabled=False):
        repeats = heads // key.shape[2]
        if repeats > 1:
            query, key = (t.repeat_interleave(repeats, 2) for t in (query, key))
        q, k, v, decay, strength = (
            _in_chunks(t, chunk_size, dtype) for t in (query, key, value, g, beta)
        )
        if normalise:
            q, k = _normalised(q), _normalised(k)
        q = q * (key.shape[-1] ** -0.5 if scale is None else scale)
        summed = decay.cumsum(2) if by_feature else decay.cumsum(2).unsqueeze(-1)
        seen = documents = None
        if cu_seqlens is not None:
            documents, own = _documents(cu_seqlens, sizes, length, name, value.device)
            seen = _seen_within(own, q.shape[1], q.shape[2])
        out, final = _chunked(q, k, v, summed, strength[..., None], seen, documents, name)
        positions = out.shape[1] * out.shape[2]
        out = out.view(batch, heads, positions, width)[:, :, :length].transpose(1, 2)
        return out.to(query.dtype), final.view(batch, heads, *final.shape[1:])


def _chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    seen: Seen | None,
    documents: torch.Tensor | None,
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (R, N, C, V) and the last states.

    `decay` is summed within each chunk: (R, N, C, 1), or (R, N, C, K). `seen`: with `documents`.
    """
    pairs = _pairs if decay.shape[-1] == 1 else _pairs_by_feature
    since_begin, to_end = decay.exp(), (decay[..., -1:, :] - decay).exp()
    weighted = k * strength
    # Within a chunk a position erases the writes of earlier ones: a triangular system.
    system, attended = pairs((weighted, q), k, decay)
    at_end = decay[..., -1, :].exp()
    if seen is not None:
        system, attended = system * seen.pairs, attended * seen.pairs
        since_begin, to_end = since_begin * seen.begin, to_end * seen.end
        at_end = at_end * seen.both
    solved = torch.linalg.solve_triangular(
        system,
        torch.cat([v * strength, weighted * since_begin], -1),
        upper=False,
        unitriangular=True,
    )
    values, erased = solved.split([v.shape[-1], k.shape[-1]], -1)
    written, states = torch.ops.symm_mem._delta_rule_states(
        k * to_end,
        erased,
        values,
        at_end.squeeze(-1) if pairs is _pairs else at_end,
        documents,
        group_name,
    )
    out = (q * since_begin) @ states[:, :-1] + attended @ written
    return out, states[:, -1]


class Seen(NamedTuple):
    """Which positions of a chunk are of one document, as 0 or 1.

    Shapes: `pairs` (N, C, C), of a position and another one; `begin` and `end` (N, C, 1), of a
    position and the last one before the chunk, or of the chunk; `both` (N, 1), of those two.
    """

    pairs: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    both: torch.Tensor


def _documents(
    cu_seqlens: torch.Tensor | Sequence[int],
    sizes: Sequence[int] | None,
    length: int,
    group_name: str,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what ranks must agree on, and the documents of this rank's positions.

    Of the position before them, too.
    """
    ranks, rank = world_size_of(group_name), rank_in(group_name)
    lengths = [length] * ranks if sizes is None else list(sizes)
    if len(lengths) != ranks or lengths[rank] != length:
        raise ValueError(
            f"{_OP}: sizes={lengths} must have {ranks} numbers, for rank {rank} the {length} "
            "positions of value"
        )
    edges = torch.as_tensor(cu_seqlens)
    if edges.dim() != 1 or edges.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{_OP}: cu_seqlens of shape {list(edges.shape)} and {edges.dtype} must be a sequence "
            "of ints, or a 1-D tensor of int32 or int64"
        )
    if not torch.compiler.is_compiling():
        known, total = edges.tolist(), sum(lengths)
        if known[:1] != [0] or known[-1] != total or known != sorted(known):
            raise ValueError(
                f"{_OP}: cu_seqlens {known} must ascend from 0 to the {total} positions of the "
                "whole sequence"
            )
    begin = sum(lengths[:rank])
    positions = torch.arange(begin - 1, begin + length, device=device)
    edges = edges.to(torch.int64)
    agreed = torch.cat([torch.tensor(lengths, device=edges.device), edges])
    return agreed, torch.searchsorted(edges[1:].to(device), positions, right=True)


def _seen_within(documents: torch.Tensor, chunks: int, size: int) -> Seen:
    after = chunks * size + 1 - len(documents)  # what fills the last chunk is of the last document
    filled = torch.cat([documents, documents[-1:].expand(after)])
    inside, before = filled[1:].view(chunks, size), filled[:-1:size][:chunks, None]
    last = inside[:, -1:]
    return Seen(
        inside[:, :, None] == inside[:, None, :],
        (inside == before)[..., None],
        (inside == last)[..., None],
        last == before,
    )


Pair = tuple[torch.Tensor, torch.Tensor]


def _pairs(lefts: Pair, right: torch.Tensor, decay: torch.Tensor) -> Pair:
    """Returns for each left [.., t, s] = left[.., t] @ right[.., s] * (decay[t] - decay[s]).exp().

    For s > t it is 0. Shapes: left and right (R, N, C, K), decay (R, N, C, 1).
    """
    size = right.shape[-2]
    # exp of entries above the diagonal could overflow.
    above = torch.ones(size, size, dtype=torch.bool, device=right.device).triu(1)
    since = (decay - decay.transpose(-1, -2)).masked_fill(above, -math.inf).exp()
    first, second = ((left @ right.transpose(-1, -2)) * since for left in lefts)
    return first, second


def _pairs_by_feature(lefts: Pair, right: torch.Tensor, decay: torch.Tensor) -> Pair:
    """As `_pairs`, for a decay of each feature, (R, N, C, K); C is a power of 2.

    The decay is no factor of the product of two rows then, but of the rows: one is decayed since
    some position between both, the other one up to it, so that no exponent is above 0. Blocks of
    1, 2, 4, ... positions share that position: the last one of their first half.
    """
    size, rows = right.shape[-2], torch.stack(lefts)
    blocks = (rows * right).sum(-1)[..., None, None]
    half = 1
    while half < size:
        at = decay.unflatten(-2, (-1, 2, half))
        begins, ends = at[..., 0, :, :], at[..., 1, :, :]
        middle = begins[..., -1:, :]
        later = rows.unflatten(-2, (-1, 2, half))[..., 1, :, :] * (ends - middle).exp()
        earlier = right.unflatten(-2, (-1, 2, half))[..., 0, :, :] * (middle - begins).exp()
        both = blocks.unflatten(-3, (-1, 2))
        first, second = both[..., 0, :, :], both[..., 1, :, :]
        between = later @ earlier.transpose(-1, -2)
        upper = torch.cat([first, torch.zeros_like(first)], -1)
        blocks = torch.cat([upper, torch.cat([between, second], -1)], -2)
        half *= 2
    of_first, of_second = blocks.squeeze(-3).unbind()
    return of_first, of_second
