"""Code that the attention ops share, around the tiles: communication and the form of results.

Shapes: query (B, H, S_q, E), key (B, G, S_k, E) and value (B, G, S_k, V), this rank's shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from symm_cp import runtime
from symm_cp.cuda import has_streams
from symm_cp.group.memory import Group
from symm_cp.ops.attention.spec import AttentionSpec
from symm_cp.ops.attention.tiles import (
    dense_features,
    empty_output,
    rows_first,
)
from symm_cp.runtime.calls import GatherAndScatterCall, GatherCall
from symm_cp.tensors.dtypes import wide
from symm_cp.tensors.results import new_result

# From this many bytes of sums on, gradients travel in a ring on streams. Otherwise the sums for all
# ranks are stored three times, in two slots and where they arrive: 26 GB for a million tokens of
# Llama-3 8B's shapes. A ring stores two ranks' sums, and kernels of so many tokens hide its
# transfers; it adds in another order, so a smaller limit would change bits for no gain.
_RING_BYTES = 1 << 30

#: Tensors saved for a backward pass, and a gradient that it takes or returns.
Tensors: TypeAlias = tuple[torch.Tensor, ...]
Grad: TypeAlias = torch.Tensor | None


class ScoreTerms(NamedTuple):
    """Learnt tensors that a call adds to scores: sinks (H,) and a bias by distance (H, D)."""

    sinks: Grad = None
    bias: Grad = None


class AttentionInputs(NamedTuple):
    """Inputs of a backward pass: query, key and value, the results, and the output's gradient.

    The gradient of the log-sum-exp is part of `out`: see `with_grad_of_lse`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grad_out: torch.Tensor


def consume_keys(
    op: str,
    spec: AttentionSpec,
    group: Group | None,
    key: torch.Tensor,
    value: torch.Tensor,
    consume: Callable[[list[torch.Tensor], int], None],
    *details: object,
) -> None:
    """Calls `consume([key, value], owner)` for the shards of all ranks as they arrive. Collective.

    Peers' shards have the rows `spec.sent_rows(owner)`, this rank's has all rows.
    `details` are further values that must be identical on all ranks. Without a group, only this
    rank's shard exists.
    """
    shard = [dense_features(key), dense_features(value)]
    if group is None:
        consume(shard, 0)
        return
    rank, sent = group.rank, _sent(spec, group.rank, shard)
    call = GatherCall(
        group,
        sent,
        lambda shards, owner: consume(
            shard if owner == rank and sent is not shard else shards, owner
        ),
        spec.call_name(op, key, *details),
        shapes=spec.shard_shapes(key),
    )
    runtime.run(call)


def reduce_gradients(
    op: str,
    spec: AttentionSpec,
    group: Group | None,
    key: torch.Tensor,
    value: torch.Tensor,
    consume: Callable[[list[torch.Tensor], int, Tensors], None],
    *details: object,
) -> Tensors:
    """Returns the gradients of this rank's keys and values, summed over ranks. Collective.

    They have the dtype of sums; both may be views of one tensor. `group` and `details` are as in
    `consume_keys`.

    Calls `consume([key, value], owner, partials)` for the shards of all ranks as they arrive;
    `consume` writes this rank's part of their gradients to `partials`, shaped like keys and values.
    """
    shard = [dense_features(key), dense_features(value)]
    dtype = wide(key.dtype)
    if group is None:
        grads = tuple(rows_first(tensor, tensor.shape, dtype) for tensor in shard)
        consume(shard, 0, grads)
        return grads
    partials = spec.grad_shapes(key)
    rank, sent = group.rank, _sent(spec, group.rank, shard)
    # Peers add to `total`: all gradients, or a copy of the rows that peers see.
    total = new_result(key, partials[rank], dtype)
    if sent is shard:
        grads, shared = grads_in(total, shard), []
    else:
        grads = tuple(rows_first(tensor, tensor.shape, dtype) for tensor in shard)
        shared = [grad[:, :, spec.sent_rows(rank)] for grad in grads]

    def write(shards: list[torch.Tensor], owner: int, partial: torch.Tensor) -> None:
        if owner != rank or sent is shard:
            consume(shards, owner, grads_in(partial, shards))
            return
        consume(shard, owner, grads)
        for part, rows in zip(grads_in(partial, sent), shared, strict=True):
            part.copy_(rows)

    call = GatherAndScatterCall(
        group,
        sent,
        write,
        total,
        spec.call_name(op, key, *details),
        shapes=spec.shard_shapes(key),
        partials=partials,
        ring=spec.method == "alltoall" or _needs_ring(key.device, partials, dtype),
    )
    runtime.run(call)
    if shared:
        for rows, part in zip(shared, grads_in(total, sent), strict=True):
            rows.copy_(part)
    return grads


def _needs_ring(
    device: torch.device, partials: Sequence[Sequence[int]], dtype: torch.dtype
) -> bool:
    """Whether there is no room for the sums for all ranks; the same on all ranks."""
    nbytes = sum(map(math.prod, partials)) * dtype.itemsize
    return has_streams(device) and len(partials) > 2 and nbytes >= _RING_BYTES


def _sent(spec: AttentionSpec, rank: int, shard: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the rows of this rank's keys and values to send to peers; `shard` itself if all."""
    rows = spec.sent_rows(rank)
    if rows.stop - rows.start == shard[0].shape[2]:
        return shard
    return [tensor[:, :, rows] for tensor in shard]


def grads_in(memory: torch.Tensor, shard: Sequence[torch.Tensor]) -> Tensors:
    """Returns views of a shard's consecutive gradients; heads of a position are adjacent."""
    parts = memory.split([tensor.numel() for tensor in shard])
    shapes = [(B, S, G, features) for B, G, S, features in (tensor.shape for tensor in shard)]
    return tuple(
        part.view(shape).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True)
    )


def heads_in_rows(tensor: torch.Tensor, *, own_memory: bool = False) -> torch.Tensor:
    """Returns (B, H, S, E) with the heads of a row adjacent: the strides of `fake_like`.

    With `own_memory` the result shares no memory, as ops require of their results.
    """
    shared = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    if tensor.transpose(1, 2).is_contiguous() and not (own_memory and shared):
        return tensor
    return rows_first(tensor, tensor.shape, tensor.dtype).copy_(tensor)


def fake_like(tensor: torch.Tensor, features: int | None = None) -> torch.Tensor:
    """Returns an empty tensor of the shape (or of other features); heads of a row are adjacent."""
    B, H, S, E = tensor.shape
    return tensor.new_empty(B, S, H, E if features is None else features).transpose(1, 2)


def fake_results(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tensors like the output and the log-sum-exp, without computing them."""
    lse = query.new_empty(query.shape[:3], dtype=wide(query.dtype))
    return empty_output(dense_features(query), value.shape[3]), lse
